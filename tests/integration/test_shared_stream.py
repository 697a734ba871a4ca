"""Several workers' snapshots through one socket: each counts for the worker that sent it."""

import re
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from router.core.errors import ConfigError
from router.core.events import SnapshotReceived
from router.core.types import Snapshot, WorkerSpec
from router.core.wire import encode
from router.engines import snapshots, zmq_streams
from router.engines.snapshots import SILENT_S, SnapshotClient
from router.engines.zmq_streams import SILENCE_S
from tests.support.scripted import TIMEOUT_S, until
from tests.support.state_stream import Engine, delta, full

WORKERS = ("a", "b")


class Router:
    """A client of two workers that keeps what arrives.

    Attributes:
        arrived: worker, epoch and sequence of each snapshot.
        wanted: workers whose full snapshots are wanted.
        now_s: what has passed beside what has really passed.
        up: workers whose engines answer.
    """

    def __init__(self, endpoints: dict[str, str]) -> None:
        self.arrived: list[tuple[str, str, int]] = []
        self.wanted: set[str] = set()
        self.now_s = 0.0
        self.up = set(endpoints)
        self.client = SnapshotClient(
            [WorkerSpec(i, f"http://{i}:1", snapshots=at) for i, at in endpoints.items()],
            self._apply,
            self.wanted.__contains__,
            self.clock,
            up=lambda worker_id: worker_id in self.up,
        )

    def clock(self) -> float:
        return time.monotonic() + self.now_s

    def _apply(self, event: SnapshotReceived) -> None:
        snapshot = event.snapshot
        self.arrived.append((event.worker_id, snapshot.epoch, snapshot.sequence))


@pytest.fixture
def endpoints(tmp_path: Path) -> dict[str, str]:
    return {name: f"ipc://{tmp_path}/{name}" for name in WORKERS}


@pytest.fixture
def engines(endpoints: dict[str, str]) -> Iterator[dict[str, Engine]]:
    engines = {name: Engine(endpoint) for name, endpoint in endpoints.items()}
    yield engines
    for engine in engines.values():
        engine.close()


@pytest.fixture
async def router(endpoints: dict[str, str]) -> AsyncIterator[Router]:
    router = Router(endpoints)
    router.client.start()
    yield router
    router.client.close()


async def introduced(router: Router, engines: dict[str, Engine]) -> None:
    """Both have subscribers, and have answered the first request."""
    for name, engine in engines.items():
        await engine.subscribed()
        await engine.answer(of(name, "full", 1))
    await until(lambda: len(router.arrived) == len(WORKERS))


def of(worker: str, kind: str, sequence: int, epoch: str | None = None) -> Snapshot:
    made = {"full": full, "delta": delta}[kind](sequence, epoch or f"epoch-{worker}")
    return msgspec.structs.replace(made, worker=worker)


async def test_each_snapshot_is_its_senders(router: Router, engines: dict[str, Engine]) -> None:
    await introduced(router, engines)
    for sequence in range(2, 300):
        for name, engine in engines.items():
            await engine.send(of(name, "delta", sequence))
    await until(lambda: len(router.arrived) == 2 * 299)
    for name in WORKERS:
        mine = [at[1:] for at in router.arrived if at[0] == name]
        assert mine == [(f"epoch-{name}", sequence) for sequence in range(1, 300)]
    assert router.client.refused == router.client.broken == 0


async def test_what_nobody_has_answered_for_changes_nothing(
    router: Router, engines: dict[str, Engine]
) -> None:
    for engine in engines.values():
        await engine.subscribed()
    await engines["a"].send(of("a", "full", 1), of("a", "delta", 2))
    await engines["b"].answer(of("b", "full", 5))
    await until(lambda: bool(router.arrived))
    await engines["a"].answer(of("a", "full", 2))
    await until(lambda: len(router.arrived) == 2)  # the stream is another socket
    await engines["a"].send(of("a", "delta", 3))
    await until(lambda: len(router.arrived) == 3)
    assert router.arrived == [("b", "epoch-b", 5), ("a", "epoch-a", 2), ("a", "epoch-a", 3)]


