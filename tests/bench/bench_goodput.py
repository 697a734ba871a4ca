"""Goodput of requests with targets: orders of today's routers beside the router's defaults.

    python tests/bench/bench_goodput.py [--only TRACE] [--arm ARM] [--rates] [--json FILE]

``simulate serving`` with its defaults, but 4 ranks. 100 % is the highest rate at which
arrival order keeps the TTFT's p90 at ``Case.bound_s``; ``--rates`` looks for it. Each seed has its
own arrivals and classes, the same for all orders. A request is good if it meets its targets, or
completes without having any.

The orders are served by the best rule for a single request, ``barrier_time``, llm-d's by its own
score. They hold a request while no worker can begin its prompt. llm-d's order is that of its flow
control (llm-d-inference-scheduler, slo-deadline-ordering): by arrival + TTFT target, those without
one last; within one band of priority that is EDF. Engines bound a step's prompts as vLLM does by
default, by 2,048 tokens in all, or by 512.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

from docs.goodput_tables import goodput
from loadgen.report.origin import Engines, origin
from loadgen.simulator.serving.serving_command import ServingOptions
from loadgen.simulator.serving.serving_results import ServingResult
from loadgen.simulator.serving.serving_simulation import simulate_serving
from router.core.policies.baselines import Choose
from router.core.policies.policy_protocol import NOTHING, Known, Policy
from router.core.policies.prompts import barrier_time, prefix_score
from router.core.policies.room import Room
from router.core.types import Assignment, Request, WorkerView
from tests.support.figure_files import write_part

CODE = (
    "router/core",
    "loadgen/engine",
    "loadgen/simulator/serving",
    "loadgen/traces",
    "tests/bench/bench_goodput.py",
)
MIXES = {
    "chat": "chat:.6:1:.04,agents:.2:3:.06,batch:.2",
    "even": "chat:.34:1:.04,agents:.33:3:.06,batch:.33",
    "batch": "chat:.2:1:.04,agents:.2:3:.06,batch:.6",
}
WORKERS = 4
LOADS = (0.8, 1.0, 1.1, 1.2)
FIGURES = ("goodput_per_s", "ttft_mean_s", "ttft_p99_s", "tpot_mean_s", "throughput_tok_s")


@dataclass(frozen=True)
class Case:
    """A trace's first requests, and the rate that is 100 %.

    ``bound_s`` is of the TTFT's p90: a tenth of mooncake's prompts take longer than 1.6 s alone.
    """

    requests: int
    rate: float
    bound_s: float = 1.0


CASES = {
    "burstgpt": Case(3000, 147.0),
    "azure-conv": Case(2500, 23.2),
    "mooncake-synthetic": Case(600, 3.9, bound_s=3.0),
}


def by_arrival(request: Request) -> float:
    return request.arrival_s


def by_deadline(request: Request) -> tuple[float, float]:
    targets = request.targets
    wanted_s = None if targets is None else targets.ttft_s
    return math.inf if wanted_s is None else request.arrival_s + wanted_s, request.arrival_s


class Ordered(Policy):
    """Serves the whole pool in an order, by a rule for a single request."""

    def __init__(self, order: Callable[[Request], Any], choose: Choose) -> None:
        self._order, self._choose = order, choose

    def assign(
        self, waiting: Sequence[Request], workers: Sequence[WorkerView], known: Known = NOTHING
    ) -> Sequence[Assignment]:
        room = Room(workers, known)
        for request in sorted(waiting, key=self._order):
            open_ = [i for i in room.open_to(request) if room.pending[i] < known.busy_from]
            if not open_:
                break
            room.place(self._choose(request, room, open_), request)
        return room.assignments


ARMS: Mapping[str, tuple[str | None, Callable[[int], Policy] | None]] = {
    "fcfs": ("2048", lambda _: Ordered(by_arrival, barrier_time)),
    "edf": ("2048", lambda _: Ordered(by_deadline, barrier_time)),
    "llm-d": ("2048", lambda seed: Ordered(by_deadline, prefix_score(seed))),
    "edf, 512": ("512", lambda _: Ordered(by_deadline, barrier_time)),
    "evenstep": (None, None),
}


def simulated(trace: str, rate: float, mix: str | None, arm: str, seed: int) -> ServingResult:
    budget, policy = ARMS[arm]
    options = ServingOptions(
        policy="bfio",
        trace=trace,
        requests=CASES[trace].requests,
        arrivals=f"poisson:{rate}",
        classes=mix,
        prompt_budget=budget,
        seed=seed,
        workers=WORKERS,
    )
    config = options.config()
    if policy is None:
        return simulate_serving(config)
    # All that waits is seen at once: no band of those that can be in time comes first.
    whole = replace(config, pool=CASES[trace].requests, starvation_s=math.inf)
    with patch("router.core.queue.pool.due_s", return_value=math.inf):
        return simulate_serving(whole, policy=policy(seed))


def one_run(given: tuple[str, str, float, str, int]) -> dict[str, Any]:
    trace, mix, load, arm, seed = given
    result = simulated(trace, load * CASES[trace].rate, MIXES[mix], arm, seed)
    figures = {name: getattr(result, name) for name in FIGURES}
    return {"seed": seed, **figures, "met": result.met_by_class, "misses": result.misses}


def p90_s(given: tuple[str, float, int]) -> float:
    trace, rate, seed = given
    return simulated(trace, rate, None, "fcfs", seed).ttft_p90_s


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--only", choices=CASES)
    options.add_argument("--arm", choices=ARMS)
    options.add_argument("--rates", action="store_true")
    options.add_argument("--jobs", type=int, default=1)
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    traces, arms = (
        [one] if one else list(all_) for one, all_ in ((given.only, CASES), (given.arm, ARMS))
    )
    parts: dict[str, Any] = {}
    with ProcessPoolExecutor(given.jobs) as pool:
        if given.rates:
            for trace in traces:
                _look_for_rate(pool, trace, given.seeds)
            return
        for trace, arm in product(traces, arms):
            name, part = f"{trace}: {arm}", _measured(pool, trace, arm, given.seeds)
            parts[name] = part
            if given.json:
                write_part(given.json, name, part, origin(Engines.SIMULATED, CODE))
    if parts.keys() >= {f"{trace}: {arm}" for trace in traces for arm in ARMS}:
        print(goodput(parts).markdown())


def _look_for_rate(pool: ProcessPoolExecutor, trace: str, seeds: int) -> None:
    low, high = CASES[trace].rate / 2, CASES[trace].rate * 2
    while high > 1.02 * low:
        rate = math.sqrt(low * high)
        found_s = fmean(pool.map(p90_s, [(trace, rate, seed) for seed in range(seeds)]))
        low, high = (rate, high) if found_s <= CASES[trace].bound_s else (low, rate)
        print(f"{trace}: {rate:.2f}/s, TTFT p90 {found_s:.3f} s", flush=True)
    print(f"{trace}: 100 % = {low:.2f}/s")


def _measured(pool: ProcessPoolExecutor, trace: str, arm: str, seeds: int) -> dict[str, Any]:
    rate, cells = CASES[trace].rate, []
    for mix, load in product(MIXES, LOADS):
        runs = list(pool.map(one_run, [(trace, mix, load, arm, seed) for seed in range(seeds)]))
        cells.append({"mix": mix, "load": load, "runs": runs})
        good = fmean(run["goodput_per_s"] for run in runs)
        print(f"{trace}, {mix}, {load:.0%}: {arm} {good:.3f}", flush=True)
    return {"rate": rate, "classes": MIXES, "cells": cells}


if __name__ == "__main__":
    main()
