"""When snapshots are read: late while nobody waits for them, at once where something is decided."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from operator import eq
from pathlib import Path

import pytest

from router.core.events import SnapshotReceived
from router.core.types import WorkerSpec
from router.engines import snapshots
from router.engines import zmq_reader as socket_reader
from router.engines.snapshots import SnapshotClient
from tests.support.scripted import until
from tests.support.state_stream import TIMEOUT_S, Engine, delta


class Router:
    """A client, and which snapshots it has taken in."""

    def __init__(self, endpoint: str) -> None:
        self.arrived: list[int] = []
        self.awaited = False
        self.client = SnapshotClient(
            [WorkerSpec("w", "http://h:1", snapshots=endpoint)],
            self._apply,
            lambda _: False,
            time.monotonic,
            awaited=lambda: self.awaited,
        )

    def _apply(self, event: SnapshotReceived) -> None:
        self.arrived.append(event.snapshot.sequence)

    def decide(self, sequence: int) -> None:
        """Read, and nothing else, until a snapshot is there: the event loop stands still."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while sequence not in self.arrived and time.monotonic() < deadline_s:
            self.client.sockets.read()
            time.sleep(0.001)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(f"ipc://{tmp_path}/s")
    yield engine
    engine.close()


@pytest.fixture
async def router(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Router]:
    """One that has just read, and would not read again for an hour."""
    for name in ("_LONG_PAUSE_S", "_LONGEST_PAUSE_S"):
        monkeypatch.setattr(socket_reader, name, 3600.0)
    router = Router(f"ipc://{tmp_path}/s")
    router.client.start()
    await engine.subscribed()
    await engine.asked()  # what ZMQ has to say of this connection comes before the snapshot, too
    await engine.send(delta(1))
    await until(lambda: router.client.sockets._pause is not None)
    router.decide(1)
    yield router
    router.client.close()


async def test_a_decision_has_what_has_come_read_first(engine: Engine, router: Router) -> None:
    await engine.send(delta(2), delta(3))
    router.decide(3)
    assert router.arrived == [1, 2, 3]


async def test_requests_that_begin_to_wait_end_a_long_pause(engine: Engine, router: Router) -> None:
    router.awaited = True
    router.client.sockets.hasten()
    for arrived in ([1, 2], [1, 2, 3], [1, 2, 3, 4]):
        await engine.send(delta(arrived[-1]))
        await until(partial(eq, router.arrived, arrived))


async def test_after_a_silence_the_first_one_wakes_the_router(
    engine: Engine, router: Router
) -> None:
    router.client.sockets.hasten()
    await until(lambda: router.client.sockets._pause is None)
    await engine.send(delta(2))
    await until(lambda: router.arrived == [1, 2])


async def test_nothing_is_read_once_it_is_closed(engine: Engine, router: Router) -> None:
    await engine.send(delta(2))
    router.client.close()
    time.sleep(0.002)  # noqa: ASYNC251 - else this would be too soon after the last reading
    router.client.sockets.read()
    assert router.arrived == [1]


async def test_what_fails_in_reading_does_not_stop_it(
    engine: Engine, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    router.awaited = True
    router.client.sockets.hasten()
    failures: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: failures.append(what))
    with monkeypatch.context() as broken:
        broken.setattr(snapshots, "decode", None)
        await engine.send(delta(2))
        await until(lambda: len(failures) == 1)
    await engine.send(delta(3))
    await until(lambda: router.arrived == [1, 3])
