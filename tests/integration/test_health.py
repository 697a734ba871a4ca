import asyncio
import json
import os
import resource
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from router.core.events import WorkerDown, WorkerUp
from router.core.types import ASLEEP, PAUSED, WorkerSpec
from router.engines.health_checks import HealthMonitor, HealthSettings
from tests.support.scripted import TIMEOUT_S, until

SHORT_S = 0.5
MODELS = json.dumps({"object": "list", "data": [{"id": "tiny", "object": "model"}]}).encode()


class Engine:
    """An HTTP server that answers as it is told; each connection serves one request."""

    def __init__(self) -> None:
        self.health = 200
        self.models = MODELS
        self.models_status = 200
        self.rests: dict[str, tuple[int, bytes]] = {}
        self.free = asyncio.Event()
        self.free.set()
        self.leaves_after = ""
        self.asked: asyncio.Queue[str] = asyncio.Queue()
        self.port = 0
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        except asyncio.IncompleteReadError:  # the client has left
            writer.close()
            return
        self.asked.put_nowait(path)
        await self.free.wait()
        if path == self.leaves_after:
            await self.stop()
        pages = {"/health": (self.health, b""), "/v1/models": (self.models_status, self.models)}
        status, body = (pages | self.rests).get(path, (404, b""))
        head = f"HTTP/1.1 {status} x\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        writer.close()


class Watched:
    """A monitor that runs, and what it has said."""

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        interval_s: float = 0.01,
        timeout_s: float = TIMEOUT_S,
        failures: int = 3,
    ) -> None:
        self.events: asyncio.Queue[WorkerUp | WorkerDown] = asyncio.Queue()
        self.models: asyncio.Queue[tuple[str, Sequence[str]]] = asyncio.Queue()
        self.silent: list[str] = []
        self.monitor = HealthMonitor(
            specs,
            self.apply,
            lambda worker_id, models: self.models.put_nowait((worker_id, tuple(models))),
            self.silent.append,
            HealthSettings(interval_s, timeout_s, failures),
        )

    def apply(self, event: WorkerUp | WorkerDown) -> None:
        self.events.put_nowait(event)

    async def next(self) -> WorkerUp | WorkerDown:
        return await asyncio.wait_for(self.events.get(), TIMEOUT_S)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.monitor.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})
        assert task.cancelled()


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = Engine()
    await engine.start()
    yield engine
    await engine.stop()


@pytest.fixture
async def watched(engine: Engine) -> AsyncIterator[Watched]:
    watched = Watched([WorkerSpec("w", engine.url)])
    async with watched.running():
        yield watched


async def until_asked(engine: Engine, times: int) -> None:
    while not engine.asked.empty():
        engine.asked.get_nowait()
    for _ in range(times):
        await asyncio.wait_for(engine.asked.get(), TIMEOUT_S)


async def test_a_worker_comes_up_with_its_models_at_the_first_success(watched: Watched) -> None:
    assert await watched.next() == WorkerUp("w")
    assert watched.models.get_nowait() == ("w", ("tiny",))


async def test_the_first_checks_are_over_once_every_engine_is_known(engine: Engine) -> None:
    engine.free.clear()
    gone = Engine()
    await gone.start()
    await gone.stop()
    watched = Watched([WorkerSpec("w", engine.url), WorkerSpec("gone", gone.url)])
    async with watched.running():
        first = asyncio.create_task(watched.monitor.first_checks())
        down = await watched.next()
        assert (down.worker_id, first.done()) == ("gone", False)
        engine.free.set()
        await asyncio.wait_for(first, TIMEOUT_S)
    assert await watched.next() == WorkerUp("w")


async def test_only_changes_are_told(engine: Engine, watched: Watched) -> None:
    assert await watched.next() == WorkerUp("w")
    await until_asked(engine, 4)
    engine.health = 503
    assert await watched.next() == WorkerDown("w", "health check failed: status 503")
    await until_asked(engine, 4)
    engine.health = 200
    assert await watched.next() == WorkerUp("w")
    assert watched.events.empty()
    assert watched.monitor.failed_checks >= 3


