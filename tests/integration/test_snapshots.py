import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from time import monotonic as clock
from time import sleep
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from engine_patches.stream.publisher import SnapshotPublisher, StepReport
from router.core.errors import ConfigError
from router.core.events import SnapshotReceived
from router.core.state.cluster import Cluster
from router.core.step_time import StepBudget
from router.core.types import MOST_ENDED, MOST_RUNNING, WorkerSpec
from router.core.wire import MOST_BYTES, BudgetMessage, decode_budget, encode
from router.engines.snapshots import SnapshotClient
from router.engines.zmq_streams import FULL_INTERVAL_S, Stream
from tests.support.core import fields_of
from tests.support.scripted import until
from tests.support.state_stream import NOTHING, TIMEOUT_S, Engine, delta, full


class Router:
    """A client whose snapshots can be awaited."""

    def __init__(self, endpoint: str) -> None:
        self.arrived: asyncio.Queue[SnapshotReceived] = asyncio.Queue()
        self.wanted = False
        self.client = SnapshotClient(
            [WorkerSpec("w", "http://h:1", snapshots=endpoint), WorkerSpec("mute", "http://h:2")],
            self.arrived.put_nowait,
            lambda _: self.wanted,
            lambda: 42.0,
            prompt_budget=lambda _: StepBudget(512, 4),
        )

    async def next(self) -> SnapshotReceived:
        return await asyncio.wait_for(self.arrived.get(), TIMEOUT_S)


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s"


@pytest.fixture
def engine(endpoint: str) -> Iterator[Engine]:
    engine = Engine(endpoint)
    yield engine
    engine.close()


@pytest.fixture
async def router(endpoint: str) -> AsyncIterator[Router]:
    router = Router(endpoint)
    router.client.start()
    yield router
    router.client.close()


async def test_a_full_snapshot_is_asked_for_at_the_start(engine: Engine, router: Router) -> None:
    await engine.answer(full(7))
    assert await router.next() == SnapshotReceived("w", full(7), 42.0)
    assert router.client.full_requests == 1
    assert router.client.received == 1
    assert router.client.received_bytes == len(encode(full(7)))


async def test_the_stream_arrives_whole_and_in_order(engine: Engine, router: Router) -> None:
    await engine.subscribed()
    sent = [delta(sequence) for sequence in range(1, 901)]
    await engine.send(*sent)
    assert [(await router.next()).snapshot for _ in sent] == sent
    assert router.client.received == len(sent)


async def test_a_budget_is_told_to_engines_that_take_it(engine: Engine, router: Router) -> None:
    await engine.answer(full(1))
    await engine.subscribed()
    for time_s, kept in ((10.0, None), (10.1, 0)):
        await engine.send(replace(delta(2), time_s=time_s, prompt_budget=kept))
    while not (message := (await engine.requests.recv_multipart())[-1]):
        pass  # the full snapshot was asked for again
    told = decode_budget(message)
    assert (told.epoch, told.seen_s, told.tokens, told.every) == ("epoch", 10.1, 512, 4)


async def test_an_engine_that_takes_no_budget_is_named_once(
    engine: Engine, router: Router, caplog: pytest.LogCaptureFixture
) -> None:
    await engine.subscribed()
    sent = [delta(sequence) for sequence in range(1, 200)]
    await engine.send(*sent)
    for _ in sent:
        await router.next()
    said = [one.message for one in caplog.records if "prompt budget" in one.message]
    assert said == [
        "w: takes no prompt budget, so that nothing bounds its prompts: its log says why, unless "
        "its plug-in is an older one or has prompt_budget false"
    ]


