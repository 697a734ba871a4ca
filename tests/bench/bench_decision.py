"""What a decision of bfio costs on one core, the forecast included, in steady state.

    python tests/bench/bench_decision.py [--steps 400] [--runs 5] [--memory] [--growth] [--prompts]
        [--plot PNG] [--json F]

Simulates full pools of BurstGPT lengths on workers of 72 slots, where some 1.75 % of the slots come
free at each step, with oracle look-ahead. A decision is forecast, tiers of the pool, rounds and
policy. Times are CPU time of one thread, and of each decision the shortest of several runs, so that
what else the machine does hardly counts. With --memory every size is measured a second time, in
turn with the first, and every other worker has KV memory for 97 % of the usual load: it fills up
with slots to spare. --prompts measures the plan for prompts instead: half of the workers
compute some, and three random ones have part of each waiting prompt cached.
"""

import argparse
import json
import sys
import time
from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np

from loadgen.report.origin import Engines, origin
from loadgen.simulator.decode.barrier_decode import simulate
from loadgen.simulator.decode.decode_config import DecodeConfig
from loadgen.simulator.decode.decode_engines import Engines as SimulatedEngines
from loadgen.simulator.decode.length_sources import TraceLengths
from loadgen.simulator.decode.oracle import Knowledge
from loadgen.traces.trace import load_trace
from router.core.forecast.forecast import Floats, Outlook, WorkProfile
from router.core.policies.bfio.policy import BfIo
from router.core.policies.bfio.solver import DEFAULT_MOVES
from router.core.policies.policy_protocol import NOTHING, Known
from router.core.queue.tier import Tier
from router.core.step_time import StepTime
from router.core.types import Assignment, Request, WorkerView
from tests.support.figure_files import write_figures

CODE = (
    "router/core",
    "loadgen/simulator/decode",
    "loadgen/traces",
    "tests/bench/bench_decision.py",
)

WARM_UP = 200
MEMORY_SHARE = 0.97
DISCOUNT = 0.8
TIE_WEIGHT = 1e-4


@dataclass(frozen=True, slots=True)
class Size:
    """G workers, R requests in the pool, H steps of look-ahead, limit of p99."""

    workers: int
    pool: int
    horizon: int
    limit_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Cost:
    """What the decisions of one size took.

    Attributes:
        memory: true if the memory of half of the workers was limited.
        free_slots: requests that end at a step.
        waiting_share: part of the decisions that left slots free for lack of memory.
    """

    size: Size
    memory: bool
    free_slots: float
    waiting_share: float
    p50_ms: float
    p99_ms: float
    imbalance_tokens: float


SIZES = [Size(32, 128, 20, 1.0), Size(64, 512, 40, 2.0), Size(256, 2048, 20, 3.0)]
PLANS = [Size(32, 128, 20, 1.5), Size(256, 2048, 20, 4.0)]
COST, CHUNK, CACHED_ON = StepTime(5e-3, 9.5e-8, 0.0, 5e-5), 2048, 3
BY_WORKERS = [Size(workers, 4 * workers, 20) for workers in (8, 16, 32, 64, 128, 256)]
BY_POOL = [Size(32, pool, 20) for pool in (64, 128, 256, 512, 1024, 2048)]
BY_HORIZON = [Size(32, 128, horizon) for horizon in (0, 5, 10, 20, 40)]


class Stopwatch:
    """CPU time of this thread, read before and after each decision."""

    def __init__(self) -> None:
        self._read_s: list[float] = []

    def __call__(self) -> float:
        self._read_s.append(time.thread_time())
        return self._read_s[-1]

    @property
    def taken_ms(self) -> Floats:
        return 1e3 * np.diff(np.reshape(self._read_s, (-1, 2)))[:, 0]


class Tapped(BfIo):
    """Keeps what each decision had and made, and counts only afterwards."""

    def __init__(self, moves: int) -> None:
        super().__init__(0.0, moves)
        self.decided: list[tuple[int, Sequence[WorkerView]]] = []

    def assign(
        self, waiting: Sequence[Request], workers: Sequence[WorkerView], known: Known = NOTHING
    ) -> Sequence[Assignment]:
        done = super().assign(waiting, workers, known)
        self.decided.append((len(done), workers))
        return done

    def left_free(self, last: int) -> float:
        """Part of so many last decisions that left slots free."""
        return float(
            np.mean([made < sum(one.capacity for one in had) for made, had in self.decided[-last:]])
        )


