"""Agents' messages over real sockets, as the router takes them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from engine_patches.agent.power_publisher import Door, PowerPublisher, publish
from engine_patches.agent.ranks import Rank
from engine_patches.plugin.settings import PlugInError
from engine_patches.power.source import PowerReading
from router.core.energy.joules import METER_SILENT_S
from router.core.events import PowerTold
from router.core.types import WorkerSpec
from router.engines.curve_keys import KeyPair, read_key_pair, write_key_pair
from router.engines.power_agents import PowerAgents
from tests.support.server import free_port

TIMEOUT_S = 60.0
WRONG_W = 13.0


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Router:
    """What agents have told of workers."""

    def __init__(self, specs: list[WorkerSpec], keys: KeyPair | None = None) -> None:
        self.clock = Clock()
        self.told: dict[str, PowerTold] = {}
        self.agents = PowerAgents(specs, self.take, self.clock, keys)

    def take(self, told: PowerTold) -> None:
        if told.power_w == WRONG_W:
            raise ValueError("what nobody expects")
        self.told[told.worker_id] = told

    def power_w(self, worker: str) -> float | None:
        return self.told[worker].power_w if worker in self.told else -1.0


class Agent:
    """Tells what it is told to, over and over."""

    def __init__(self, door: Door) -> None:
        self.publisher = PowerPublisher(door)

    async def tell_until(self, router: Router, worker: str, power_w: float | None) -> None:
        """Say it under the worker's name until the router has it."""
        async with asyncio.timeout(TIMEOUT_S):
            while router.power_w(worker) != power_w:
                self.publisher.tell([Rank(worker, ("0",))], [PowerReading(power_w, 1.0)], 1e9)
                await asyncio.sleep(0.02)


@asynccontextmanager
async def following(router: Router) -> AsyncIterator[None]:
    task = asyncio.create_task(router.agents.run())
    yield
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/power"


def spec(worker: str, endpoint: str, key: str | None = None, rank: int | None = None) -> WorkerSpec:
    return WorkerSpec(worker, "http://w", rank=rank, server_key=key, power=endpoint)


