"""Emulated ranks that compute their prompts: serve's default policy against FCFS, over HTTP.

    python tests/bench/bench_prompts_on_ranks.py [--runs 3] [--slower 1] [--json FILE]

8 ranks of 32 slots behind a barrier, at most 512 tokens in a rank's step, 384 requests in the
system. A prompt token costs 100 and 1,000 times a resident one. Runs of both policies alternate;
each pair has one seed. Output tokens of the whole run per second of the fleet's steps: its start,
in which bfio learns the cost, and its end included.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from loadgen.demo.figures import step_figures
from loadgen.demo.run import Fleet, Outcome, RunPlan, execute
from loadgen.report.origin import EMULATION, SERVING, Engines, origin, write_figures
from router.config.balancing_settings import BalancingSettings
from router.core.step_time import PAPER_STEP_TIME, StepTime
from router.core.types import Dispatch

CODE = (*SERVING, *EMULATION, "loadgen/replay", "tests/bench/bench_prompts_on_ranks.py")
CHUNK = 512
# By prompt tokens' worth: requests of a run, some 1,000 steps; and wall seconds per engine second,
# by which a step takes about 0.1 s and more.
REQUESTS = {100: 5000, 1000: 4000}
TIME_SCALES = {100: 8.0, 1000: 4.0}
POLICIES = ("fcfs", "bfio")
CAP_TOKENS = 400
RUN_TIMEOUT_S = 900.0
_SETTINGS = BalancingSettings.model_fields


@dataclass(frozen=True)
class Run:
    """One run; times in engine seconds."""

    worth: int
    policy: str
    seed: int
    tokens_s: float
    ttft_mean_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    steps: int
    step_s: float
    imbalance_tokens: float
    lateness_p99: float


def fleet(worth: int) -> Fleet:
    base, token = PAPER_STEP_TIME.base_s, PAPER_STEP_TIME.per_token_s
    cost = StepTime(base, token, 0.0, worth * token)
    return Fleet(pool=128, step_time=str(cost), more=("--prefill-chunk", str(CHUNK)))


def one_run(
    worth: int, policy: str, seed: int, time_scale: float
) -> tuple[Run, Mapping[str, object]]:
    """A run, and which features its engines had."""
    plan = RunPlan(
        policy,
        Dispatch.POOL,
        REQUESTS[worth],
        CAP_TOKENS,
        seed,
        time_scale,
        starvation_s=_SETTINGS["starvation_s"].default,
    )
    ranks = fleet(worth)
    with tempfile.TemporaryDirectory() as folder:
        outcome = execute(plan, ranks, Path(folder), RUN_TIMEOUT_S)
    return _run(outcome, ranks, worth, policy, seed), outcome.engines


def _run(outcome: Outcome, ranks: Fleet, worth: int, policy: str, seed: int) -> Run:
    if not outcome.complete:
        raise SystemExit(f"{policy}: {outcome.report['completed']} of {outcome.plan.requests} done")
    report = cast(dict[str, Any], outcome.report)
    steps = step_figures(outcome.record, ranks)
    assert steps is not None
    tokens = report["output_throughput"] * report["duration"]
    return Run(
        worth,
        policy,
        seed,
        tokens / (steps.steps * steps.step_mean_s),
        report["mean_ttft_ms"] / 1000,
        report["p99_ttft_ms"] / 1000,
        report["mean_tpot_ms"] / 1000,
        steps.steps,
        steps.step_mean_s,
        steps.imbalance_tokens,
        steps.lateness_p99,
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--runs", type=int, default=3)
    options.add_argument("--slower", type=float, default=1.0, help="factor of the time scales")
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    runs, physics = list[Run](), dict[str, object]()
    for worth in REQUESTS:
        for seed in range(given.runs):
            for policy in POLICIES:
                run, engines = one_run(worth, policy, seed, given.slower * TIME_SCALES[worth])
                runs.append(run)
                physics = dict(engines)
                print(
                    f"{worth:5} {policy:5} seed {seed}: {run.tokens_s:8,.0f} tokens/s, TTFT "
                    f"{run.ttft_mean_s:.2f} s (p99 {run.ttft_p99_s:.2f}), TPOT "
                    f"{1000 * run.tpot_mean_s:.1f} ms, step {1000 * run.step_s:.1f} ms, "
                    f"late {run.lateness_p99:.1%}",
                    flush=True,
                )
    gains = {}
    for worth in REQUESTS:
        tokens_s = {
            policy: [run.tokens_s for run in runs if (run.worth, run.policy) == (worth, policy)]
            for policy in POLICIES
        }
        pairs = zip(tokens_s["bfio"], tokens_s["fcfs"], strict=True)
        gains[str(worth)] = [ours / theirs for ours, theirs in pairs]
        print(f"{worth}: x {fmean(gains[str(worth)]):.3f} ({gains[str(worth)]})")
    if given.json:
        result = {"gains": gains, "runs": [asdict(run) for run in runs]}
        write_figures(given.json, result, origin(Engines.EMULATED, CODE, physics))


if __name__ == "__main__":
    main()
