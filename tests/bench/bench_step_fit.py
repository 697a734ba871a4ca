"""How well the router learns what a step costs, and what learning costs it.

    python tests/bench/bench_step_fit.py [--seeds 20] [--json tests/data/step_fit/step_fit.json]

8 emulated ranks in virtual time (C 5 ms, t_l 9.5e-8, t_r 40 us, t_p 5e-5) compute prompts in chunks
of 512 under a load that rises from 30 to 110 % in 2,000 steps (``tests/support/swept.py``). Their
messages go to the router's core. For steps with and without noise: how far each number is off, and
how often its 95 % interval holds the truth. The time is this process's CPU time for a step.
"""

import argparse
import time
from pathlib import Path

import numpy as np

from loadgen.report.origin import Engines, origin
from router.core.step_fit import NUMBERS, StepFit
from tests.support.figure_files import write_figures
from tests.support.swept import COST, SweptRanks

CODE = (
    "router/core/step_fit.py",
    "router/core/step_regression.py",
    "router/core/state/barrier.py",
    "loadgen/engine",
    "tests/support/swept.py",
    "tests/bench/bench_step_fit.py",
)

STEPS = 2000
NOISES = (0.0, 0.03, 0.1)
SIZES = (8, 64, 256)


def learned(noise: float, seeds: int) -> dict[str, object]:
    """Errors and intervals over the seeds."""
    off, inside, explained, misses = [], [], [], []
    for seed in range(seeds):
        rng = np.random.default_rng(seed + 99)
        ranks = SweptRanks(seed, factor=lambda: 1 + noise * rng.normal())  # noqa: B023
        for _ in ranks.take(STEPS):
            pass
        found = ranks.group.fitted
        assert found is not None
        numbers = list(zip(found.numbers, found.intervals, COST.numbers, strict=True))
        off.append([abs(number / true - 1) for number, _, true in numbers])
        inside.append([low <= true <= high for _, (low, high), true in numbers])
        explained.append(found.explained)
        misses.append((found.decode_error, found.prompt_error))
    far, held = np.array(off), np.array(inside)
    decode, prompts = np.median(np.array(misses), axis=0)
    return {
        "noise": noise,
        "seeds": seeds,
        "median_off": dict(zip(NUMBERS, np.median(far, axis=0).tolist(), strict=True)),
        "largest_off": dict(zip(NUMBERS, far.max(axis=0).tolist(), strict=True)),
        "interval_holds": dict(zip(NUMBERS, held.mean(axis=0).tolist(), strict=True)),
        "near_or_inside": dict(
            zip(NUMBERS, ((far < 0.05) | held).mean(axis=0).tolist(), strict=True)
        ),
        "explained_least": min(explained),
        "decode_error": float(decode),
        "prompt_error": float(prompts),
    }


def cost(ranks: int) -> dict[str, float]:
    """CPU time of a step, and of the longest: one that is learned from."""
    rng, fit, times = np.random.default_rng(0), StepFit(), []
    running = rng.integers(20, 70, (STEPS, ranks))
    loads = running * rng.integers(800, 1200, (STEPS, ranks))
    prompts = 512 * (rng.random((STEPS, ranks)) < 0.02)
    rows = zip(loads.tolist(), running.tolist(), prompts.tolist(), strict=True)
    for load, number, prompt in rows:
        work = list(map(COST.work_s, load, number, prompt))
        seconds = (COST.base_s + max(work)) * (1 + 0.03 * rng.normal())
        began_s = time.process_time()
        fit.observe(load, number, prompt, prompt, seconds, likely=work.index(max(work)))
        times.append(time.process_time() - began_s)
    # The first 500 steps are learned from more often.
    steady = times[500:]
    return {
        "ranks": ranks,
        "mean_us": 1e6 * sum(steady) / len(steady),
        "median_us": 1e6 * float(np.median(steady)),
        "longest_ms": 1e3 * max(steady),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    costs = [cost(ranks) for ranks in SIZES]
    for each in costs:
        print(
            f"{each['ranks']:.0f} ranks: {each['mean_us']:.1f} us a step on average, median "
            f"{each['median_us']:.1f} us, longest {each['longest_ms']:.2f} ms"
        )
    found = []
    for noise in NOISES:
        found.append(learned(noise, args.seeds))
        print(found[-1], flush=True)
    if args.json:
        write_figures(args.json, {"learned": found, "cost": costs}, origin(Engines.EMULATED, CODE))


if __name__ == "__main__":
    main()
