"""Emulated ranks that compute their prompts: serve's default policy against FCFS, over HTTP.

    python tests/bench/bench_prompts_on_ranks.py [--runs 3] [--only CASE] [--slower 1] [--json FILE]

8 ranks of 32 slots behind a barrier. A prompt token costs 100 or 1,000 times a resident one.
Chunks are of a prompt (512 of each in a step, 2,048 in all, as in the simulated study of prompts on
the decode workers) or of a step (512 in all). Runs of both policies alternate; each pair has one
seed. Output tokens per second of the fleet's steps: in the steady window, from 30 % of the time on
until the last request is sent, and in the whole run, with its start, in which bfio learns the cost.
"""

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from loadgen.demo.figures import steady_steps, step_figures
from loadgen.demo.run import Fleet, RunPlan, execute
from loadgen.report.origin import EMULATION, SERVING, Engines, origin
from router.config.balancing_settings import BalancingSettings
from router.core.step_time import PAPER_STEP_TIME, StepTime
from router.core.types import Dispatch
from tests.support.figure_files import write_part

CODE = (*SERVING, *EMULATION, "loadgen/replay", "tests/bench/bench_prompts_on_ranks.py")
CHUNK = 512
TIME_SCALE = 4.0


@dataclass(frozen=True)
class Case:
    """A price of prompt tokens, in resident ones; a run has some 400 steps and more."""

    worth: int
    requests: int
    engine: tuple[str, ...]

    @property
    def fleet(self) -> Fleet:
        base_s, token_s = PAPER_STEP_TIME.base_s, PAPER_STEP_TIME.per_token_s
        cost = StepTime(base_s, token_s, 0.0, self.worth * token_s)
        return Fleet(pool=64, step_time=str(cost), more=self.engine)


_OF_A_PROMPT = ("--long-prefill-token-threshold", str(CHUNK))
_OF_A_STEP = ("--batch-tokens", str(CHUNK))
CASES = {
    "100": Case(100, 3200, _OF_A_PROMPT),
    "1000": Case(1000, 2000, _OF_A_PROMPT),
    "100, chunks of a step": Case(100, 3200, _OF_A_STEP),
}
POLICIES = ("fcfs", "bfio")
CAP_TOKENS = 400
RUN_TIMEOUT_S = 900.0
_SETTINGS = BalancingSettings.model_fields


@dataclass(frozen=True)
class Run:
    """One run; times in engine seconds. Latencies are of the whole run, all else of the window."""

    policy: str
    seed: int
    tokens_s: float
    whole_tokens_s: float
    ttft_mean_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    steps: int
    step_s: float
    imbalance_tokens: float
    lateness_p99: float


def one_run(case: Case, policy: str, seed: int, slower: float) -> tuple[Run, Mapping[str, object]]:
    """A run, and which features its engines had."""
    plan = RunPlan(
        policy,
        Dispatch.POOL,
        case.requests,
        CAP_TOKENS,
        seed,
        slower * TIME_SCALE,
        starvation_s=_SETTINGS["starvation_s"].default,
    )
    with tempfile.TemporaryDirectory() as folder:
        outcome = execute(plan, case.fleet, Path(folder), RUN_TIMEOUT_S)
    if not outcome.complete:
        raise SystemExit(f"{policy}: {outcome.report['completed']} of {plan.requests} done")
    whole, steady = outcome.report, outcome.report["steady"]
    steps = step_figures(steady_steps(outcome), case.fleet)
    assert steps is not None
    run = Run(
        policy,
        seed,
        steady["output_throughput"] * steady["duration"] / (steps.steps * steps.step_mean_s),
        whole["output_throughput"] * whole["duration"] / sum(row.step_s for row in outcome.record),
        whole["mean_ttft_ms"] / 1000,
        whole["p99_ttft_ms"] / 1000,
        whole["mean_tpot_ms"] / 1000,
        steps.steps,
        steps.step_mean_s,
        steps.imbalance_tokens,
        steps.lateness_p99,
    )
    return run, outcome.engines


def measured(name: str, seeds: int, slower: float) -> tuple[dict[str, Any], Mapping[str, object]]:
    runs, engines = list[Run](), dict[str, object]()
    for seed in range(seeds):
        for policy in POLICIES:
            run, found = one_run(CASES[name], policy, seed, slower)
            runs.append(run)
            engines = dict(found)
            print(
                f"{name}: {policy:5} seed {seed}: {run.tokens_s:8,.0f} tokens/s (whole run "
                f"{run.whole_tokens_s:,.0f}), TTFT {run.ttft_mean_s:.2f} s "
                f"(p99 {run.ttft_p99_s:.2f}), TPOT {1000 * run.tpot_mean_s:.1f} ms, "
                f"{run.steps} steps of {1000 * run.step_s:.1f} ms, late {run.lateness_p99:.1%}",
                flush=True,
            )
    theirs, ours = ([run for run in runs if run.policy == policy] for policy in POLICIES)
    pairs = [*zip(ours, theirs, strict=True)]
    gains = [a.tokens_s / b.tokens_s for a, b in pairs]
    whole = [a.whole_tokens_s / b.whole_tokens_s for a, b in pairs]
    print(f"{name}: x {fmean(gains):.3f} ({gains}), whole runs x {fmean(whole):.3f} ({whole})")
    return {"gains": gains, "whole_gains": whole, "runs": [asdict(run) for run in runs]}, engines


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--runs", type=int, default=3)
    options.add_argument("--only", choices=CASES)
    options.add_argument("--slower", type=float, default=1.0, help="factor of the time scale")
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    for name in CASES if given.only is None else (given.only,):
        part, engines = measured(name, given.runs, given.slower)
        if given.json:
            write_part(given.json, name, part, origin(Engines.EMULATED, CODE, engines))


if __name__ == "__main__":
    main()