@pytest.mark.parametrize(
    ("tokens", "time_s", "epoch", "owed"),
    [
        (512, 10.04, "epoch", False),
        (512, 11.2, "epoch", False),
        (512, 11.3, "epoch", True),
        (530, 10.5, "epoch", False),
        (400, 10.04, "epoch", False),
        (400, 10.06, "epoch", True),
        (512, 10.0, "another", True),
        (400, 9.0, "epoch", False),
        (512, 4.0, "epoch", True),
    ],
)
def test_a_budget_is_told_again(tokens: int, time_s: float, epoch: str, owed: bool) -> None:
    """In time before its lease ends, and when it has changed by much."""
    unused: Any = None
    stream = Stream(WorkerSpec("w", "http://h:1"), None, "ipc://x", unused, unused)
    assert stream.owes_budget(StepBudget(512), delta(1))
    stream.told = BudgetMessage("r", "epoch", 10.0, 512)
    assert stream.owes_budget(StepBudget(tokens), replace(delta(2, epoch), time_s=time_s)) is owed
    changed = replace(delta(2, epoch), time_s=10.06)
    assert stream.owes_budget(StepBudget(512, 20), changed), "windows are another budget"


async def test_a_gap_is_mended_by_a_full_snapshot(engine: Engine, endpoint: str) -> None:
    cluster = Cluster([WorkerSpec("w", "http://h:1", snapshots=endpoint)])
    applied = asyncio.Event()

    def apply(event: SnapshotReceived) -> None:
        cluster.apply(event)
        applied.set()

    def full_wanted(worker_id: str) -> bool:
        feed = cluster.worker(worker_id).feed
        return feed is not None and feed.full_wanted

    async def until(condition: Callable[[], bool]) -> None:
        while not condition():
            applied.clear()
            await asyncio.wait_for(applied.wait(), TIMEOUT_S)

    client = SnapshotClient([cluster.worker("w").spec], apply, full_wanted, lambda: 0.0)
    client.start()
    try:
        await engine.subscribed()
        await engine.answer(full(1))
        await until(lambda: cluster.worker("w").load_tokens == 15)
        await engine.send(delta(2), delta(5))
        await engine.answer(full(9))
        await until(lambda: client.received == 4)
        assert not full_wanted("w")
        assert cluster.worker("w").load_tokens == 15
        assert client.full_requests == 2
    finally:
        client.close()


async def test_a_router_that_did_not_read_for_a_while_recovers_by_a_full_snapshot(
    endpoint: str,
) -> None:
    """Long enough for what ZMQ does to connections that are not read, over a full queue."""
    publisher = SnapshotPublisher(
        endpoint, group="default", worker="w", rank=0, initial=StepReport(0, 0.0, 0.0)
    )
    cluster = Cluster([WorkerSpec("w", "http://h:1", snapshots=endpoint)])
    worker = cluster.worker("w")

    def full_wanted(_: str) -> bool:
        return worker.feed is None or worker.feed.full_wanted

    def publish(first: int, last: int) -> None:
        for step in range(first, last):
            rows = [(f"x{i}", 10 + i, step - i, 0, 0, None) for i in range(step % 7)]
            publisher.publish(StepReport(step, 0.0, 0.0, rows=rows))

    def apply(event: SnapshotReceived) -> None:
        cluster.apply(event)

    def is_right(last: int) -> bool:
        right = sum(10 + last for _ in range(last % 7))
        return worker.feed is not None and (worker.feed.sequence, worker.load_tokens) == (
            publisher.sequence,
            right,
        )

    async def go_on(step: int) -> int:
        """Steps until the router is up to date with them."""
        async with asyncio.timeout(TIMEOUT_S):
            while not is_right(step) or full_wanted("w"):
                step += 1
                publish(step, step + 1)
                publisher.poll()
                await asyncio.sleep(0.02)
        return step

    client = SnapshotClient([worker.spec], apply, full_wanted, lambda: 0.0)
    client.start()
    try:
        step = await go_on(0)
        publish(step + 1, step + 8001)
        sleep(4)  # noqa: ASYNC251 - the router stands still
        assert not is_right(step + 8000)
        await go_on(step + 8000)
        assert worker.feed is not None
        assert worker.feed.gaps > 0
    finally:
        client.close()
        publisher.close()


async def test_requests_repeat_while_wanted_but_not_too_often(
    engine: Engine, router: Router
) -> None:
    router.wanted = True
    started_s = asyncio.get_running_loop().time()
    await engine.subscribed()
    await engine.send(*(delta(sequence) for sequence in range(100)))
    for _ in range(3):
        await engine.asked()
    assert asyncio.get_running_loop().time() - started_s >= 2 * FULL_INTERVAL_S - 0.01
    router.wanted = False