async def test_an_engine_that_is_back_is_asked_who_it_is(
    endpoints: dict[str, str], router: Router, engines: dict[str, Engine]
) -> None:
    await introduced(router, engines)
    engines["a"].close()
    engines["a"] = Engine(endpoints["a"])
    await engines["a"].subscribed()
    # Until then its first request would be repeated, whoever speaks.
    await until(lambda: router.client._streams["a"].asked is None)
    asked = router.client.full_requests
    router.wanted.add("a")  # as for one that was down
    await engines["b"].send(of("b", "delta", 2))
    await until(lambda: len(router.arrived) == 3)
    assert router.client.full_requests == asked
    await engines["a"].send(of("a", "delta", 1, "second"))
    await engines["a"].answer(of("a", "full", 1, "second"))
    router.wanted.clear()
    await until(lambda: len(router.arrived) == 4)
    await engines["a"].send(of("a", "delta", 2, "second"))
    await until(lambda: len(router.arrived) == 5)
    assert router.arrived[3:] == [("a", "second", 1), ("a", "second", 2)]


async def test_a_silent_one_is_asked_though_nothing_is_known_to_be_missed(
    endpoints: dict[str, str], router: Router, engines: dict[str, Engine]
) -> None:
    await introduced(router, engines)
    engines["a"].close()
    engines["a"] = Engine(endpoints["a"])
    await engines["a"].subscribed()
    router.now_s += 2 * SILENT_S
    answered = False
    sequence = 1

    def heard() -> bool:
        return ("b", "epoch-b", sequence) in router.arrived

    while not answered:
        sequence += 1
        await engines["b"].send(of("b", "delta", sequence))
        await until(heard)
        await engines["a"].send(of("a", "delta", sequence, "second"))
        answered = bool(await engines["a"].requests.poll(100))
    await engines["a"].answer(of("a", "full", sequence, "second"))
    await until(lambda: ("a", "second", sequence) in router.arrived)
    assert not await engines["b"].requests.poll(0)  # it had been heard


async def test_a_strangers_stream_is_refused_wherever_it_comes(
    router: Router, engines: dict[str, Engine]
) -> None:
    await engines["a"].subscribed()
    await engines["a"].answer(of("somebody", "full", 1))
    await until(lambda: router.client.refused == 1)
    await engines["a"].send(of("somebody", "delta", 2))
    await until(lambda: router.client.refused == 2)
    assert "that of worker somebody, not of worker a" in str(router.client.problem("a"))
    assert not router.arrived


async def test_a_stranger_cannot_take_anothers_stream_away(
    router: Router, engines: dict[str, Engine]
) -> None:
    """As when two workers' endpoints lead to one engine, which is one of them."""
    for engine in engines.values():
        await engine.subscribed()
    await engines["a"].answer(of("a", "full", 1))
    await until(lambda: len(router.arrived) == 1)
    await engines["b"].answer(of("a", "full", 1))
    await until(lambda: router.client.refused == 1)
    await engines["a"].send(of("a", "delta", 2))
    await until(lambda: len(router.arrived) + router.client.refused == 3)
    assert router.arrived == [("a", "epoch-a", 1), ("a", "epoch-a", 2)]


async def test_a_stream_is_its_owners_even_if_a_stranger_came_first(
    router: Router, engines: dict[str, Engine]
) -> None:
    for engine in engines.values():
        await engine.subscribed()
    await engines["b"].answer(of("a", "full", 1))
    await until(lambda: router.client.refused == 1)
    await engines["a"].answer(of("a", "full", 1))
    await until(lambda: len(router.arrived) == 1)
    await engines["b"].send(of("a", "delta", 2))
    await engines["a"].send(of("a", "delta", 3))
    await until(lambda: len(router.arrived) == 3)
    assert {at[0] for at in router.arrived} == {"a"}


async def test_a_silent_worker_is_seen_however_much_the_others_say(
    router: Router, engines: dict[str, Engine]
) -> None:
    await introduced(router, engines)
    silent, heard = (router.client._streams[name] for name in WORKERS)
    assert not silent.silent(router.clock())
    router.now_s += 2 * SILENCE_S
    await engines["b"].send(of("b", "delta", 2))
    await until(lambda: len(router.arrived) == 3)
    zmq.Socket.shadow(engines["b"].stream).send(encode(of("b", "delta", 3)))
    assert silent.channel.socket.poll(int(TIMEOUT_S) * 1000)  # it waits to be read
    assert silent.silent(router.clock())
    assert not heard.silent(router.clock())
    await engines["a"].send(of("a", "delta", 2))
    await until(lambda: len(router.arrived) == 5)
    assert not silent.silent(router.clock())


def quick(monkeypatch: pytest.MonkeyPatch, silence_s: float) -> None:
    for module in (snapshots, zmq_streams):
        monkeypatch.setattr(module, "SILENCE_S", silence_s)


