"""A real length trace through the router to two real engines, one of which dies on the way.

Requests end at the trace's lengths, which nobody is told: neither the router nor the schedulers.
"""

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import (
    READY_S,
    Installation,
    metric,
    requests_running,
    starting_engine,
)
from tests.support.engine_python import ROOT
from tests.support.replays import replay_command
from tests.support.server import Server, running_router, wait_ready, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]

SLOTS = 8
REQUESTS = 80
WAIT_S = 60


@pytest.fixture(scope="module")
def engines(
    engine_installation: Installation, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Server]]:
    folder = tmp_path_factory.mktemp("engines")
    flags = ("--logits-processors", "engine_patches.hidden_length:HiddenLength")
    path = {"PYTHONPATH": str(ROOT)}
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(
                starting_engine(engine_installation, folder, *flags, environment=path)
            )
            for _ in "ab"
        ]
        for server in servers:
            wait_ready(server, 2 * READY_S)
        yield servers


@pytest.fixture(scope="module")
def router(engines: list[Server], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    workers = [f"--worker={engine.url},slots={SLOTS}" for engine in engines]
    with running_router(tmp_path_factory.mktemp("router"), *workers) as server:
        wait_until(lambda: states(server) == [True, True], WAIT_S, "both engines are up")
        yield server


@contextlib.contextmanager
def replay(
    router: Server, report: Path, requests: int, max_tokens: int
) -> Iterator[subprocess.Popen[bytes]]:
    """A replay under way, which ends with the block."""
    flags = ["--arrivals", "closed:24", "--requests", str(requests)]
    flags += ["--max-tokens", str(max_tokens)]
    with subprocess.Popen(replay_command(router.url, report, *flags)) as process:
        try:
            yield process
        finally:
            process.kill()


def states(router: Server) -> list[bool]:
    (group,) = router.get("/health").json()["groups"].values()
    return [worker["up"] for worker in group["workers"]]


def in_flight(router: Server) -> int:
    (group,) = router.get("/health").json()["groups"].values()
    return int(sum(worker["in_flight"] for worker in group["workers"]) + group["pool_requests"])


def made_by(engine: Server) -> float:
    """Output tokens that an engine has counted so far."""
    return metric(engine, "vllm:generation_tokens_total")


def test_every_request_of_a_real_trace_is_served(
    engines: list[Server], router: Server, tmp_path: Path
) -> None:
    before = [made_by(engine) for engine in engines]

    with replay(router, tmp_path / "report.json", REQUESTS, 64) as running:
        assert running.wait(timeout=600) == 0

    report: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
    assert (report["completed"], report["failed"]) == (REQUESTS, 0)
    assert report["total_output_tokens"] < 64 * REQUESTS

    def made() -> list[float]:
        after = [made_by(engine) for engine in engines]
        return [last - first for first, last in zip(before, after, strict=True)]

    # Engines count after a step what they have sent during it.
    wait_until(lambda: sum(made()) >= report["total_output_tokens"], WAIT_S, "all is counted")
    assert sum(made()) == report["total_output_tokens"]
    assert min(made()) > 0
    assert in_flight(router) == 0


def test_an_engine_that_dies_takes_only_its_own_streams(
    engines: list[Server], router: Server, tmp_path: Path
) -> None:
    before = made_by(engines[0])

    def streams() -> bool:  # requests without a first token would go to the other engine
        made = made_by(engines[0]) - before
        return made >= 10 * SLOTS and requests_running(engines[0]) >= SLOTS // 2

    # Many, for a look can take a second: engines on a CPU leave little of it to others.
    with replay(router, tmp_path / "report.json", 8 * REQUESTS, 256) as running:
        wait_until(streams, WAIT_S, "the first engine has answers under way")
        engines[0].kill()
        assert running.wait(timeout=600) == 1

    report = json.loads((tmp_path / "report.json").read_text())
    assert report["completed"] + report["failed"] == 8 * REQUESTS
    assert 1 <= report["failed"] <= SLOTS
    assert states(router) == [False, True]
    assert in_flight(router) == 0
