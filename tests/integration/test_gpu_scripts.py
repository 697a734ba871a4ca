"""The measurements for a GPU, in small on the CPU engine: that they run, not what they find."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loadgen.step_model import load_step_time
from tests.support.engine import READY_S, Installation
from tests.support.engine_python import ROOT
from tests.support.server import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

REQUESTS = 30
STEPS = "--batches 1,4 --contexts 64,2048 --steps 40 --rounds 2 --hook-batch 4"
POLICIES = ("least_tokens", "bfio")
PAIR = f"--slots 8 --clients 24 --max-tokens 32 --policies {','.join(POLICIES)}"


def test_three_commands_measure_all_and_one_that_was_ended_goes_on(
    engine_installation: Installation, tmp_path: Path
) -> None:
    common = f"--cpu --shape tiny --python {engine_installation.python}"
    step_time, pair = tmp_path / "step_time.json", tmp_path / "pair.json"

    first = until_a_point(f"{common} {STEPS} --only grid --out {step_time}".split(), step_time)

    for what in ("grid", "plug-in", "pair"):
        measure(what, tmp_path, f"{common} {STEPS}", f"{common} {PAIR} --requests {REQUESTS}")
    points = parts(step_time)["points"]
    assert list(points) == ["1 x 64", "4 x 64", "1 x 2048", "4 x 2048"]
    assert first.items() <= points.items()
    assert [point["load_tokens"] > 2048 for point in points.values()] == [False] * 2 + [True] * 2
    assert load_step_time(str(step_time)).base_s > 0
    found = json.loads(step_time.read_text())["measured"]
    assert list(found["parts"]["rounds"]) == ["1", "2"]
    assert (len(found["plug_in"]["ratios"]), len(found["calls"])) == (2, 3)
    assert (found["machine"]["device"], found["machine"]["vllm"]) == ("CPU", "0.32.0")

    runs = parts(pair)["runs"]
    assert list(runs) == [f"{t}, {p}" for t in ("burstgpt", "azure-conv") for p in POLICIES]
    ends = {(run["completed"], run["failed"], run["preemptions"]) for run in runs.values()}
    assert ends == {(REQUESTS, 0, 0)}
    assert min(run["mean_tpot_ms"] for run in runs.values()) > 0

    before = step_time.read_bytes(), pair.read_bytes()
    measure("all", tmp_path, f"{common} {STEPS}", f"{common} {PAIR} --requests {REQUESTS}")
    assert (step_time.read_bytes(), pair.read_bytes()) == before


def until_a_point(flags: list[str], file: Path) -> dict[str, Any]:
    """End the measurement of step times after its first point; the points that it has kept."""
    script = subprocess.Popen(
        [sys.executable, str(ROOT / "tests/gpu/step_time.py"), *flags],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
    )
    try:
        wait_until(file.exists, 2 * READY_S, "a first point")
        script.terminate()
        assert script.wait(timeout=60) == 128 + 15
    finally:
        script.kill()
    points: dict[str, Any] = parts(file)["points"]
    return points


def parts(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())["measured"]["parts"]
    return found


def measure(what: str, out: Path, step_flags: str, pair_flags: str) -> None:
    settings = {"PYTHON": sys.executable, "STEP_FLAGS": step_flags, "PAIR_FLAGS": pair_flags}
    subprocess.run(
        [str(ROOT / "tests/gpu/run_all.sh"), what, str(out)],
        env={**os.environ, **settings},
        stdin=subprocess.DEVNULL,
        check=True,
        timeout=700,
    )
