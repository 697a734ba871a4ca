"""How far bfio's solver is from the optimum, on programs that simulations come to.

    python tests/bench/bench_solver_gap.py [--kept FILE | --each 24 --cache DIR] [--json FILE] ...

Simulates full pools of BurstGPT lengths with oracle look-ahead, takes programs out of the runs,
drops their quadratic term (mu = 0), and solves each one exactly (HiGHS) and by ``solve``. Gaps are
in percent of the optimum J; with --cache, optima that are known are not computed again. --kept
measures the programs of tests/data/programs.json.gz, drawn so from an earlier solver's runs;
--memory gives their workers about as much memory as the free slots need, more or less at random.
"""

import argparse
import gzip
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import fmean, median
from typing import Any
from zlib import crc32

import numpy as np

from loadgen.report.origin import Engines, origin
from loadgen.simulator.decode.barrier_decode import simulate
from loadgen.simulator.decode.decode_config import DecodeConfig
from loadgen.simulator.decode.length_sources import TraceLengths
from loadgen.simulator.decode.oracle import Knowledge
from loadgen.traces.trace import load_trace
from router.core.policies.bfio.exact import TOLERANCE, solve_exact
from router.core.policies.bfio.instances import from_json, to_json
from router.core.policies.bfio.policy import BfIo
from router.core.policies.bfio.solver import DEFAULT_MOVES, Instance, Memory, solve
from router.core.policies.policy_protocol import NOTHING, Known, Policy
from router.core.types import Assignment, Request, WorkerView
from tests.support.figure_files import write_part

CODE = (
    "router/core/policies",
    "router/core/forecast",
    "tests/data/programs.json.gz",
    "tests/bench/bench_solver_gap.py",
)

FIRST_STEP = 400
EVERY = 25
PER_SEED = 8
_ROOM_SIGMA = 0.7  # of the rooms' logarithm
NAMED = "{workers}_{horizon}_{discount:g}_{seed}_{step}"


@dataclass(frozen=True, slots=True, order=True)
class Case:
    """One class of instances; mu is the simulation's, not the instance's."""

    workers: int
    horizon: int
    discount: float
    tie_weight: float

    def __str__(self) -> str:
        ahead = f", discount {self.discount:g}" if self.horizon else ""
        return f"G {self.workers}, H {self.horizon}{ahead}"


CASES = [
    Case(workers, horizon, discount, tie_weight)
    for workers in (8, 16, 32)
    for horizon, discount, tie_weight in ((0, 1.0, 0.1), (20, 1.0, 1e-4), (20, 0.8, 1e-4))
]


@dataclass(frozen=True, slots=True)
class Gap:
    """What one instance showed."""

    case: Case
    name: str
    optimum: float
    bound: float
    proven: bool
    exact_s: float
    objective: float
    solve_s: float

    @property
    def percent(self) -> float:
        return 100 * (self.objective - self.optimum) / max(self.optimum, 1.0)


class Tap(Policy):
    """BF-IO that keeps some of the programs that it solves."""

    def __init__(self) -> None:
        self._bfio = BfIo(0.0)
        self._rounds = 0
        self.kept: list[tuple[int, Instance]] = []

    def assign(
        self,
        waiting: Sequence[Request],
        workers: Sequence[WorkerView],
        known: Known = NOTHING,
    ) -> Sequence[Assignment]:
        done = self._bfio.assign(waiting, workers, known)
        self._rounds += 1
        if self._rounds > FIRST_STEP and self._rounds % EVERY == 0 and self._bfio.last:
            instance = replace(self._bfio.last.instance, tie_weight=0.0)
            self.kept.append((self._rounds, instance))
        return done


Job = tuple[Case, str, Instance, dict[str, Any] | None]


def draw(case: Case, seed: int) -> list[tuple[str, Instance]]:
    tap = Tap()
    config = DecodeConfig(
        policy="bfio",
        lengths=TraceLengths.of(load_trace("burstgpt")),
        workers=case.workers,
        steps=FIRST_STEP + EVERY * (PER_SEED + 1),
        warmup=0,
        seed=seed,
        horizon=case.horizon,
        discount=case.discount,
        tie_weight=case.tie_weight,
        lead_tokens=0.0,
        knowledge=Knowledge("oracle"),
        deadline_steps=0,
        overcommit=0,
    )
    simulate(config, policy=tap)
    names = asdict(case) | {"seed": seed}
    return [(NAMED.format(**names, step=step), instance) for step, instance in tap.kept[:PER_SEED]]


