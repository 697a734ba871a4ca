"""``evenstep replay`` straight against an emulated worker: hidden lengths, arrivals, time scale."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleet import Fleet, running_fleet

REPLAY = [sys.executable, "-m", "router.cli", "replay"]
SCALE = 0.5


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    flags = ("--workers", "1", "--slots", "16", "--time-scale", str(SCALE), "--no-snapshots")
    with running_fleet(folder, *flags) as fleet:
        yield fleet


def replay(fleet: Fleet, *arguments: str) -> dict[str, Any]:
    command = [*REPLAY, "--url", fleet.server.url, "--time-scale", str(SCALE), *arguments]
    done = subprocess.run(
        [*command, "--json", "-"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_poisson(fleet: Fleet) -> None:
    report = replay(
        fleet, "--arrivals", "poisson:100", "--requests", "200", "--max-tokens", "20", "--seed", "3"
    )
    assert (report["completed"], report["rejected"]) == (200, 0)
    assert (report["request_rate"], report["max_concurrency"]) == (100, None)
    # No sooner than they arrive; later on a machine that is busy.
    assert report["duration"] > 1.4
    # One token a step of about 5 ms, and TTFT of at least one step.
    assert report["median_tpot_ms"] > 4.5
    assert report["median_ttft_ms"] > 4.5


def test_the_traces_own_times(fleet: Fleet, tmp_path: Path) -> None:
    trace = tmp_path / "burst.csv"
    rows = [f"{100 + n * 0.05},ChatGPT,{20 + n},{1 + n % 5},0,API log" for n in range(20)]
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    trace.write_text("\n".join([header, *rows]))
    report = replay(fleet, "--trace", str(trace), "--arrivals", "trace")
    assert report["completed"] == 20
    assert report["total_output_tokens"] == 60
    assert report["total_input_tokens"] == sum(20 + n for n in range(20))
    assert report["duration"] > 0.95
    assert report["trace_format"] == "BurstGPT"


def test_revealed_lengths(fleet: Fleet) -> None:
    report = replay(fleet, "--reveal-lengths", "--requests", "40", "--max-tokens", "30")
    assert report["completed"] == 40
    assert report["lengths_revealed"] is True
    assert report["max_tokens"] is None
