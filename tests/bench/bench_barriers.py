"""Which of several groups a request goes to: mean latency by the router's rule and three others.

    python tests/bench/bench_barriers.py [--slow four|eight] [--loads .5,.7,.9,1,1.1] [--seeds 5]
        [--requests 1500] [--json FILE]

`simulate serving` under bfio: one model on groups of 8, 8 and 4 ranks, each a barrier of its own,
16 slots a rank; lengths of burstgpt, Poisson arrivals. One group has steps of half the speed: that
of 4, or one of 8. A load of 1 is what the groups complete when each is alone and full. All rules
choose from the same queue, and each group decides by the same bfio which rank: `jffc` has the
fastest group with a free slot, `sed` the shortest expected delay (requests + 1 over the rate of all
slots), `least_prefill` the least time for the prompts that wait there, by the learned cost.
"""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from loadgen.report.origin import Engines, origin
from loadgen.simulator.serving.serving_config import RankGroup, ServingConfig
from loadgen.simulator.serving.serving_simulation import simulate_serving
from loadgen.traces.arrivals import Arrivals
from loadgen.traces.trace import load_trace
from router.core.rounds.barriers import Allot, Barrier, allot
from router.core.step_time import StepTime
from router.core.types import Dispatch, Request
from tests.support.figure_files import write_part

CODE = (
    "router/core",
    "loadgen/engine",
    "loadgen/simulator/serving",
    "tests/bench/bench_barriers.py",
)
SLOTS, OURS = 16, "bfio"
WORLD = ServingConfig(
    policy="bfio",
    trace=load_trace("burstgpt"),
    arrivals=Arrivals("poisson", 1.0),
    slots=SLOTS,
    step_time=StepTime(5e-3, 9.5e-8, 0.0, 2e-5),
    dispatch=Dispatch.POOL,
)
SLOW = {
    "four": (RankGroup(8), RankGroup(4, 0.5)),
    "eight": (RankGroup(8, 0.5), RankGroup(4)),
}


def by(cost: Callable[[Barrier], tuple[float, ...]]) -> Allot:
    """Each request to the open group with the least cost, first come first."""

    def choose(waiting: Iterable[Request], barriers: Mapping[str, Barrier]) -> dict[str, set[str]]:
        allotted: dict[str, set[str]] = {name: set() for name in barriers}
        for request in waiting:
            open_ = {name: one for name, one in barriers.items() if one.capacity > 0}
            if open_:
                name = min(open_, key=lambda name: cost(open_[name]))
                open_[name].place(request)
                allotted[name].add(request.id)
        return allotted

    return choose


def fullness(group: Barrier) -> float:
    return group.requests / group.slots


def prompts_s(group: Barrier) -> float:
    token_s = 1.0 if group.cost is None else group.cost.per_prompt_token_s
    return token_s * sum(group.pending_tokens) / len(group.pending_tokens)


RULES: dict[str, Allot] = {
    OURS: allot,
    "jffc": by(lambda group: (-group.rate_per_s, fullness(group))),
    "sed": by(lambda group: (group.fullness(),)),
    "least_prefill": by(lambda group: (prompts_s(group), fullness(group))),
}


def completed_per_s(workers: int) -> float:
    """Requests per second of a group that is alone and full, at full speed."""
    slots = workers * SLOTS
    full = replace(
        WORLD,
        workers=workers,
        arrivals=Arrivals("closed", slots * 5 // 4),
        requests=slots * 8,
        warmup=0.3,
    )
    records = simulate_serving(full, keep_records=True).records
    assert records is not None
    output = fmean(row.output_tokens for row in full.rows)
    return float(records.tokens.sum() / records.seconds.sum()) / output


def latencies_s(beside: Sequence[RankGroup], rate: float, requests: int, seed: int) -> list[float]:
    """Mean latency by each rule, on the same arrivals."""
    config = replace(
        WORLD,
        beside=beside,
        arrivals=Arrivals("poisson", rate),
        requests=requests,
        seed=seed,
    )
    return [simulate_serving(config, allot=rule).latency_mean_s for rule in RULES.values()]


def row(
    beside: Sequence[RankGroup], load: float, capacity: float, requests: int, seeds: int
) -> dict[str, object]:
    """Means over the seeds, and the router's over the best of the others."""
    found = [latencies_s(beside, load * capacity, requests, seed) for seed in range(seeds)]
    means = {name: fmean(each) for name, each in zip(RULES, zip(*found, strict=True), strict=True)}
    best = min(mean for name, mean in means.items() if name != OURS)
    return {
        "load": load,
        **{name: round(mean, 4) for name, mean in means.items()},
        "of_best": round(means[OURS] / best, 3),
        # Of each seed, beside the same rules.
        "of_best_by_seed": [round(each[0] / min(each[1:]), 3) for each in found],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slow", choices=SLOW, default="four")
    parser.add_argument("--loads", default=".5,.7,.9,1,1.1")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--json", type=Path, help="file; the part of this world is replaced")
    given = parser.parse_args()
    beside = SLOW[given.slow]
    alone = {workers: completed_per_s(workers) for workers in (8, 4)}
    capacity = sum(alone[each.workers] * each.speed for each in (RankGroup(8), *beside))
    rows = []
    for load in map(float, given.loads.split(",")):
        rows.append(row(beside, load, capacity, given.requests, given.seeds))
        print(rows[-1], flush=True)
    if given.json is not None:
        part = {
            "seeds": given.seeds,
            "requests": given.requests,
            "capacity_per_s": round(capacity, 1),
            "rows": rows,
        }
        write_part(given.json, given.slow, part, origin(Engines.SIMULATED, CODE))


if __name__ == "__main__":
    main()