async def test_a_stream_that_does_not_come_is_said_once_while_its_engine_is_up(
    endpoints: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    quick(monkeypatch, 0.02)
    router = Router(endpoints)
    router.up = {"a"}
    router.wanted.add("a")

    def told(what: str) -> bool:
        return re.match(what, router.client.problem("a") or "") is not None

    router.client.start()
    try:
        await until(lambda: told(rf"nothing received from {endpoints['a']} for \d+ s: is the plug"))
        router.now_s += 600
        await until(lambda: told(r".* for 6\d\d s.* 256 slots are assumed: give slots=N$"))
        assert router.client.problem("b") is None
        assert [record.getMessage()[:19] for record in caplog.records] == ["a: nothing received"]
        router.up.clear()
        await until(lambda: router.client.problem("a") is None)
        router.up.add("a")
        await until(lambda: told("nothing received"))
        quick(monkeypatch, 1000.0)
        router.now_s += 10_000
        await until(lambda: told(r".* for 1\d{4} s"))  # it is looked at no more
        engine = Engine(endpoints["a"])
        await engine.answer(of("a", "full", 1))
        await until(lambda: router.client.problem("a") is None)
        engine.close()
    finally:
        router.client.close()


async def test_who_may_only_not_have_been_read_is_not_silent(
    router: Router, engines: dict[str, Engine]
) -> None:
    await introduced(router, engines)
    router.now_s += 2 * SILENCE_S
    zmq.Socket.shadow(engines["b"].stream).send(encode(of("b", "delta", 2)))
    stream = router.client._streams["a"]
    assert stream.channel.socket.poll(int(TIMEOUT_S) * 1000)
    assert not stream.silent(router.clock())
    router.client.sockets.read_soon(stream.channel.socket)  # to look at a socket eats its signal
    await until(lambda: len(router.arrived) == 3)
    assert stream.silent(router.clock())


async def test_a_message_that_cannot_be_read_names_who_may_have_sent_it(
    router: Router, engines: dict[str, Engine], caplog: pytest.LogCaptureFixture
) -> None:
    await engines["b"].subscribed()
    await engines["b"].send(b"\xc1")
    await until(lambda: router.client.broken == 1)
    assert caplog.records[-1].getMessage().startswith("a or another: snapshot refused: ")


async def test_streams_of_workers_that_come_and_go(
    tmp_path: Path, endpoints: dict[str, str], router: Router, engines: dict[str, Engine]
) -> None:
    await introduced(router, engines)
    engines["c"] = Engine(f"ipc://{tmp_path}/c")
    router.client.join(WorkerSpec("c", "http://c:1", snapshots=f"ipc://{tmp_path}/c"))
    router.client.join(WorkerSpec("mute", "http://m:1"))
    await engines["c"].subscribed()
    await engines["c"].answer(of("c", "full", 7))
    await until(lambda: ("c", "epoch-c", 7) in router.arrived)
    for worker in ("mute", "c", "a"):
        router.client.leave(worker)
    await engines["b"].send(of("a", "delta", 2), of("b", "delta", 2))
    await until(lambda: ("b", "epoch-b", 2) in router.arrived)
    assert ("b", "epoch-a", 2) not in router.arrived  # said before it left, and read late
    router.client.join(WorkerSpec("a", "http://a:1", snapshots=endpoints["a"]))
    await engines["a"].answer(of("a", "full", 5))
    await until(lambda: ("a", "epoch-a", 5) in router.arrived)
    await until(lambda: not router.client._streams["a"].channel.gone & {"epoch-a"})
    router.client.leave("a")
    router.client.leave("b")
    assert not router.client.sockets._readers
    router.client.join(WorkerSpec("b", "http://b:1", snapshots=endpoints["b"]))
    await engines["b"].answer(of("b", "full", 9))
    await until(lambda: ("b", "epoch-b", 9) in router.arrived)


async def test_a_worker_whose_stream_cannot_be_had_does_not_join(router: Router) -> None:
    with pytest.raises(ConfigError, match="server_key, and the router has no keys"):
        router.client.join(WorkerSpec("c", "http://c:1", server_key="k" * 40))
    with pytest.raises(ConfigError, match="snapshots 'ipc://xxx"):
        router.client.join(WorkerSpec("c", "http://c:1", snapshots="ipc://" + 200 * "x"))
    assert list(router.client._streams) == list(WORKERS)
    assert all(len(c.streams) == len(WORKERS) for c in router.client._channels.values())