async def test_fewer_failures_in_a_row_than_allowed_change_nothing(engine: Engine) -> None:
    watched = Watched([WorkerSpec("w", engine.url)], failures=1000)
    async with watched.running():
        assert await watched.next() == WorkerUp("w")
        for health in (503, 200, 503):
            engine.health = health
            await until_asked(engine, 3)
    assert watched.events.empty()
    assert watched.monitor.failed_checks > 0
    assert watched.silent == []


async def test_an_engine_that_is_gone_and_comes_back(engine: Engine, watched: Watched) -> None:
    assert await watched.next() == WorkerUp("w")
    assert watched.models.get_nowait() == ("w", ("tiny",))
    await engine.stop()
    down = await watched.next()
    assert isinstance(down, WorkerDown)
    assert down.reason.startswith("health check failed: ")
    assert watched.silent == ["w"]
    engine.models = MODELS.replace(b"tiny", b"huge")
    await engine.start()
    assert await watched.next() == WorkerUp("w")
    assert watched.models.get_nowait() == ("w", ("huge",))


def without_descriptors(stack: ExitStack) -> None:
    """No file can be opened until the stack is closed."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    with suppress(OSError):
        while True:
            stack.callback(os.close, os.dup(0))


async def test_a_router_without_file_descriptors_is_not_an_engine_that_is_gone(
    engine: Engine,
) -> None:
    watched = Watched([WorkerSpec("w", engine.url)], failures=1)
    async with watched.running():
        assert await watched.next() == WorkerUp("w")
        with ExitStack() as stack:
            without_descriptors(stack)
            checks = watched.monitor.checks + 3
            await until(lambda: watched.monitor.checks >= checks)
        await until_asked(engine, 2)
    assert watched.events.empty()
    assert watched.silent == []


async def test_an_engine_that_is_gone_before_it_says_its_models_has_not_failed_yet(
    engine: Engine,
) -> None:
    """Its health was asked for and was good."""
    engine.leaves_after = "/health"
    watched = Watched([WorkerSpec("w", engine.url)], interval_s=3600)
    async with watched.running():
        assert await watched.next() == WorkerUp("w")
        assert watched.models.empty()
        (state,) = watched.monitor._engines.values()
        assert state.failures == 0


async def test_a_worker_that_never_answers_says_why(engine: Engine) -> None:
    engine.free.clear()
    watched = Watched([WorkerSpec("w", engine.url)], timeout_s=0.05)
    async with watched.running():
        down = await watched.next()
        engine.free.set()
    assert down == WorkerDown("w", "health check failed: no answer within 0.05 s")


class Prompt(BaseHTTPRequestHandler):
    """An engine that answers at once, while the router does not get to read it in time."""

    protocol_version = "HTTP/1.1"
    loop: asyncio.AbstractEventLoop

    def do_GET(self) -> None:
        begun, answered = threading.Event(), threading.Event()

        def stand_still() -> None:
            begun.set()
            answered.wait(TIMEOUT_S)
            time.sleep(2 * SHORT_S)

        self.loop.call_soon_threadsafe(stand_still)
        begun.wait(TIMEOUT_S)
        try:
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()
        finally:  # the router may have left
            answered.set()

    def log_message(self, *_: object) -> None: ...


async def test_an_engine_has_answered_in_time_though_the_router_is_late() -> None:
    Prompt.loop = asyncio.get_running_loop()
    with ThreadingHTTPServer(("127.0.0.1", 0), Prompt) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        engine = WorkerSpec("w", f"http://127.0.0.1:{server.server_port}")
        watched = Watched([engine], timeout_s=SHORT_S, failures=1)
        async with watched.running():
            assert await watched.next() == WorkerUp("w")
            await until(lambda: watched.monitor.checks >= 3)
        await asyncio.to_thread(server.shutdown)
    assert (watched.monitor.failed_checks, watched.silent) == (0, [])


async def test_ranks_behind_one_url_are_one_engine(engine: Engine) -> None:
    ranks = [WorkerSpec(f"w#{rank}", engine.url, rank=rank) for rank in range(3)]
    watched = Watched(ranks, interval_s=TIMEOUT_S)
    async with watched.running():
        assert [await watched.next() for _ in ranks] == [WorkerUp(spec.id) for spec in ranks]
        assert [watched.models.get_nowait() for _ in ranks] == [
            (spec.id, ("tiny",)) for spec in ranks
        ]
        assert watched.monitor.checks == 1
        watched.monitor.probe_now("w#1", "refused")
        assert [await watched.next() for _ in ranks] == [
            WorkerDown(spec.id, "refused") for spec in ranks
        ]


async def test_a_report_takes_a_worker_down_at_once_and_checks_it_soon(engine: Engine) -> None:
    watched = Watched([WorkerSpec("w", engine.url)], interval_s=3600)
    async with watched.running():
        assert await watched.next() == WorkerUp("w")
        watched.monitor.probe_now("w", "connection refused")
        watched.monitor.probe_now("w", "connection refused")
        assert watched.events.get_nowait() == WorkerDown("w", "connection refused")
        assert await watched.next() == WorkerUp("w")
    assert watched.events.empty()
    assert watched.monitor.checks == 2


async def test_each_report_waits_longer_for_its_check(engine: Engine) -> None:
    watched = Watched([WorkerSpec("w", engine.url)], interval_s=0.2)
    loop = asyncio.get_running_loop()
    waits_s = []
    async with watched.running():
        assert await watched.next() == WorkerUp("w")
        for _ in range(4):
            reported_s = loop.time()
            watched.monitor.probe_now("w", "refused")
            assert await watched.next() == WorkerDown("w", "refused")
            assert await watched.next() == WorkerUp("w")
            waits_s.append(loop.time() - reported_s)
    assert all(wait >= bound for wait, bound in zip(waits_s, (0.05, 0.1, 0.2, 0.2), strict=True))


async def test_an_answer_from_before_a_report_does_not_count(
    engine: Engine, watched: Watched
) -> None:
    assert await watched.next() == WorkerUp("w")
    await until_asked(engine, 1)
    engine.free.clear()
    await until_asked(engine, 1)
    watched.monitor.probe_now("w", "refused")
    assert await watched.next() == WorkerDown("w", "refused")
    engine.free.set()
    assert await watched.next() == WorkerUp("w")
    assert not engine.asked.empty()


@pytest.mark.parametrize("models", [b"not JSON", b"{}", b'{"data": [{}]}', b'{"data": 1}', b"\xff"])
async def test_models_are_asked_for_until_they_are_known(
    engine: Engine, models: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    engine.models = models
    watched = Watched([WorkerSpec("w", engine.url)])
    async with watched.running():
        assert await watched.next() == WorkerUp("w")
        assert watched.models.empty()
        engine.models = MODELS
        got = await asyncio.wait_for(watched.models.get(), TIMEOUT_S)
    assert got == ("w", ("tiny",))
    assert "models not known" in caplog.text


async def test_models_that_are_refused(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    engine.models_status = 401
    watched = Watched([WorkerSpec("w", engine.url)])
    async with watched.running():
        assert await watched.next() == WorkerUp("w")
    assert "models not known, asking /v1/models again: status 401" in caplog.text


async def test_adapters_come_and_go_and_what_is_made_up_anew_is_no_news(
    engine: Engine, watched: Watched
) -> None:
    def serves(created: int, *names: str) -> bytes:
        cards = [{"id": name, "created": created, "permission": [created]} for name in names]
        return json.dumps({"data": cards}).encode()

    engine.models = serves(0, "tiny", "sql")
    while (await asyncio.wait_for(watched.models.get(), TIMEOUT_S))[1] != ("tiny", "sql"):
        pass
    engine.models = serves(1, "tiny", "sql")
    await until_asked(engine, 9)
    assert watched.models.empty()
    engine.models = serves(2, "tiny")
    assert await asyncio.wait_for(watched.models.get(), TIMEOUT_S) == ("w", ("tiny",))


@pytest.mark.parametrize(
    ("path", "reason"), [("/is_sleeping", ASLEEP), ("/is_paused", PAUSED)], ids=str
)
async def test_an_engine_that_rests_is_down_until_it_goes_on(
    engine: Engine, path: str, reason: str
) -> None:
    engine.rests = {"/is_sleeping": (200, b"no JSON"), "/is_paused": (200, b"{}")}
    watched = Watched([WorkerSpec("w", engine.url)])
    async with watched.running():
        await rests_and_goes_on(engine, watched, path, reason)


async def rests_and_goes_on(engine: Engine, watched: Watched, path: str, reason: str) -> None:
    assert await watched.next() == WorkerUp("w")
    engine.rests[path] = 200, b'{"%b": true}' % path[1:].encode()
    assert await watched.next() == WorkerDown("w", reason)
    engine.rests[path] = 500, b""
    await until_asked(engine, 9)
    watched.monitor.join(WorkerSpec("late", engine.url, rank=1))
    assert await watched.next() == WorkerDown("late", reason)
    assert watched.events.empty(), "as long as nothing else is known"
    engine.rests[path] = 200, b'{"%b": false}' % path[1:].encode()
    assert [await watched.next() for _ in "ab"] == [WorkerUp("w"), WorkerUp("late")]
    assert watched.silent == []


async def test_what_an_engine_does_not_know_is_asked_rarely(
    engine: Engine, watched: Watched
) -> None:
    assert await watched.next() == WorkerUp("w")
    asked: Counter[str] = Counter()
    while asked["/is_paused"] < 2:
        asked[await asyncio.wait_for(engine.asked.get(), TIMEOUT_S)] += 1
    assert 60 <= asked["/health"] <= 62
    assert asked["/is_sleeping"] == 2


async def test_a_broken_check_is_counted_and_does_not_stop_the_next(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    broken = [True]

    class Breaks(Watched):
        def apply(self, event: WorkerUp | WorkerDown) -> None:
            if broken:
                broken.clear()
                raise ValueError("surprise")
            super().apply(event)

    watched = Breaks([WorkerSpec("w", engine.url)])
    async with watched.running():
        assert await watched.next() == WorkerUp("w")
    assert watched.monitor.errors == 1
    assert "health check broke" in caplog.text


async def test_proxies_of_the_environment_are_not_used(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    watched = Watched([WorkerSpec("w", engine.url)])
    async with watched.running():
        assert await watched.next() == WorkerUp("w")


async def test_workers_that_come_and_go(engine: Engine, watched: Watched) -> None:
    assert await watched.next() == WorkerUp("w")
    watched.monitor.join(WorkerSpec("again", engine.url, rank=1))
    assert await watched.next() == WorkerUp("again")
    assert [watched.models.get_nowait()[0] for _ in range(2)] == ["w", "again"]
    watched.monitor.leave("w")
    engine.health = 500
    down = await watched.next()
    assert isinstance(down, WorkerDown)
    assert down.worker_id == "again"
    watched.monitor.join(WorkerSpec("late", engine.url, rank=2))
    assert await watched.next() == WorkerDown("late", down.reason)
    watched.monitor.leave("again")
    watched.monitor.leave("late")
    watched.monitor.probe_now("late", "told late")
    engine.health = 200
    watched.monitor.join(WorkerSpec("new", engine.url))
    assert await watched.next() == WorkerUp("new")
    assert watched.events.empty()


async def test_an_answer_that_comes_after_its_worker_has_left_changes_nothing(
    engine: Engine,
) -> None:
    engine.free.clear()
    watched = Watched([WorkerSpec("w", engine.url)])
    async with watched.running():
        await until_asked(engine, 1)
        watched.monitor.leave("w")
        watched.monitor.join(WorkerSpec("w", engine.url))
        await until_asked(engine, 1)
        engine.free.set()
        assert await watched.next() == WorkerUp("w")
        await until_asked(engine, 3)
    assert watched.events.empty()
    assert watched.models.qsize() == 1
