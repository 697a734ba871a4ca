"""Choice, waits and the work of a round in long pools.

    python tests/bench/bench_long_pools.py [--pools 128,512,1024,8192] [--seeds 5] [--json FILE]

Choice: `simulate decode` under bfio, 16 workers x 72 slots, geometric lengths of 2,000 and 1,000
tokens, always so many waiting. The bound is that of 200 steps, or twice the mean wait under fcfs in
the same pool. The imbalance with it is divided by that of the same seeds without a bound.

Rounds: CPU time of a live round beside its policy, with 10,000 waiting, of one tenant and priority
or of 100 tenants of three priorities each; 16 workers, one request enters a round and one comes.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import fmean

import numpy as np

from loadgen.report.origin import Engines, origin
from loadgen.simulator.decode.barrier_decode import simulate
from loadgen.simulator.decode.decode_config import DecodeConfig
from loadgen.simulator.decode.length_sources import LawLengths
from router.core.events import Arrived, Dispatched, Ended, WorkerUp
from router.core.forecast.end_signals import NoSignal
from router.core.forecast.look_ahead import LookAhead
from router.core.policies.baselines import PerRequest, fcfs
from router.core.policies.bfio.policy import BfIo
from router.core.policies.policy_protocol import NOTHING, Known
from router.core.queue.pool import Pool
from router.core.rounds.decider import Decider
from router.core.state.cluster import Cluster
from router.core.types import Assignment, Dispatch, Outcome, Request, WorkerSpec, WorkerView
from tests.support.figure_files import write_figures

CODE = ("router/core", "loadgen/simulator/decode", "tests/bench/bench_long_pools.py")

WORLD = DecodeConfig(policy="bfio", lengths=LawLengths.parse("geometric:2000,1000"))
LEAST_BOUND = 200
WAITING, ROUNDS = 10_000, 300


def choice(pool: int, seeds: int) -> dict[str, float]:
    """Means over the seeds, paired; waits in steps."""
    warmup = 500 + 2 * min(pool, 1024)
    steps = 4000 + warmup + 2 * pool
    world = replace(WORLD, pool=pool, steps=steps, warmup=warmup)
    # Little's law: as many wait as enter in the mean wait.
    served = simulate(replace(world, policy="fcfs"))
    bound = max(LEAST_BOUND, round(2 * pool * (steps - warmup) / served.completed))
    found, waits = [], []
    for seed in range(seeds):
        free, bounded = (
            simulate(replace(world, seed=seed, deadline_steps=steps_)) for steps_ in (0, bound)
        )
        found.append((free.avg_imbalance_tokens, bounded.avg_imbalance_tokens))
        waits.append(bounded.max_pool_wait_steps)
    without, with_ = map(fmean, zip(*found, strict=True))
    return {
        "pool": pool,
        "bound_steps": bound,
        "imbalance_tokens": round(with_),
        "without_bound_tokens": round(without),
        "ratio": round(with_ / without, 3),
        "longest_wait_over_bound": round(max(waits) / bound, 3),
    }


class Timed(BfIo):
    """Adds up the CPU time of its decisions."""

    taken_s = 0.0

    def assign(
        self, waiting: Sequence[Request], workers: Sequence[WorkerView], known: Known = NOTHING
    ) -> Sequence[Assignment]:
        start = time.thread_time()
        done = super().assign(waiting, workers, known)
        self.taken_s += time.thread_time() - start
        return done


def arriving(tenants: int, priorities: int) -> Iterator[Request]:
    """Requests without end, a hundredth of a second apart."""
    rng = np.random.default_rng(0)
    for number in count():
        yield Request(
            f"es-{number:x}",
            "default",
            int(rng.geometric(1 / 2000)),
            priority=number % priorities,
            arrival_s=number / 100,
            tenant=f"tenant {number % tenants}" if tenants > 1 else "",
        )


def round_ms(tenants: int, priorities: int) -> dict[str, float]:
    """Milliseconds of a round beside its policy."""
    cluster = Cluster([WorkerSpec(f"w{i}", f"w{i}", slots=72) for i in range(16)])
    for worker_id in cluster.groups["default"].workers:
        cluster.apply(WorkerUp(worker_id))
    policy, pool, coming = Timed(0.1), Pool(20_000, 5.0), arriving(tenants, priorities)
    decider = Decider(
        cluster.groups["default"],
        pool,
        policy,
        PerRequest(fcfs),
        Dispatch.POOL,
        LookAhead(NoSignal()),
    )
    running: list[str] = []

    def arrive() -> float:
        request = next(coming)
        cluster.apply(Arrived(request))
        pool.add(request)
        return request.arrival_s

    def decide(now: float) -> None:
        for request_id, worker_id in decider.decide(now, lambda: now):
            pool.remove(request_id)
            cluster.apply(Dispatched(request_id, worker_id, now))
            running.append(request_id)

    for _ in range(WAITING + 16 * 72):
        now = arrive()
    decide(now)
    taken = []
    for _ in range(ROUNDS):
        cluster.apply(Ended(running.pop(0), Outcome.COMPLETED))
        now = arrive()
        solved_s, start = policy.taken_s, time.thread_time()
        decide(now)
        taken.append(1e3 * (time.thread_time() - start - (policy.taken_s - solved_s)))
    p50, p99 = np.percentile(taken, (50, 99)).round(3).tolist()
    return {"tenants": tenants, "priorities": priorities, "p50_ms": p50, "p99_ms": p99}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pools", default="128,512,1024,8192")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for everything that was measured")
    given = parser.parse_args()
    rounds = [round_ms(*world) for world in ((1, 1), (1, 3), (100, 3))]
    for row in rounds:
        print(row, flush=True)
    pools = []
    for pool in map(int, filter(None, given.pools.split(","))):
        pools.append(choice(pool, given.seeds))
        print(pools[-1], flush=True)
    if given.json is not None:
        figures = {"pools": pools, "rounds": rounds}
        write_figures(given.json, figures, origin(Engines.SIMULATED, CODE))


if __name__ == "__main__":
    main()
