"""An observer in the test's own event loop, before emulated engines that come and go."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

from loadgen.engine.prefill_settings import PrefillSettings
from router.config.serve_settings import ServeSettings
from router.core.events import SnapshotReceived
from router.core.types import WorkerSpec
from router.observe.observer import Observer, group_report
from router.recording.lines import read
from tests.support.core import running, snapshot
from tests.support.emulated import client, emulated, eventually


@contextlib.asynccontextmanager
async def observing(observer: Observer) -> AsyncIterator[None]:
    stopped = asyncio.Event()
    task = asyncio.create_task(observer.run(stopped, 0.1, lambda *_: None))
    try:
        yield
    finally:
        stopped.set()
        await task


def settings_of(folder: Path, *roles: str) -> ServeSettings:
    workers = tuple(
        WorkerSpec(
            f"w{rank}",
            "http://127.0.0.1:9",
            role="prefill" if role == "prefill" else "both",
            rank=rank,
            snapshots=f"ipc://{folder}/{rank}",
        )
        for rank, role in enumerate(roles)
    )
    return ServeSettings(workers=workers, snapshot_stale_s=0.5)


async def test_a_fleet_that_ends_is_down_and_up_again_when_it_is_back(tmp_path: Path) -> None:
    observer = Observer(settings_of(tmp_path, "both", "both"))
    (group,) = observer.groups.values()
    async with observing(observer):
        for _ in range(2):
            async with emulated(tmp_path, workers=2):
                await eventually(lambda: len(group.live_workers()) == 2, "both are up")
            await eventually(lambda: not group.live_workers(), "nobody is up")
    assert group_report(group)["workers_up"] == 0
    assert {worker.down_reason for worker in group.workers.values()} == {"no snapshot for 0.5 s"}


async def test_a_request_whose_engine_says_nothing_any_more_is_lost(tmp_path: Path) -> None:
    observer = Observer(settings_of(tmp_path, "both"))
    listener = observer.recorder.listen()
    async with observing(observer):
        shown = snapshot("full", 1, running("x", 3, 1))
        observer.apply(SnapshotReceived("w0", shown, time.monotonic() - 10))
        assert observer.cluster.worker("w0").live
        observer.tick()
        assert not observer.cluster.worker("w0").live
    (line,) = read(listener.take().splitlines(keepends=True), "lines").requests
    assert (line.prompt_tokens, line.output_tokens, line.outcome) == (3, 1, "lost")


def test_what_a_worker_shows_after_a_silence_counts_once_all_of_it_is_known(tmp_path: Path) -> None:
    """As after a step that takes longer than a snapshot may be old."""
    observer = Observer(settings_of(tmp_path, "both"))
    listener, now_s = observer.recorder.listen(), time.monotonic()
    observer.apply(SnapshotReceived("w0", snapshot("full", 1, running("x", 3, 1)), now_s - 10))
    observer.tick()
    observer.apply(SnapshotReceived("w0", snapshot("delta", 2), now_s))
    observer.apply(SnapshotReceived("w0", snapshot("full", 2, running("x", 3, 2)), now_s))
    observer.apply(SnapshotReceived("w0", snapshot("delta", 3, finished=("x",)), now_s))
    recording = read(listener.take().splitlines(keepends=True), "lines")
    assert [(step.step, step.loads) for step in recording.steps] == [(1, [4]), (2, [5]), (3, [6])]
    (line,) = recording.requests
    assert (line.output_tokens, line.outcome, line.arrival_s < 0) == (3, "completed", True)


def test_of_the_requests_of_prefill_workers_nothing_is_kept(tmp_path: Path) -> None:
    observer = Observer(settings_of(tmp_path, "both", "prefill"))
    for message in (
        snapshot("full", 1, running("x", 3, 0, 2)),
        snapshot("delta", 2, finished=("x",)),
    ):
        observer.apply(SnapshotReceived("w1", message, 0.0))
    assert not observer.cluster.groups["default/prefill"].departures


async def test_prefill_workers_are_watched_and_their_requests_not_counted(tmp_path: Path) -> None:
    observer = Observer(settings_of(tmp_path, "both", "prefill"))
    settings = {"prefill": PrefillSettings(workers=1)}
    async with observing(observer), emulated(tmp_path, **settings) as fleet:
        groups = observer.cluster.groups
        await eventually(lambda: all(g.live_workers() for g in groups.values()), "all are up")
        async with client(fleet, rank=1) as http:
            body = {"model": "emulated", "prompt": [1, 2, 3], "max_tokens": 1}
            for _ in range(2):
                assert (await http.post("/v1/completions", json=body)).status_code == 200
    assert observer.requests == 0
    assert list(observer.groups) == ["default"]