async def test_broken_messages_are_counted_and_logged_once_per_reason(
    engine: Engine, router: Router, caplog: pytest.LogCaptureFixture
) -> None:
    await engine.subscribed()
    newer = msgspec.msgpack.encode({**fields_of(NOTHING), "version": 2})
    short = msgspec.msgpack.encode({"version": 1})
    await engine.send(newer, b"\xc1", newer, short, b"", b"\xc1", delta(1))
    assert (await router.next()).snapshot == delta(1)
    assert router.client.broken == 6
    assert router.client.received == 1
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 4
    assert all(warning.startswith("w: snapshot refused: ") for warning in warnings)
    assert "snapshot schema 2, this router schema 1" in warnings[0]


async def test_the_stream_of_another_worker_is_refused_until_the_right_one_comes(
    engine: Engine, router: Router, caplog: pytest.LogCaptureFixture
) -> None:
    await engine.subscribed()
    theirs = msgspec.structs.replace(delta(1, "other"), worker="theirs")
    await engine.send(theirs, msgspec.structs.replace(theirs, sequence=2))
    await until(lambda: router.client.refused == 2)
    assert "that of worker theirs, not of worker w" in str(router.client.problem("w"))
    assert len(caplog.records) == 1
    await engine.send(delta(1))
    assert (await router.next()).snapshot == delta(1)
    assert (router.client.problem("w"), router.client.problem("mute")) == (None, None)
    assert router.client.received == 1


async def test_what_a_plug_in_cannot_read_is_said_once(
    engine: Engine, router: Router, caplog: pytest.LogCaptureFixture
) -> None:
    await engine.subscribed()
    part, told = {"unreported": ("power",)}, []
    for message in (delta(1), delta(2)):
        await engine.send(msgspec.structs.replace(message, **part))
        told.append((await router.next()).snapshot.unreported)
    assert told == [("power",)] * 2
    assert router.client.problem("w") is None
    blind = msgspec.structs.replace(delta(3), kind="stateless", unreported=("state", "power"))
    await engine.send(blind, blind)
    assert (await router.next()).snapshot == blind
    said = "its engine's plug-in cannot read %s of this vLLM; the engine's log says why"
    assert router.client.problem("w") == said % "state, power"
    await engine.answer(full(4))
    await router.next()
    await router.next()
    assert router.client.problem("w") is None
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [f"w: {said % what}" for what in ("power", "state, power", "nothing")]


async def test_fields_that_are_not_known_are_ignored(engine: Engine, router: Router) -> None:
    await engine.subscribed()
    await engine.send(msgspec.msgpack.encode({**fields_of(delta(1)), "colour": "red"}))
    assert (await router.next()).snapshot == delta(1)


