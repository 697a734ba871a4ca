"""Least possible total latency, known in hindsight (HiGHS), and the total of a given engine.

Total latency is the sum of the steps from each request's arrival to its end, on an engine with
little memory whose steps take one unit of time each. The program is that of arXiv 2502.07115,
Appendix B.1. It counts as ``loadgen.engine.engine`` does: a request of prompt s
and output o that begins with step p holds s, s + 1, …, s + o - 1 tokens in the steps p, …, p + o -
1, without interruption. By (1) of that paper it holds s + o one step longer: that is a request of
output o + 1 here, and its latency is one step less.

The optimum is a lower bound for every engine that restarts evicted requests: the runs that reach
their end form such a schedule. It is no bound where evicted requests keep their tokens: all steps
take the same time, so recomputing costs nothing and an eviction is a pause.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np

from engine_patches.admission import clearing_of, make_admission
from engine_patches.admission.settings import AdmissionSettings
from loadgen.engine.engine import Engine
from loadgen.engine.queues import Eviction, PolicyOrder
from loadgen.engine.request import EngineRequest
from loadgen.simulator.admission.admission_simulation import EndlessError
from router.core.forecast.forecast import Ints
from router.core.policies.bfio.exact_model import Rows, run_highs

# Totals are integers: a value less than one above the bound is optimal.
_OPTIONS = {"mip_rel_gap": 0.0, "mip_abs_gap": 0.9}
_MOST_FRUITLESS = 10_000


@dataclass(frozen=True, slots=True, order=True)
class Job:
    """A request.

    Attributes:
        arrived: first step that it can be part of, at least 0.
        prompt_tokens: s, at least 1.
        output_tokens: o, at least 1.

    Raises:
        ValueError: one of them is less.
    """

    arrived: int
    prompt_tokens: int
    output_tokens: int

    def __post_init__(self) -> None:
        if self.arrived < 0 or self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError(f"{self}: steps count from 0, tokens from 1")


@dataclass(frozen=True, slots=True)
class Hindsight:
    """A best schedule: total latency, and the first step of each job, in their order."""

    total_steps: int
    begins: tuple[int, ...]


def optimum(jobs: Sequence[Job], kv_tokens: int) -> Hindsight:
    """Solve the program to optimality; fast for about ten jobs of about ten tokens.

    Raises:
        ValueError: no jobs, or one that the memory could never hold.
    """
    if not jobs:
        raise ValueError("there is no schedule of no jobs: give at least one")
    for job in jobs:
        if job.prompt_tokens + job.output_tokens - 1 > kv_tokens:
            raise ValueError(f"{job} can never run in {kv_tokens} KV tokens")
    program = _Program.of(jobs)
    highs = run_highs(program.lp(kv_tokens), _OPTIONS)
    assert highs.getModelStatus() == highspy.HighsModelStatus.kOptimal
    counts = np.rint(np.array(highs.getSolution().col_value)).astype(np.int64)
    begins: dict[Job, list[int]] = {job: [] for job in program.kinds}
    for kind, begin, count in zip(program.kind_of, program.begins, counts, strict=True):
        begins[program.kinds[kind]] += [int(begin)] * int(count)
    total = int(program.latencies @ counts)
    return Hindsight(total, tuple(begins[job].pop() for job in jobs))


def policy_engine(
    settings: AdmissionSettings, kv_tokens: int, *, restart: bool, seed: int = 0
) -> Engine:
    """An engine that only its memory limits; cleared requests always restart."""
    clearing = clearing_of(settings)
    return Engine(
        sys.maxsize,
        kv_tokens,
        eviction=Eviction(restart or clearing > 0, clearing, np.random.default_rng([seed, 3])),
        queue=PolicyOrder(make_admission(settings)),
    )


def total_steps(engine: Engine, jobs: Sequence[Job]) -> int:
    """Total latency of jobs on a new engine whose policy sees their true lengths.

    Raises:
        EndlessError: the same jobs are evicted again and again.
    """
    coming = sorted(enumerate(jobs), key=lambda numbered: numbered[1].arrived)[::-1]
    now, total, fruitless = 0, 0, 0
    while coming or engine.unfinished:
        while coming and coming[-1][1].arrived <= now:
            number, job = coming.pop()
            request = EngineRequest(
                str(number),
                job.prompt_tokens,
                job.output_tokens,
                hint_tokens=job.output_tokens,
                arrived_s=job.arrived,
            )
            engine.add(request)
        if not engine.unfinished:
            now = coming[-1][1].arrived
            continue
        schedule = engine.schedule(now)
        if schedule.preempted and not engine.running:
            # After a clearing of all requests no request enters: that does not count as a step.
            engine.schedule(now)
        ended = engine.advance(now + 1)
        now += 1
        total += sum(now - jobs[int(request.id)].arrived for request in ended)
        fruitless = 0 if ended else fruitless + 1
        if fruitless == _MOST_FRUITLESS:
            raise EndlessError(f"no request ended in {_MOST_FRUITLESS:,} steps")
    return total


@dataclass(frozen=True, slots=True)
class _Program:
    """Columns x_vp: number of jobs of kind v that begin with step p; equal jobs are one kind.

    Attributes:
        kinds: the V different jobs.
        counts: shape (V,), number of jobs of each kind.
        kind_of, begins: shape (N,), v and p of each column.
        until: steps. Some best schedule is never idle after the last arrival, so it ends
            by the last arrival plus all outputs.
    """

    kinds: Sequence[Job]
    counts: Ints
    kind_of: Ints
    begins: Ints
    until: int

    @classmethod
    def of(cls, jobs: Sequence[Job]) -> _Program:
        kinds = sorted(Counter(jobs).items())
        outputs = sum(job.output_tokens for job in jobs)
        until = max(job.arrived for job in jobs) + outputs
        columns = [
            (kind, begin)
            for kind, (job, _) in enumerate(kinds)
            for begin in range(job.arrived, until - job.output_tokens + 1)
        ]
        kind_of, begins = np.array(columns, dtype=np.int64).T
        counts = np.array([count for _, count in kinds], dtype=np.int64)
        return cls([job for job, _ in kinds], counts, kind_of, begins, until)

    def _of_jobs(self, name: str) -> Ints:
        values = [getattr(job, name) for job in self.kinds]
        return np.array(values, dtype=np.int64)[self.kind_of]

    @property
    def latencies(self) -> Ints:
        """Steps from arrival to end, shape (N,)."""
        return self.begins + self._of_jobs("output_tokens") - self._of_jobs("arrived")

    def lp(self, kv_tokens: int) -> highspy.HighsLp:
        """Each job begins once, and the memory suffices in each step."""
        lp, rows, size = highspy.HighsLp(), Rows(), len(self.begins)
        lp.num_col_ = size
        lp.col_cost_ = self.latencies.astype(np.float64)
        lp.col_lower_, lp.col_upper_ = np.zeros(size), self.counts[self.kind_of].astype(np.float64)
        lp.integrality_ = [highspy.HighsVarType.kInteger] * size
        for kind, count in enumerate(self.counts):
            rows.add((np.flatnonzero(self.kind_of == kind), 1.0), lower=count, upper=count)
        ends = self.begins + self._of_jobs("output_tokens")
        sizes = self._of_jobs("prompt_tokens") - self.begins
        for step in range(self.until):
            running = np.flatnonzero((self.begins <= step) & (step < ends))
            rows.add((running, (sizes[running] + step).astype(np.float64)), upper=kv_tokens)
        rows.into(lp)
        return lp