def drawn(case: Case, each: int) -> Iterator[tuple[str, Instance]]:
    seeds = range(-(-each // PER_SEED))
    found = [instance for seed in seeds for instance in draw(case, seed)]
    yield from found[:each]


def optimum(name: str, instance: Instance, limit_s: float, cache: Path | None) -> dict[str, Any]:
    """HiGHS's result, from the cache if it is proven there."""
    file = cache / f"{name}.json" if cache else None
    if file and file.exists():
        kept = json.loads(file.read_text())
        if kept["exact"]["proven"] and to_json(instance).items() <= kept.items():
            return dict(kept["exact"])
    begun_s = time.perf_counter()
    exact = solve_exact(instance, limit_s)
    known = {
        "objective": exact.objective,
        "bound": exact.bound,
        "proven": exact.proven,
        "seconds": round(time.perf_counter() - begun_s, 2),
    }
    if file:
        file.write_text(json.dumps(to_json(instance) | {"exact": known}))
    return known


def kept_jobs(file: Path) -> Iterator[Job]:
    """Programs with their optima."""
    for name, program in json.loads(gzip.decompress(file.read_bytes())).items():
        workers, horizon, discount = name.split("_")[:3]
        case = Case(int(workers), int(horizon), float(discount), 0.0)
        yield case, name, from_json(program), program["exact"]


def with_memory(job: Job) -> Job:
    """The program with workers whose memory binds for most: about what their slots need."""
    case, name, instance, _ = job
    rng = np.random.default_rng(crc32(name.encode()))
    need = instance.candidates[:, 0].astype(np.int64)
    usual = np.maximum(instance.capacity, 1) * np.median(need)
    room = (usual * rng.lognormal(0.0, _ROOM_SIGMA, len(usual))).astype(np.int64)
    memory = Memory(room, need, np.zeros(len(room), dtype=np.bool_))
    return case, name, replace(instance, memory=memory), None


def measure(job: Job, moves: int, limit_s: float, cache: Path | None) -> Gap:
    case, name, instance, known = job
    known = known or optimum(name, instance, limit_s, cache)
    solve(instance, moves)  # compiled by now
    begun_s = time.perf_counter()
    solution = solve(instance, moves)
    solve_s = time.perf_counter() - begun_s
    best = min(known["objective"], solution.objective)
    return Gap(
        case,
        name,
        best,
        known["bound"],
        known["proven"],
        known["seconds"],
        solution.objective,
        solve_s,
    )


def row(case: Case, gaps: Sequence[Gap]) -> dict[str, Any]:
    percents = [gap.percent for gap in gaps]
    return {
        "class": str(case),
        "instances": len(gaps),
        "proven_share": fmean(gap.proven for gap in gaps),
        "optimal_share": fmean(gap.objective - gap.optimum < 1e-6 * gap.optimum for gap in gaps),
        "mean_gap_percent": fmean(percents),
        "max_gap_percent": max(percents),
        "median_exact_s": median(gap.exact_s for gap in gaps),
        "max_exact_s": max(gap.exact_s for gap in gaps),
        "median_solve_ms": 1000 * median(gap.solve_s for gap in gaps),
    }


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| class | instances | proven | solver optimal | mean gap | max gap | HiGHS median / max "
        "| solver median |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['class']} | {row['instances']} | {row['proven_share']:.0%} "
        f"| {row['optimal_share']:.0%} | {row['mean_gap_percent']:.3f} % "
        f"| {row['max_gap_percent']:.2f} % | {row['median_exact_s']:.1f} / "
        f"{row['max_exact_s']:.0f} s | {row['median_solve_ms']:.2f} ms |"
        for row in rows
    ]
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--each", type=int, default=24, help="instances of each class")
    parser.add_argument("--kept", type=Path, help="programs with their optima: nothing is drawn")
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 16, 32], help="G of classes")
    parser.add_argument("--horizon", type=int, nargs="+", default=[0, 20], help="H of classes")
    parser.add_argument("--memory", action="store_true", help="with memory that binds; with --kept")
    parser.add_argument("--moves", type=int, default=DEFAULT_MOVES, help="the solver's budget")
    parser.add_argument("--time-limit", type=float, default=120.0, help="HiGHS's, seconds each")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--cache", type=Path, help="folder of instances and their optima")
    parser.add_argument("--json", type=Path, help="file; takes a part for each budget")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.cache:
        args.cache.mkdir(parents=True, exist_ok=True)
    cases = [
        case for case in CASES if case.workers in args.workers and case.horizon in args.horizon
    ]
    jobs: list[Job] = [*kept_jobs(args.kept)] if args.kept else []
    if not args.kept:
        jobs = [(case, *named, None) for case in cases for named in drawn(case, args.each)]
    jobs = [
        job for job in jobs if job[0].workers in args.workers and job[0].horizon in args.horizon
    ]
    if args.memory:
        jobs = [with_memory(job) for job in jobs]
    work = partial(measure, moves=args.moves, limit_s=args.time_limit, cache=args.cache)
    with ProcessPoolExecutor(args.processes) as pool:
        gaps = list(pool.map(work, jobs))
    rows = [row(case, list(some)) for case, some in groupby(gaps, lambda gap: gap.case)]
    print(markdown(rows))
    print(f"\nproven: within {TOLERANCE:.2%} of the bound, or half a token")
    if args.json:
        part = {"moves": args.moves, "classes": rows}
        name = f"{args.moves}_moves" + "_memory" * args.memory
        write_part(args.json, name, part, origin(Engines.SIMULATED, CODE))


if __name__ == "__main__":
    main()