async def test_power_is_told_while_the_agent_speaks(
    endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    router = Router([spec("a", endpoint), spec("b", endpoint)])
    agent = Agent(Door(endpoint))
    async with following(router):
        await agent.tell_until(router, "a", 300.0)
        await agent.tell_until(router, "a", None)
        router.clock.now_s = 5.0
        await agent.tell_until(router, "a", 310.0)
        assert router.told == {"a": PowerTold("a", 310.0, 1.0, 5.0)}
        async with asyncio.timeout(TIMEOUT_S):
            while not caplog.records:
                router.clock.now_s += METER_SILENT_S  # a message may still have been on its way
                await asyncio.sleep(0.02)
        await agent.tell_until(router, "a", 320.0)
    agent.publisher.close()
    (record,) = caplog.records
    assert f"{endpoint}: nothing heard for 10 s, so that power is unknown" in record.getMessage()
    assert router.agents.received >= 4
    assert router.agents.broken == 0


async def test_ranks_tell_workers_apart_unless_two_are_the_same(
    endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    specs = [spec("a", endpoint, rank=0), spec("b", endpoint, rank=1), spec("c", endpoint, rank=2)]
    router = Router([*specs, spec("d", endpoint, rank=2)])
    publisher = PowerPublisher(Door(endpoint))
    ranks = [Rank("", (str(gpu),)) for gpu in range(4)]
    async with following(router), asyncio.timeout(TIMEOUT_S):
        while not caplog.records:
            publisher.tell(ranks, [PowerReading(100.0 + number) for number in range(4)], 1e9)
            await asyncio.sleep(0.02)
    publisher.close()
    assert {told.worker_id: told.power_w for told in router.told.values()} == {"a": 100, "b": 101}
    assert router.agents.broken >= 1
    assert "several workers may be rank 2 there" in caplog.records[0].getMessage()


async def test_what_is_no_message_is_said_once(
    endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    router = Router([spec("a", endpoint)])
    agent = Agent(Door(endpoint))
    async with following(router):
        await agent.tell_until(router, "a", 300.0)
        for _ in range(2):
            agent.publisher._socket.send(b"nonsense")
        await agent.tell_until(router, "a", 301.0)
    agent.publisher.close()
    (record,) = caplog.records
    assert router.agents.broken == 2
    assert "not a message of an agent" in record.getMessage()


async def test_an_endpoint_that_cannot_be_dialled_costs_only_its_power(
    endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    router = Router([spec("a", f"ipc:///{'x' * 200}"), spec("b", endpoint)])
    agent = Agent(Door(endpoint))
    async with following(router):
        await agent.tell_until(router, "b", 300.0)
    agent.publisher.close()
    assert "no connection (File name too long" in caplog.records[0].getMessage()


async def test_what_a_message_leads_to_does_not_end_the_following(
    endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    router = Router([spec("a", endpoint)])
    agent = Agent(Door(endpoint))
    async with following(router):
        await agent.tell_until(router, "a", 300.0)
        for _ in range(3):
            agent.publisher.tell([Rank("a", ("0",))], [PowerReading(WRONG_W)], 1e9)
        await agent.tell_until(router, "a", 301.0)
    agent.publisher.close()
    assert router.agents.failures == 3
    said = [each for each in caplog.records if "could not be applied" in each.getMessage()]
    assert len(said) == 2, "of the first, the second, the fourth and so on"


async def test_agents_of_workers_that_come_and_go(endpoint: str) -> None:
    router = Router([WorkerSpec("a", "http://a")])
    agent = Agent(Door(endpoint))
    async with following(router):
        await asyncio.sleep(0)
        router.agents.join(spec("b", endpoint))
        router.agents.join(spec("c", endpoint))
        await agent.tell_until(router, "b", 300.0)
        router.agents.leave("b")
        router.told.clear()
        await agent.tell_until(router, "c", 310.0)
        agent.publisher.tell([Rank("b", ("0",))], [PowerReading(1.0, 1.0)], 1e9)
        await agent.tell_until(router, "c", 320.0)
        router.agents.leave("a")
        router.agents.leave("c")
        assert (list(router.told), router.agents._agents) == (["c"], {})
        router.agents.join(spec("b", endpoint))
        await agent.tell_until(router, "b", 330.0)
    agent.publisher.close()


async def test_only_a_router_with_an_allowed_key_listens(tmp_path: Path, endpoint: str) -> None:
    files = {name: tmp_path / name for name in ("agent", "router", "other")}
    public = {name: write_key_pair(file) for name, file in files.items()}
    agent = Agent(Door(endpoint, str(files["agent"]), (public["router"],)))
    specs = [spec("a", endpoint, public["agent"])]
    allowed = Router(specs, read_key_pair(str(files["router"])))
    refused = Router(specs, read_key_pair(str(files["other"])))
    async with following(refused), following(allowed):
        await agent.tell_until(allowed, "a", 300.0)
        assert refused.told == {}
    agent.publisher.close()


def test_a_door_must_be_safe_and_free(tmp_path: Path) -> None:
    with pytest.raises(PlugInError, match=r"--bind tcp://\*:5 can be reached from other machines"):
        PowerPublisher(Door("tcp://*:5"))
    with pytest.raises(PlugInError, match="--secret-key-file and --allowed-key go together"):
        PowerPublisher(Door("ipc://x", "keys"))
    with pytest.raises(PlugInError, match="--secret-key-file: there is no file"):
        PowerPublisher(Door("ipc://x", str(tmp_path / "none"), ("k",)))
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    first = PowerPublisher(Door(endpoint))
    with pytest.raises(PlugInError, match=f"cannot bind {endpoint} .Address already in use"):
        PowerPublisher(Door(endpoint))
    first.close()
    second = PowerPublisher(Door(f"tcp://[::1]:{free_port()}"))
    second.close()


def test_readings_are_told_until_the_end(endpoint: str) -> None:
    class Source:
        reads = 0

        def read(self, now_s: float) -> PowerReading:
            self.reads += 1
            return PowerReading()

    source, publisher = Source(), PowerPublisher(Door(endpoint))
    publish(publisher, {Rank("a", ("0",)): source}, Clock(), Clock(), lambda: source.reads == 3)
    publisher.close()
    assert source.reads == 3