def limited(kv_tokens: float) -> AbstractContextManager[object]:
    """Simulated engines of which every other one has so much KV memory, and evicts nobody."""

    def admissible(engines: SimulatedEngines, step: int) -> Sequence[int | None]:
        loads = engines.known_tokens(step).tolist()
        return [
            None if worker % 2 else max(0, int(kv_tokens - load))
            for worker, load in enumerate(loads)
        ]

    return patch.object(SimulatedEngines, "admissible_tokens", admissible)


def measure(size: Size, steps: int, moves: int, runs: int, *, memory: bool) -> list[Cost]:
    """Take each decision's shortest time; all runs decide alike."""
    config = DecodeConfig(
        policy="bfio",
        lengths=TraceLengths.of(load_trace("burstgpt")),
        workers=size.workers,
        pool=size.pool,
        steps=WARM_UP + steps,
        warmup=WARM_UP,
        horizon=size.horizon,
        discount=DISCOUNT,
        tie_weight=TIE_WEIGHT,
        knowledge=Knowledge("oracle"),
        deadline_steps=0,
        overcommit=0,
    )
    usual = simulate(config, policy=BfIo(0.0, moves)).mean_load_tokens
    taken: dict[bool, list[Floats]] = {False: [], True: []}
    last = {}
    for run in range((1 + memory) * runs):
        tight = bool(memory and run % 2)
        clock, policy = Stopwatch(), Tapped(moves)
        with limited(MEMORY_SHARE * usual) if tight else nullcontext():
            last[tight] = simulate(config, clock=clock, policy=policy), policy
        taken[tight].append(clock.taken_ms)
    costs = []
    for tight, (result, policy) in last.items():
        p50_ms, p99_ms = np.percentile(np.min(taken[tight], axis=0)[-steps:], [50, 99]).tolist()
        free, left = result.completed / result.steps, policy.left_free(steps)
        imbalance = result.avg_imbalance_tokens
        costs.append(Cost(size, tight, free, left, p50_ms, p99_ms, imbalance))
    return costs


def measure_plans(size: Size, decisions: int, runs: int) -> dict[str, object]:
    """Time random decisions, each as often, and keep the shortest time of each."""
    rng, policy, taken = np.random.default_rng(0), BfIo(0.0), []
    sent = 0
    for _ in range(decisions):
        waiting, workers, known = a_round(size, rng)
        clock = Stopwatch()
        for _ in range(runs):
            clock()
            sent += len(policy.assign(waiting, workers, known))
            clock()
        taken.append(clock.taken_ms.min())
    p50_ms, p99_ms = np.percentile(taken, [50, 99]).tolist()
    times = {"sent": sent / runs / decisions, "p50_ms": p50_ms, "p99_ms": p99_ms}
    return {"size": asdict(size), "cached_on": CACHED_ON, **times}


def a_round(size: Size, rng: np.random.Generator) -> tuple[Tier, list[WorkerView], Known]:
    loads = rng.integers(100_000, 200_000, size.workers)
    pending = rng.integers(0, 4 * CHUNK, size.workers) * (rng.random(size.workers) < 0.5)
    capacity = rng.integers(0, 30, size.workers)
    rows = zip(loads.tolist(), capacity.tolist(), pending.tolist(), strict=True)
    workers = [
        WorkerView(f"w{n}", load, 40, room, pending_prompt_tokens=left)
        for n, (load, room, left) in enumerate(rows)
    ]
    hits: dict[str, Sequence[int]] = {}
    waiting = [
        Request(f"r{n}", "g", prompt, arrival_s=n / size.pool)
        for n, prompt in enumerate(rng.integers(100, 9000, size.pool).tolist())
    ]
    for each in waiting:
        where = rng.integers(0, size.workers, CACHED_ON).tolist()
        tokens = int(each.prompt_tokens * rng.random())
        hits[each.id] = array("q", [tokens * (at in where) for at in range(size.workers)])
    beta = COST.per_prompt_token_s / COST.per_token_s
    profile = WorkProfile(prefill_beta=beta, prefill_chunk=CHUNK)
    work = np.repeat(loads[:, None], size.horizon + 1, axis=1).astype(np.float64)
    outlook = Outlook(work, profile, DISCOUNT, TIE_WEIGHT)
    known = Known(outlook, COST, lambda one: hits[one.id], 2.0, may_wait=True)
    return Tier.of(waiting), workers, known


