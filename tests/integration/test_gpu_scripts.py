"""The measurements for a GPU, in small on the CPU engine: that they run, not what they find."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loadgen.model.measured_step_time import load_step_time
from loadgen.report.origin import commit
from loadgen.traces.trace import load_trace
from tests.gpu.barrier import ALL, LOADS, LONG, REST, SHORT
from tests.gpu.fit import fit_decode, fit_prompts
from tests.gpu.group import BALANCER, WAYS
from tests.gpu.measure import (
    BUDGETS,
    COSTS,
    DECODE,
    PREFIXES,
    PROMPTS,
    SHARES,
    SMALL,
    names,
    points,
)
from tests.gpu.parts import INCOMPLETE, Values
from tests.gpu.routed import TALKS, WITH, repeated
from tests.support.engine import READY_S, Installation
from tests.support.engine_python import ROOT
from tests.support.server import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

REQUESTS = 30
POLICIES = ("least_tokens", "bfio")
PAIR = f"--slots 8 --clients 24 --max-tokens 32 --policies {','.join(POLICIES)}"
OF_A_GROUP = 60
GROUP = f"--ranks 2 --slots 8 --clients 24 --requests {OF_A_GROUP} --max-tokens 32 --rounds 1"
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
        part: names(part, SMALL) for part in SHARES
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

    check_budgets(parts[BUDGETS])
    check_hits(parts[PREFIXES][TALKS])

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
    assert measured["fits"]["prompt_budget"]["pairs"] == SMALL.traffic.pairs

    assert measured["settings"]["dry_run"]
    assert measured["machine"].items() >= {"device": "CPU", "vllm": "0.32.0"}.items()
    assert measured["machine"]["torch"].startswith("2.")
    assert [call["commit"] for call in measured["calls"]] == [commit()] * 2
    assert {path.name for path in tmp_path.glob("engine-*.log")} == {
        "engine-plug-in.log",
        "engine-plain.log",
    }

    before = file.read_bytes()
    assert measure(engine_installation, tmp_path).returncode == 0
    assert file.read_bytes() == before


def check_budgets(runs: Values) -> None:
    """The budget was in force in the runs with it alone, and no step computed more."""
    for name, run in runs.items():
        prompts = run["steps_with_prompts"]
        if name.endswith(WITH):
            assert run["bounded_steps"] > 0.9 * prompts, name
            assert run["median_budget_tokens"] > 0
        else:  # a step has room for a whole long prompt
            assert (run["bounded_steps"], run["median_budget_tokens"]) == (0, 0), name
            assert run["most_prompt_tokens"] >= SMALL.traffic.long
        assert (prompts > 0, run["steps_above_budget"]) == (True, 0), name
        assert (run["completed"], run["failed"]) == (SMALL.traffic.requests, 0), name
        assert 0 < run["median_tpot_ms"] <= run["p99_tpot_ms"]
        assert 0 < run["median_ttft_ms"] <= run["p99_ttft_ms"]


def check_hits(found: Values) -> None:
    """What the router foretold is what vLLM counts: all that earlier turns had."""
    asked = SMALL.traffic.talks * SMALL.traffic.turns
    assert (found["completed"], found["failed"], found["requests"]) == (asked, 0, asked)
    assert found["vllm_prompt_tokens"] == found["prompt_tokens"]
    assert found["vllm_found_tokens"] == found["found_tokens"] == repeated(SMALL.traffic)
    assert found["foretold_by_found"] == pytest.approx(1, abs=0.02)
    assert found["error_tokens"] <= 0.02 * found["found_tokens"]


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
            engine_installation, tmp_path, *PAIR.split(), f"--requests={REQUESTS}", script="pair"
        )
        assert done.returncode == 0, done.stderr
    measured = json.loads((tmp_path / "pair.json").read_text())["measured"]
    runs = measured["parts"]["runs"]
    assert list(runs) == [f"{t}, {p}" for t in ("burstgpt", "azure-conv") for p in POLICIES]
    ends = {(run["completed"], run["failed"], run["preemptions"]) for run in runs.values()}
    assert ends == {(REQUESTS, 0, 0)}
    assert min(run["mean_tpot_ms"] for run in runs.values()) > 0
    assert len(measured["calls"]) == 1


def test_a_group_by_every_way(engine_installation: Installation, tmp_path: Path) -> None:
    done = measure(engine_installation, tmp_path, *GROUP.split(), script="group")
    assert done.returncode == 0, done.stderr
    measured = json.loads((tmp_path / "group.json").read_text())["measured"]
    turn = measured["parts"]["rounds"]["1"]
    assert list(turn) == list(WAYS)
    lengths = [row.output_tokens for row in load_trace("burstgpt").sample(OF_A_GROUP, seed=1)]
    tokens = sum(min(length, 32) for length in lengths)
    for way, run in turn.items():
        assert (run["completed"], run["failed"], run["preemptions"]) == (OF_A_GROUP, 0, 0)
        assert run["total_output_tokens"] == tokens
        # Every token is computed once; the last one of an output is never computed upon.
        assert run["tokens_computed"] == run["total_input_tokens"] + tokens - OF_A_GROUP
        assert sum(run["requests_of_ranks"]) == OF_A_GROUP
        assert min(run["requests_of_ranks"]) > 0
        assert min(run["imbalance_tokens"], run["mean_tpot_ms"], run["client_cores"]) > 0
        assert (run["router_imbalance_tokens"] is None) == (way == BALANCER)
        assert (run["router_cores"] == 0) == (way == BALANCER)
        assert measured["ways"][way]["output_throughput"] == run["output_throughput"]
    assert all(turn[way]["router_imbalance_tokens"] > 0 for way in WAYS[1:])
    ratio = turn["bfio"]["mean_tpot_ms"] / turn[BALANCER]["mean_tpot_ms"]
    assert measured["ratios"]["bfio"]["mean_tpot_ms"] == {"median": ratio, "rounds": [ratio]}

    loads = measured["parts"]["power"]
    assert list(loads) == list(LOADS)
    assert all(load["power_w"] == [None] * 2 for load in loads.values())
    assert {loads[load]["requests_of_a_rank"] for load in LOADS if load != REST} == {8}
    contexts = [loads[load]["context_tokens"] for load in (SHORT, LONG, ALL)]
    assert contexts[0] < contexts[1] == contexts[2]
    assert measured["power_of_a_gpu"]["step_longer_by"] > 0
    assert measured["settings"].items() >= {"shape": "tiny-moe", "ranks": 2}.items()


def command(
    engine: Installation, out: Path, limit_s: float = LIMIT_S, script: str = ""
) -> list[str]:
    where = f"--dry-run --python {engine.python} --out {out} --limit-s {limit_s}"
    return [sys.executable, "-m", "tests.gpu", *script.split(), *where.split()]


def measure(
    engine: Installation, out: Path, *flags: str, limit_s: float = LIMIT_S, script: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command(engine, out, limit_s, script), *flags],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S + 60,
    )


def until_a_point(engine: Installation, file: Path) -> dict[str, Any]:
    """End the measurement after its first point; the points that it has kept."""
    process = subprocess.Popen(command(engine, file.parent), cwd=ROOT, stdin=subprocess.DEVNULL)
    try:
        wait_until(file.exists, 2 * READY_S, "a first point")
        process.terminate()
        assert process.wait(timeout=60) == 128 + 15
    finally:
        process.kill()
    found: dict[str, Any] = json.loads(file.read_text())["measured"]["parts"][DECODE]
    return found
