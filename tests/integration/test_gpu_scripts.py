"""The measurements for a GPU, in small on the CPU engine: that they run, not what they find."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loadgen.model.measured_step_time import load_step_time
from loadgen.report.origin import commit
from tests.gpu.fit import fit_decode, fit_prompts
from tests.gpu.measure import COSTS, DECODE, IDLE, PROMPTS, ROUNDS, SMALL, names, points
from tests.gpu.parts import INCOMPLETE
from tests.support.engine import READY_S, Installation
from tests.support.engine_python import ROOT
from tests.support.server import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

REQUESTS = 30
POLICIES = ("least_tokens", "bfio")
PAIR = f"--slots 8 --clients 24 --max-tokens 32 --policies {','.join(POLICIES)}"
LIMIT_S = 1200


def test_a_measurement_that_was_ended_goes_on(
    engine_installation: Installation, tmp_path: Path
) -> None:
    file = tmp_path / "step_time.json"
    first = until_a_point(engine_installation, file)

    done = measure(engine_installation, tmp_path)
    assert (done.returncode, done.stderr.splitlines()[0][:7]) == (0, "DRY RUN")
    measured = json.loads(file.read_text())["measured"]
    parts = measured["parts"]
    assert {part: list(parts[part]) for part in parts} == {
        part: names(part, SMALL) for part in (DECODE, PROMPTS, IDLE, ROUNDS)
    }
    assert first.items() <= parts[DECODE].items()
    for name, found in points(parts, DECODE).items():
        batch, context = map(int, name.split(" x "))
        assert found.requests == batch
        assert found.load_tokens > batch * context
    for name, found in points(parts, PROMPTS).items():
        tokens, batch = map(int, name.split(" beside "))
        assert (found.prompt_tokens, found.requests) == (tokens, batch + 1)
        assert found.load_tokens > tokens + batch * SMALL.mixed[1]

    # What the simulator reads is what is fitted to the points that are kept.
    decode = fit_decode(points(parts, DECODE))
    prompts = fit_prompts(points(parts, PROMPTS), decode)
    cost = load_step_time(str(file))
    assert [cost.base_s, cost.per_token_s, cost.per_request_s] == [decode[key] for key in COSTS]
    assert cost.per_prompt_token_s == prompts["per_prompt_token_s"]
    assert load_step_time(str(file)).base_s > 0
    assert measured["fits"]["decode"] == decode
    assert measured["fits"]["prompts"] == prompts
    assert measured["fits"]["plug_in"]["rounds"] == SMALL.rounds

    assert measured["settings"]["dry_run"]
    assert measured["machine"].items() >= {"device": "CPU", "vllm": "0.32.0"}.items()
    assert measured["machine"]["torch"].startswith("2.")
    assert [call["commit"] for call in measured["calls"]] == [commit()] * 2
    assert {path.name for path in tmp_path.glob("*.log")} == {
        "engine-plug-in.log",
        "engine-plain.log",
    }

    before = file.read_bytes()
    assert measure(engine_installation, tmp_path).returncode == 0
    assert file.read_bytes() == before


def test_one_without_time_says_that_it_is_not_whole(
    engine_installation: Installation, tmp_path: Path
) -> None:
    done = measure(engine_installation, tmp_path, limit_s=2)
    assert done.returncode == INCOMPLETE
    assert "give the same command again to go on" in done.stderr
    assert not (tmp_path / "step_time.json").exists()


def test_two_engines_behind_the_router(engine_installation: Installation, tmp_path: Path) -> None:
    for _ in range(2):
        done = measure(
            engine_installation, tmp_path, *PAIR.split(), f"--requests={REQUESTS}", pair=True
        )
        assert done.returncode == 0, done.stderr
    measured = json.loads((tmp_path / "pair.json").read_text())["measured"]
    runs = measured["parts"]["runs"]
    assert list(runs) == [f"{t}, {p}" for t in ("burstgpt", "azure-conv") for p in POLICIES]
    ends = {(run["completed"], run["failed"], run["preemptions"]) for run in runs.values()}
    assert ends == {(REQUESTS, 0, 0)}
    assert min(run["mean_tpot_ms"] for run in runs.values()) > 0
    assert len(measured["calls"]) == 1


def command(engine: Installation, out: Path, limit_s: float = LIMIT_S, *, pair: bool) -> list[str]:
    where = f"--dry-run --python {engine.python} --out {out} --limit-s {limit_s}"
    return [sys.executable, "-m", "tests.gpu", *["pair"] * pair, *where.split()]


def measure(
    engine: Installation, out: Path, *flags: str, limit_s: float = LIMIT_S, pair: bool = False
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command(engine, out, limit_s, pair=pair), *flags],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S + 60,
    )


def until_a_point(engine: Installation, file: Path) -> dict[str, Any]:
    """End the measurement after its first point; the points that it has kept."""
    process = subprocess.Popen(
        command(engine, file.parent, pair=False), cwd=ROOT, stdin=subprocess.DEVNULL
    )
    try:
        wait_until(file.exists, 2 * READY_S, "a first point")
        process.terminate()
        assert process.wait(timeout=60) == 128 + 15
    finally:
        process.kill()
    found: dict[str, Any] = json.loads(file.read_text())["measured"]["parts"][DECODE]
    return found