def markdown(costs: Sequence[Cost]) -> str:
    lines = [
        "| G | R | H | memory | slots coming free at a step | p50 | p99 | at most | imbalance |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {cost.size.workers} | {cost.size.pool} | {cost.size.horizon} "
        f"| {f'left slots free in {cost.waiting_share:.0%}' if cost.memory else 'ample'} "
        f"| {cost.free_slots:.0f} "
        f"| {cost.p50_ms:.2f} ms | {cost.p99_ms:.2f} ms "
        f"| {f'{cost.size.limit_ms:g} ms' if cost.size.limit_ms else ''} "
        f"| {cost.imbalance_tokens:,.0f} |"
        for cost in costs
    ]
    return "\n".join(lines)


def plot(costs: dict[Size, Cost], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    panels = (("G", "workers", BY_WORKERS), ("R", "pool", BY_POOL), ("H", "horizon", BY_HORIZON))
    for axes, (name, field, sizes) in zip(figure.subplots(1, 3, sharey=True), panels, strict=True):
        at = [getattr(size, field) for size in sizes]
        for quantile in ("p50_ms", "p99_ms"):
            times = [getattr(costs[size], quantile) for size in sizes]
            axes.plot(at, times, marker="o", label=quantile[:3])
        if name != "H":
            axes.set_xscale("log", base=2)
        axes.set(xlabel=name, ylim=(0, None))
        axes.grid(alpha=0.3)
    figure.axes[0].set(ylabel="CPU time of a decision, ms", title="R = 4 G, H = 20")
    figure.axes[1].set(title="G = 32, H = 20")
    figure.axes[2].set(title="G = 32, R = 128")
    figure.axes[0].legend()
    figure.savefig(file, dpi=100)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="decisions measured of each size")
    parser.add_argument("--runs", type=int, default=5, help="times that each is measured")
    parser.add_argument("--moves", type=int, default=DEFAULT_MOVES, help="the solver's budget")
    parser.add_argument("--memory", action="store_true", help="measure with limited memory too")
    parser.add_argument("--growth", action="store_true", help="measure growth with G, R and H too")
    parser.add_argument("--prompts", action="store_true", help="measure the plan for prompts alone")
    parser.add_argument("--plot", type=Path, help="PNG of the growth")
    parser.add_argument("--json", type=Path, help="file for everything that was measured")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.prompts:
        plans = [measure_plans(size, args.steps, args.runs) for size in PLANS]
        print(json.dumps(plans, indent=1))
        if args.json:
            kept = {"steps": args.steps, "runs": args.runs, "plans": plans}
            write_figures(args.json, kept, origin(Engines.SIMULATED, CODE))
        return
    sizes = list(SIZES)
    if args.growth or args.plot:
        sizes += [*BY_WORKERS, *BY_POOL, *BY_HORIZON]
    costs = []
    for size in dict.fromkeys(sizes):
        costs += measure(size, args.steps, args.moves, args.runs, memory=args.memory)
        print(f"measured {size}", file=sys.stderr)
    print(markdown(costs))
    ample = [cost for cost in costs if not cost.memory]
    if args.plot:
        plot({cost.size: cost for cost in ample}, args.plot)
    if args.json:
        pictures = [args.plot] if args.plot else []
        kept = {
            "moves": args.moves,
            "steps": args.steps,
            "runs": args.runs,
            "sizes": [*map(asdict, ample)],
            "memory_share": MEMORY_SHARE,
            "with_memory": [asdict(cost) for cost in costs if cost.memory],
        }
        write_figures(args.json, kept, origin(Engines.SIMULATED, CODE), *pictures)


if __name__ == "__main__":
    main()
