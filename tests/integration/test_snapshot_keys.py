"""State streams behind CURVE, over real sockets: without a key nobody gets or changes anything."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from engine_patches.stream.curve import CurveGate
from engine_patches.stream.publisher import SnapshotPublisher, StepReport
from router.core.errors import ConfigError
from router.core.events import SnapshotReceived
from router.core.types import Snapshot, WorkerSpec
from router.engines.curve_keys import KeyPair, read_key_pair, write_key_pair
from router.engines.snapshots import SnapshotClient
from tests.support.scripted import soon, until
from tests.support.server import free_port

NOTHING = StepReport(0, 0.0, 0.0)


class Open:
    """A publisher that lets everybody in."""

    def __init__(self, endpoint: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.publisher = SnapshotPublisher(
            endpoint,
            group="default",
            worker="w",
            rank=0,
            initial=NOTHING,
            context=self.context,
            prepare=self.prepare,
        )

    def prepare(self, socket: zmq.Socket[bytes]) -> None:
        """No keys."""

    def say(self, step: int) -> None:
        self.publisher.publish(StepReport(step, 0.0, 0.0))
        self.publisher.poll()

    def close(self) -> None:
        self.publisher.close()
        self.context.destroy(linger=0)


class Engine(Open):
    """A publisher that lets in the routers whose keys it is given, by the plug-in's own gate."""

    def __init__(self, endpoint: str, keys: str, allowed: list[str]) -> None:
        self._keys = keys
        self._allowed = allowed
        self._gate: CurveGate | None = None
        self._monitors: list[zmq.Socket[Any]] = []
        super().__init__(endpoint)

    def prepare(self, socket: zmq.Socket[bytes]) -> None:
        self._gate = self._gate or CurveGate(self.context, self._keys, self._allowed)
        self._gate.secure(socket)
        self._monitors.append(socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL))

    def turned_away(self) -> bool:
        """Whether a peer without keys was not let in, since this was asked last."""
        return any(monitor.poll(0) and recv_monitor_message(monitor) for monitor in self._monitors)

    def close(self) -> None:
        assert self._gate is not None
        self._gate.close()
        super().close()


class Router:
    """A router's end of the stream, and what has arrived there."""

    def __init__(self, endpoint: str, keys: KeyPair | None, server_key: str | None) -> None:
        self.arrived: asyncio.Queue[Snapshot] = asyncio.Queue()
        spec = WorkerSpec("w", "http://w", snapshots=endpoint, server_key=server_key)
        self.client = SnapshotClient([spec], self._apply, lambda _: False, lambda: 0.0, keys)

    def _apply(self, event: SnapshotReceived) -> None:
        self.arrived.put_nowait(event.snapshot)

    async def hear(self, engine: Open) -> Snapshot:
        """A step that the engine reports while the router listens."""
        step = engine.publisher.sequence
        while self.arrived.empty():
            step += 1
            engine.say(step)
            await asyncio.sleep(0.01)
        return await soon(self.arrived.get())


class Keys:
    """Key pairs by name, in files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.public: dict[str, str] = {}

    def __call__(self, name: str) -> str:
        """The file."""
        file = self._folder / name
        if name not in self.public:
            self.public[name] = write_key_pair(file)
        return str(file)

    def pair(self, name: str) -> KeyPair:
        return read_key_pair(self(name))


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    made = Keys(tmp_path)
    for name in ("engine", "router", "stranger"):
        made(name)
    return made


@pytest.fixture
def endpoint() -> str:
    return f"tcp://127.0.0.1:{free_port(2)}"


@contextmanager
def open_(*parts: Any) -> Iterator[None]:
    """Start the routers among them, close all."""
    try:
        for part in parts:
            if isinstance(part, Router):
                part.client.start()
        yield
    finally:
        for part in parts:
            (part.client if isinstance(part, Router) else part).close()


async def test_only_a_router_with_an_allowed_key_hears_the_engine(
    endpoint: str, keys: Keys
) -> None:
    engine = Engine(endpoint, keys("engine"), [keys.public["router"]])
    router = Router(endpoint, keys.pair("router"), keys.public["engine"])
    stranger = Router(endpoint, keys.pair("stranger"), keys.public["engine"])
    keyless = Router(endpoint, None, None)
    with open_(engine, router, stranger, keyless):
        await until(lambda: stranger.client.handshakes_failed > 0)
        for _ in range(5):
            await asyncio.wait_for(router.hear(engine), 60)
        assert router.client.problem("w") is None
        assert "do not accept each other's keys" in str(stranger.client.problem("w"))
        assert (stranger.client.received_bytes, keyless.client.received_bytes) == (0, 0)
        assert (router.client.broken, router.client.handshakes_failed) == (0, 0)


async def test_an_engine_of_another_key_is_not_heard_until_it_has_the_right_one(
    endpoint: str, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    router = Router(endpoint, keys.pair("router"), keys.public["engine"])
    wrong = Engine(endpoint, keys("stranger"), [keys.public["router"]])
    with open_(router):
        with open_(wrong):
            await until(lambda: router.client.handshakes_failed > 1)
            wrong.say(1)
            assert router.client.problem("w") is not None
            assert router.client.received_bytes == 0
        assert len([one for one in caplog.records if "each other's keys" in one.message]) == 1
        right = Engine(endpoint, keys("engine"), [keys.public["router"]])
        with open_(right):
            heard = await asyncio.wait_for(router.hear(right), 60)
            assert heard.epoch == right.publisher.epoch
            assert router.client.problem("w") is None


async def test_a_router_that_was_turned_away_is_let_in_later(endpoint: str, keys: Keys) -> None:
    router = Router(endpoint, keys.pair("router"), keys.public["engine"])
    with open_(router):
        with open_(Engine(endpoint, keys("engine"), [keys.public["stranger"]])):
            await until(lambda: router.client.handshakes_failed > 0)
        with open_(engine := Engine(endpoint, keys("engine"), [keys.public["router"]])):
            await asyncio.wait_for(router.hear(engine), 60)
            assert router.client.problem("w") is None


async def test_a_publisher_without_a_key_changes_nothing(endpoint: str, keys: Keys) -> None:
    router = Router(endpoint, keys.pair("router"), keys.public["engine"])
    with open_(router, engine := Open(endpoint)):
        while not router.client.handshakes_failed:
            engine.say(1)
            await asyncio.sleep(0.01)
        assert router.client.received_bytes == 0
        assert router.arrived.empty()


async def test_an_engine_that_asked_for_keys_and_does_so_no_more_is_heard(
    endpoint: str, keys: Keys
) -> None:
    router = Router(endpoint, None, None)
    with open_(router):
        with open_(secured := Engine(endpoint, keys("engine"), [keys.public["stranger"]])):
            await until(secured.turned_away)
        with open_(engine := Open(endpoint)):
            assert (await asyncio.wait_for(router.hear(engine), 60)).epoch == engine.publisher.epoch


async def test_a_router_without_keys_says_so(endpoint: str, keys: Keys) -> None:
    router = Router(endpoint, None, keys.public["engine"])
    with pytest.raises(ConfigError, match="worker w has a server_key"):
        router.client.start()
    router.client.close()
