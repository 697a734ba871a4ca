"""Where a worker's state is known from: its snapshots, its engine's metrics, or own counts."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine_patches.plugin.compat import EngineView
from engine_patches.plugin.reporter import Reporter
from engine_patches.plugin.settings import Settings
from router.core.events import GaugesReceived
from router.core.state.foreign_load import Gauges
from router.core.types import WorkerSpec
from router.engines.gauges import GaugeReader
from tests.support.chaos import SLOTS, body, workers_of
from tests.support.engine import metric
from tests.support.fleet import running_fleet
from tests.support.plugin_engine import FakeScheduler
from tests.support.scripted import TIMEOUT_S, scripted, soon, until
from tests.support.server import free_port, running_router, wait_until

TEXT = b'vllm:num_requests_running{engine="%d"} %d\n'


class Reader:
    """Gauges that are read until the test ends it, and what came of them."""

    def __init__(self, specs: list[WorkerSpec], timeout_s: float = TIMEOUT_S) -> None:
        self.wanted: set[str] = {spec.id for spec in specs}
        self.arrived: asyncio.Queue[GaugesReceived] = asyncio.Queue()
        self.reader = GaugeReader(
            specs,
            self.arrived.put_nowait,
            self.wanted.__contains__,
            lambda: 42.0,
            timeout_s,
            0.01,
        )

    async def __aenter__(self) -> Reader:
        self.task = asyncio.create_task(self.reader.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task


async def test_ranks_behind_one_url_are_read_at_once() -> None:
    async with scripted() as (engine,):
        specs = [WorkerSpec(f"w{rank}", engine.url, rank=rank) for rank in (0, 1)]
        async with Reader(specs) as reader:
            exchange = await engine.next()
            assert (exchange.method, exchange.target) == ("GET", "/metrics")
            await exchange.answer(TEXT % (0, 3) + TEXT % (1, 1), kind="text/plain")
            assert await soon(reader.arrived.get()) == GaugesReceived("w0", Gauges(3), 42.0)
            assert await soon(reader.arrived.get()) == GaugesReceived("w1", Gauges(1), 42.0)


async def test_gauges_of_workers_that_come_and_go() -> None:
    async with scripted(2) as (one, other):
        first = WorkerSpec("w0", one.url, rank=0)
        async with Reader([first]) as reader:
            reader.wanted |= {"w1", "v"}
            reader.reader.join(WorkerSpec("w1", one.url, rank=1))
            reader.reader.join(WorkerSpec("v", other.url))
            await (await one.next()).answer(TEXT % (0, 3) + TEXT % (1, 1), kind="text/plain")
            await soon(reader.arrived.get())
            assert await soon(reader.arrived.get()) == GaugesReceived("w1", Gauges(1), 42.0)
            exchange = await other.next()
            reader.reader.leave("v")
            reader.reader.leave("w0")
            await exchange.answer(TEXT % (0, 9), kind="text/plain")
            for _ in range(2):
                await (await one.next()).answer(TEXT % (0, 3) + TEXT % (1, 2), kind="text/plain")
                assert await soon(reader.arrived.get()) == GaugesReceived("w1", Gauges(2), 42.0)
            reader.reader.leave("w1")
            assert reader.arrived.empty()
            reader.reader.join(first)
            reader.wanted = {"w0"}


async def test_an_engine_is_left_in_peace_while_nothing_is_wanted_of_it() -> None:
    async with scripted(2) as (one, other):
        specs = [WorkerSpec("one", one.url), WorkerSpec("other", other.url)]
        async with Reader(specs) as reader:
            reader.wanted.remove("one")
            for _ in range(5):
                await (await other.next()).answer(TEXT % (0, 1))
            assert (one.connections, reader.reader.failed_reads) == (0, 0)
            reader.wanted = {"one"}


@pytest.mark.parametrize(
    ("answer", "status"), [(b"", 200), (b"no such thing", 404), (TEXT[:-2] + b"many\n", 200)]
)
async def test_gauges_that_cannot_be_read_are_said_once(
    answer: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with scripted() as (engine,), Reader([WorkerSpec("w", engine.url)]) as reader:
        for _ in range(3):
            await (await engine.next()).answer(answer, status)
            assert await soon(reader.arrived.get()) == GaugesReceived("w", None, 42.0)
        assert reader.reader.failed_reads == 3
        assert len([one for one in caplog.records if "/metrics: " in one.message]) == 1
        await (await engine.next()).answer(TEXT % (0, 2))
        assert await soon(reader.arrived.get()) == GaugesReceived("w", Gauges(2), 42.0)


async def test_an_engine_that_does_not_answer_in_time() -> None:
    async with scripted() as (engine,), Reader([WorkerSpec("w", engine.url)], 0.05) as reader:
        assert (await soon(reader.arrived.get())).gauges is None


async def test_a_fault_does_not_end_the_reading(caplog: pytest.LogCaptureFixture) -> None:
    async with scripted() as (engine,):
        reader = Reader([WorkerSpec("w", engine.url)])

        def broken(_: GaugesReceived) -> None:
            raise RuntimeError("surprise")

        reader.reader._apply = broken
        async with reader:
            for _ in range(2):
                await (await engine.next()).answer(TEXT % (0, 2))
            await until(lambda: caplog.text.count("surprise") == 2)


def test_plugged_in_and_plain_workers_in_one_group(tmp_path: Path) -> None:
    """Three ways to know a worker; somebody else's requests go straight to each engine."""
    with running_fleet(
        tmp_path, "--workers", "3", "--slots", str(SLOTS), "--no-barrier", "--time-scale", "8"
    ) as fleet:
        plugged, plain, deaf = fleet.workers
        plain = plain.partition(",snapshots=")[0]
        deaf = f"{deaf.partition(',snapshots=')[0]},snapshots=tcp://127.0.0.1:{free_port(2)}"
        specs = [part for spec in (plugged, plain, deaf) for part in ("--worker", spec)]
        with running_router(tmp_path, *specs, "--metrics-interval", "0.1") as router:
            wait_until(
                _told(router, state_source=["snapshots", "metrics", "metrics"]), 60, "all are known"
            )
            urls = [worker["url"] for worker in workers_of(router)]
            with httpx.Client(timeout=60) as client:
                foreign = [_begin(client, url) for url in urls for _ in range(2)]
                wait_until(_told(router, free_slots=[2, 2, 2]), 60, "all are seen")
                states = ["fresh", "none", "stale"]
                others = {"foreign_requests": [0, 2, 2], "in_flight": [0, 0, 0]}
                wait_until(_told(router, snapshots=states, **others), 60, "as those of others")
                for lines in foreign:
                    lines.close()
            wait_until(_told(router, free_slots=[SLOTS] * 3, load_tokens=[0] * 3), 60, "all gone")
            assert metric(router, "evenstep_worker_state_source") == 3
            wait_until(
                lambda: metric(router, "evenstep_worker_foreign_requests") == 0, 60, "all gone"
            )
            assert metric(router, "evenstep_engine_metrics_reads_total") > 0


