"""The router's prompt budget against constant ones: TTFT at the TPOT that each target allows.

    python tests/bench/bench_prompt_budget.py [--seeds 5] [--only PART] [--jobs 1] [--json FILE]

``simulate serving`` with its defaults: 8 ranks behind a barrier, mooncake-synthetic at 7 requests
per second, a prompt token costs 5e-5 s. Each seed has its own arrivals, the same for all budgets.
A target is met if the mean over the seeds is no longer. Beside each target stands the constant
budget that meets its TPOT with the least TTFT.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

from docs.kept_figures import read_figures
from docs.prompt_tables import budgets
from loadgen.report.origin import Engines, origin
from loadgen.simulator.serving.serving_command import ServingOptions
from loadgen.simulator.serving.serving_simulation import simulate_serving
from tests.support.figure_files import write_part

CODE = (
    "router/core",
    "loadgen/engine",
    "loadgen/simulator/serving",
    "loadgen/traces",
    "tests/bench/bench_prompt_budget.py",
)
CONSTANT = (128, 192, 256, 384, 512, 640, 768, 1024, 1536, 2048)
TTFT_S = 1.0
TPOT_S = (0.03, 0.04, 0.06, 0.1)
FIGURES = ("ttft_mean_s", "ttft_p99_s", "tpot_mean_s", "tpot_p99_s", "step_mean_s")
NO_TARGETS = "auto"
PARTS: Mapping[str, Mapping[str, Any]] = {
    **{str(tokens): {"prompt_budget": str(tokens)} for tokens in CONSTANT},
    NO_TARGETS: {"prompt_budget": "auto"},
    **{
        f"auto, TPOT {1000 * tpot_s:g} ms": {"prompt_budget": "auto", "target_tpot": tpot_s}
        for tpot_s in TPOT_S
    },
    **{
        f"auto, TTFT {TTFT_S:g} s, TPOT {1000 * tpot_s:g} ms": {
            "prompt_budget": "auto",
            "target_tpot": tpot_s,
            "target_ttft": TTFT_S,
        }
        for tpot_s in TPOT_S
    },
}


def one_run(given: tuple[Mapping[str, Any], int]) -> dict[str, Any]:
    options, seed = given
    result = simulate_serving(ServingOptions(policy="bfio", seed=seed, **options).config())
    return {"seed": seed, **{name: getattr(result, name) for name in FIGURES}}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--only", choices=PARTS)
    options.add_argument("--jobs", type=int, default=1)
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    parts: dict[str, Any] = {}
    with ProcessPoolExecutor(given.jobs) as pool:
        for name in PARTS if given.only is None else (given.only,):
            runs = list(pool.map(one_run, [(PARTS[name], seed) for seed in range(given.seeds)]))
            parts[name] = {"options": PARTS[name], "runs": runs}
            ttft_s, p99_s, tpot_s, *_ = (fmean(run[f] for run in runs) for f in FIGURES)
            print(
                f"{name}: TTFT {ttft_s:.3f} s (p99 {p99_s:.2f}), TPOT {1000 * tpot_s:.1f} ms",
                flush=True,
            )
            if given.json:
                write_part(given.json, name, parts[name], origin(Engines.SIMULATED, CODE))
    print(budgets(read_figures(given.json) if given.json else parts).markdown())


if __name__ == "__main__":
    main()
