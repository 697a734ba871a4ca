"""Prompt budgets in windows of steps against budgets in each step, where any prompts add to a step.

    python tests/bench/bench_prompt_windows.py [--seeds 3] [--requests 200] [--adds 0.006]

``simulate serving`` with 4 ranks behind a barrier, mooncake-synthetic at 2 requests per second, and
a prompt token of 5e-6 s. A step with prompts takes ``--adds`` seconds more than its tokens cost.
Each seed has its own arrivals, the same for both.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from statistics import fmean

from loadgen.simulator.serving.serving_command import ServingOptions
from loadgen.simulator.serving.serving_simulation import simulate_serving
from router.core import prompt_budget
from router.core.step_time import StepTime

WINDOWS = prompt_budget._WINDOWS
TARGETS = ((0.009, None), (0.009, 0.5))


@dataclass(frozen=True, slots=True)
class MixedStepTime(StepTime):
    any_s: float = 0.0

    def seconds(
        self, load_tokens: float, requests: float, prompt_tokens: float = 0.0, speed: float = 1.0
    ) -> float:
        plain_s = StepTime.seconds(self, load_tokens, requests, prompt_tokens, speed)
        return plain_s + self.any_s / speed * (prompt_tokens > 0)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--requests", type=int, default=200)
    options.add_argument("--adds", type=float, default=0.006)
    given = options.parse_args()
    for tpot_s, ttft_s in TARGETS:
        for name, windows in (("each step", ()), ("windows", WINDOWS)):
            prompt_budget._WINDOWS = windows
            runs = []
            for seed in range(given.seeds):
                config = ServingOptions(
                    policy="bfio",
                    workers=4,
                    arrivals="poisson:2",
                    requests=given.requests,
                    step_time="5e-3,9.5e-8,0,5e-6",
                    prompt_budget="auto",
                    target_tpot=tpot_s,
                    target_ttft=ttft_s,
                    seed=seed,
                ).config()
                cost = MixedStepTime(*config.step_time.numbers, given.adds)
                runs.append(simulate_serving(replace(config, step_time=cost)))
            ttft = fmean(run.ttft_mean_s or 0.0 for run in runs)
            tpot = fmean(run.tpot_mean_s or 0.0 for run in runs)
            print(
                f"TPOT {1000 * tpot_s:g} ms, TTFT {ttft_s} s, {name}: TTFT {ttft:.3f} s, "
                f"TPOT {1000 * tpot:.1f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