async def test_a_snapshot_that_cannot_be_applied_does_not_stop_the_next(
    engine: Engine, endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    second = asyncio.Event()

    def apply(event: SnapshotReceived) -> None:
        if event.snapshot.sequence == 1:
            raise ValueError("surprise")
        second.set()

    spec = WorkerSpec("w", "http://h:1", snapshots=endpoint)
    client = SnapshotClient([spec], apply, lambda _: False, lambda: 0.0)
    client.start()
    try:
        await engine.subscribed()
        await engine.send(delta(1), delta(2))
        await asyncio.wait_for(second.wait(), TIMEOUT_S)
    finally:
        client.close()
    assert client.failures == 1
    assert "w: a snapshot could not be applied" in caplog.text


async def test_an_engine_that_comes_late_or_again_is_heard(endpoint: str, router: Router) -> None:
    for epoch in ("first", "second"):
        engine = Engine(endpoint)
        await engine.subscribed()
        await engine.send(delta(1, epoch))
        assert (await router.next()).snapshot.epoch == epoch
        engine.close()


async def test_requests_do_not_pile_up_for_an_engine_that_is_away(
    endpoint: str, router: Router
) -> None:
    for _ in range(50):
        router.client._ask(router.client._streams["w"])
    engine = Engine(endpoint)
    await engine.asked()
    await engine.subscribed()
    await engine.send(delta(1))
    await router.next()
    assert not await engine.requests.poll(100)
    engine.close()


async def test_closing_drops_what_no_engine_has_taken(endpoint: str) -> None:
    router = Router(endpoint)
    router.client.start()
    router.client.close()
    router.client.close()


async def test_an_endpoint_that_zmq_refuses() -> None:
    router = Router("tcp://not a host:5")
    with pytest.raises(ConfigError, match=r"snapshots 'tcp://not a host:5': "):
        router.client.start()
    router.client.close()


async def test_ipv6_endpoints() -> None:
    router = Router("tcp://[::1]:30005")
    router.client.start()
    router.client.close()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"running": [{"id": "x"}] * (MOST_RUNNING + 1)}, "length <= 16384"),
        ({"finished": ["x"] * (MOST_ENDED + 1)}, "length <= 65536"),
        ({"admission": "x" * (MOST_BYTES + 1)}, "at most 4194304 are read"),
        (
            {"running": [{"id": "x", "prompt_tokens": 1, "generated_tokens": -1}]},
            r"Expected `int` >= 0 - at `\$.running\[0\].generated_tokens`",
        ),
    ],
)
async def test_what_is_refused_is_said_once_and_the_next_counts(
    engine: Engine,
    router: Router,
    fields: dict[str, object],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await engine.subscribed()
    await engine.answer(full(1))
    await router.next()
    router.wanted = True
    refused = msgspec.msgpack.encode({**fields_of(delta(2)), **fields})
    await engine.send(refused, refused, delta(3))
    assert (await router.next()).snapshot == delta(3)
    problem = str(router.client.problem("w"))
    assert re.search(reason, problem)
    assert problem.startswith("snapshot refused: ")
    assert [record.getMessage() for record in caplog.records] == [f"w: {problem}"]
    assert router.client.broken == 2
    await engine.answer(full(3))
    await router.next()
    assert router.client.problem("w") is None


async def test_what_zmq_does_not_hold_ends_its_connection_and_the_next_one_counts(
    engine: Engine, router: Router
) -> None:
    await engine.subscribed()
    await engine.send(bytes(4 * MOST_BYTES + 1))
    await engine.subscribed()  # it is gone,
    await engine.subscribed()  # and has connected anew
    await engine.send(delta(3))
    assert (await router.next()).snapshot == delta(3)
    assert router.client.broken == 0


async def test_a_fault_is_said_once_and_ends_nothing(
    engine: Engine, endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    taken: list[int] = []

    def apply(event: SnapshotReceived) -> None:
        taken.append(event.snapshot.sequence)
        if len(taken) <= 3:
            raise ValueError("a fault")

    client = SnapshotClient(
        [WorkerSpec("w", "http://h:1", snapshots=endpoint)], apply, lambda _: False, clock
    )
    client.start()
    try:
        await engine.subscribed()
        await engine.send(delta(1), delta(2), delta(3))
        await until(lambda: client.failures == 3)
        assert client.problem("w") == "a snapshot could not be applied: ValueError('a fault')"
        assert len(caplog.records) == 1
        await engine.answer(full(4))
        await until(lambda: client.problem("w") is None)
        assert taken == [1, 2, 3, 4]
    finally:
        client.close()


@pytest.mark.parametrize(
    ("configured", "effect"), [(8, "stay empty"), (300, "queue there"), (None, ""), (256, "")]
)
async def test_slots_that_differ_from_the_engines_are_said_once_per_change(
    engine: Engine,
    endpoint: str,
    configured: int | None,
    effect: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    taken: list[SnapshotReceived] = []
    spec = WorkerSpec("w", "http://h:1", snapshots=endpoint, slots=configured)
    client = SnapshotClient([spec], taken.append, lambda _: False, clock)
    client.start()
    try:
        await engine.subscribed()
        await engine.send(delta(1), delta(2))
        await until(lambda: len(taken) == 2)
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == bool(effect)
        for line in said:
            assert line.startswith(
                f"w: configured with slots={configured}, but its engine runs 256"
            )
            assert effect in line
            assert "set it to 256" in line
        await engine.send(msgspec.structs.replace(delta(3), slots=16), delta(4))
        await until(lambda: len(taken) == 4)
        assert len(caplog.records) == {8: 3, 300: 3, None: 0, 256: 1}[configured]
    finally:
        client.close()