@pytest.mark.usefixtures("vllm")
def test_engines_whose_vllm_lacks_names_are_used_and_say_what_they_lack(tmp_path: Path) -> None:
    """Emulated engines serve; beside each the plug-in reads a scheduler of another version."""

    class Part(FakeScheduler):
        def __init__(self, **config: Any) -> None:
            super().__init__(**config)
            del self.kv_cache_manager

    class Blind(FakeScheduler):
        def __init__(self, **config: Any) -> None:
            super().__init__(**config)
            del self.finished_req_ids

    with ExitStack() as stack:
        flags = "--workers", "2", "--slots", str(SLOTS), "--no-barrier", "--time-scale", "8"
        fleet = stack.enter_context(running_fleet(tmp_path, *flags))
        specs, first = [], f"tcp://127.0.0.1:{free_port(4)}"
        for rank, (worker, made) in enumerate(zip(fleet.workers, (Part, Blind), strict=True)):
            view = EngineView(made(slots=SLOTS, rank=rank))
            reporter = Reporter(view, Settings(first))
            stack.callback(reporter.close)
            spec = worker.partition(",snapshots=")[0]
            specs += ["--worker", f"{spec},snapshots={reporter.endpoint}"]
        admin = free_port()
        specs += ["--metrics-interval", "0.1", "--admin-port", str(admin)]
        router = stack.enter_context(running_router(tmp_path, *specs))
        lacks = [["memory", "watermark"], ["state"]]
        wait_until(
            _told(router, state_source=["snapshots", "metrics"], unreported=lacks),
            60,
            "all is told",
        )
        part, blind = workers_of(router)
        said = "its engine's plug-in cannot read state of this vLLM; the engine's log says why"
        assert (part["snapshots_problem"], blind["snapshots_problem"]) == (None, said)
        url = f"{router.url}/v1/completions"
        answers = [httpx.post(url, content=body(5), timeout=60) for _ in "1234"]
        assert [answer.status_code for answer in answers] == [200] * 4
        command = [sys.executable, "-m", "router.cli", "workers", "list", "--url"]
        listed = subprocess.check_output([*command, f"http://127.0.0.1:{admin}"], text=True)
        assert listed.count("up: its engine's plug-in cannot read") == 2
        assert "cannot read memory, watermark" in listed


def _told(router: Any, **wanted: list[Any]) -> Callable[[], bool]:
    def all_told() -> bool:
        workers = workers_of(router)
        return all([worker[key] for worker in workers] == told for key, told in wanted.items())

    return all_told


def _begin(client: httpx.Client, url: str) -> Generator[str, None, None]:
    """A request of somebody else's that runs; closing its lines ends it."""
    request = client.build_request("POST", f"{url}/v1/completions", content=body(900))
    answer = client.send(request, stream=True)
    lines = (line for line in answer.iter_lines())
    next(lines)
    return lines
