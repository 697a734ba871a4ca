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
from tests.support.engine import Installation
from tests.support.engine_python import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]

REQUESTS = 30


def test_everything_in_one_go(engine_installation: Installation, tmp_path: Path) -> None:
    common = f"--cpu --shape tiny --python {engine_installation.python}"
    settings = {
        "PYTHON": sys.executable,
        "STEP_FLAGS": f"{common} --batches 1,4 --contexts 64,2048 --steps 40 --rounds 2 "
        "--hook-batch 4",
        "PAIR_FLAGS": f"{common} --slots 8 --clients 24 --requests {REQUESTS} --max-tokens 32 "
        "--policies least_tokens,bfio",
    }
    subprocess.run(
        [str(ROOT / "tests/gpu/run_all.sh"), str(tmp_path)],
        env={**os.environ, **settings},
        stdin=subprocess.DEVNULL,
        check=True,
        timeout=1000,
    )

    assert load_step_time(str(tmp_path / "step_time.json")).base_s > 0
    steps: dict[str, Any] = json.loads((tmp_path / "step_time.json").read_text())
    assert [point["requests"] for point in steps["points"]] == [1, 4, 1, 4]
    assert [point["load_tokens"] > 2048 for point in steps["points"]] == [False] * 2 + [True] * 2
    assert (len(steps["plug_in"]["ratios"]), steps["device"], steps["vllm"]) == (2, "CPU", "0.32.0")

    runs = json.loads((tmp_path / "pair.json").read_text())["runs"]
    ways = [(run["trace"], run["policy"]) for run in runs]
    assert ways == [(t, p) for t in ("burstgpt", "azure-conv") for p in ("least_tokens", "bfio")]
    assert {(run["completed"], run["failed"], run["preemptions"]) for run in runs} == {
        (REQUESTS, 0, 0)
    }
    assert min(run["mean_tpot_ms"] for run in runs) > 0
