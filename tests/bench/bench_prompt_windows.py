"""Prompt budgets in windows of steps against budgets in each step, where any prompts add to a step.

    python tests/bench/bench_prompt_windows.py [--seeds 5] [--requests 200] [--adds 0.006]
        [--json FILE]

``simulate serving`` with 4 ranks behind a barrier, mooncake-synthetic at 2 requests per second, and
a prompt token of 5e-6 s. A step with prompts takes ``--adds`` seconds more than its tokens cost.
Each seed has its own arrivals, the same for both.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from loadgen.report.origin import Engines, origin
from loadgen.simulator.serving.serving_command import ServingOptions
from loadgen.simulator.serving.serving_simulation import simulate_serving
from router.core import prompt_budget
from router.core.step_time import StepTime
from tests.bench.bench_prompt_budget import CODE, FIGURES
from tests.support.figure_files import write_figures

WAYS = {"each step": (), "windows": prompt_budget._WINDOWS}
TARGETS = ((0.009, None), (0.009, 0.5))


@dataclass(frozen=True, slots=True)
class MixedStepTime(StepTime):
    any_s: float = 0.0

    def seconds(
        self, load_tokens: float, requests: float, prompt_tokens: float = 0.0, speed: float = 1.0
    ) -> float:
        plain_s = StepTime.seconds(self, load_tokens, requests, prompt_tokens, speed)
        return plain_s + self.any_s / speed * (prompt_tokens > 0)


def one_run(options: dict[str, Any], adds_s: float) -> dict[str, Any]:
    config = ServingOptions(
        policy="bfio",
        workers=4,
        arrivals="poisson:2",
        step_time="5e-3,9.5e-8,0,5e-6",
        prompt_budget="auto",
        **options,
    ).config()
    cost = MixedStepTime(*config.step_time.numbers, adds_s)
    result = simulate_serving(replace(config, step_time=cost))
    return {"seed": options["seed"], **{name: getattr(result, name) for name in FIGURES}}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--requests", type=int, default=200)
    options.add_argument("--adds", type=float, default=0.006)
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    rows: list[dict[str, Any]] = []
    for tpot_s, ttft_s in TARGETS:
        targets = {"target_tpot": tpot_s, "target_ttft": ttft_s}
        for way, windows in WAYS.items():
            prompt_budget._WINDOWS = windows
            runs = [
                one_run({"requests": given.requests, "seed": seed, **targets}, given.adds)
                for seed in range(given.seeds)
            ]
            rows.append({**targets, "budget": way, "runs": runs})
            ttft, tpot = (fmean(run[of] for run in runs) for of in ("ttft_mean_s", "tpot_mean_s"))
            print(
                f"TPOT {1000 * tpot_s:g} ms, TTFT {ttft_s} s, {way}: TTFT {ttft:.3f} s, "
                f"TPOT {1000 * tpot:.1f} ms",
                flush=True,
            )
    if given.json:
        code = (*CODE, "tests/bench/bench_prompt_windows.py")
        figures = {"adds_s": given.adds, "requests": given.requests, "rows": rows}
        write_figures(given.json, figures, origin(Engines.SIMULATED, code))


if __name__ == "__main__":
    main()
