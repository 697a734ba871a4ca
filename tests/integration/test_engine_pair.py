"""A real length trace through the router to two real engines, one of which dies on the way."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import Installation, metric, requests_running, running_engine
from tests.support.server import Server, running_router, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]

SLOTS = 8
REQUESTS = 80
WAIT_S = 60


@pytest.fixture(scope="module")
def engines(
    engine_installation: Installation, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Server]]:
    folder = tmp_path_factory.mktemp("engines")
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(running_engine(engine_installation, folder)) for _ in "ab"]


@pytest.fixture(scope="module")
def router(engines: list[Server], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    workers = [f"--worker={engine.url},slots={SLOTS}" for engine in engines]
    with running_router(tmp_path_factory.mktemp("router"), *workers) as server:
        wait_until(lambda: states(server) == [True, True], WAIT_S, "both engines are up")
        yield server


def replay(router: Server, report: Path, *flags: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "router.cli", "replay", "--url", router.url]
    command += ["--arrivals", "closed:24", "--reveal-lengths", "--requests", str(REQUESTS)]
    return subprocess.Popen([*command, "--json", str(report), *flags])


def states(router: Server) -> list[bool]:
    (group,) = router.get("/health").json()["groups"].values()
    return [worker["up"] for worker in group["workers"]]


def in_flight(router: Server) -> int:
    (group,) = router.get("/health").json()["groups"].values()
    return int(sum(worker["in_flight"] for worker in group["workers"]) + group["pool_requests"])


def test_every_request_of_a_real_trace_is_served(
    engines: list[Server], router: Server, tmp_path: Path
) -> None:
    before = [metric(engine, "vllm:generation_tokens_total") for engine in engines]

    assert replay(router, tmp_path / "report.json", "--max-tokens", "64").wait(timeout=600) == 0

    report: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
    assert (report["completed"], report["failed"]) == (REQUESTS, 0)
    after = [metric(engine, "vllm:generation_tokens_total") for engine in engines]
    made = [last - first for first, last in zip(before, after, strict=True)]
    assert sum(made) == report["total_output_tokens"]
    assert min(made) > 0
    assert in_flight(router) == 0


def test_an_engine_that_dies_takes_only_its_own_streams(
    engines: list[Server], router: Server, tmp_path: Path
) -> None:
    running = replay(router, tmp_path / "report.json", "--max-tokens", "256")
    wait_until(lambda: requests_running(engines[0]) > 0, WAIT_S, "the first engine has work")
    engines[0].kill()

    assert running.wait(timeout=600) == 1

    report = json.loads((tmp_path / "report.json").read_text())
    assert report["completed"] + report["failed"] == REQUESTS
    assert 1 <= report["failed"] <= SLOTS
    assert states(router) == [False, True]
    assert in_flight(router) == 0
