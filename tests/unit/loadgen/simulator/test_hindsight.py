"""The optimum in hindsight against every schedule there is, and policies against it."""

from collections.abc import Sequence

import numpy as np
import pytest

from engine_patches.admission import ADMISSIONS, read_admission
from loadgen.engine.engine import Engine
from loadgen.simulator.admission.admission_simulation import (
    AdmissionConfig,
    EndlessError,
    EvictionKind,
    simulate_admission,
)
from loadgen.simulator.admission.scenarios import Requests, Scenario
from router.core.step_time import StepTime
from tests.support.hindsight import Job, optimum, policy_engine, total_steps

MC_SF = {"policy": "memory_checked", "ageing": 0.0}


class Listed:
    """Jobs as a scenario's requests."""

    cap_tokens = 50

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs

    def draw(self, rate: float, count: int, seed: int) -> Requests:
        rows = [(job.arrived, job.prompt_tokens, job.output_tokens, 0) for job in self._jobs]
        arrived, prompts, outputs, kinds = np.array(rows).T
        return Requests(arrived.astype(float), prompts, outputs, kinds)


def config(
    jobs: Sequence[Job], kv_tokens: int, eviction: EvictionKind, **settings: object
) -> AdmissionConfig:
    listed = Scenario("listed", "", kv_tokens, StepTime(1.0), Listed(jobs), 1.0, len(jobs))
    return AdmissionConfig(read_admission(settings), listed, eviction=eviction)


def engine(kv_tokens: int, eviction: EvictionKind, **settings: object) -> Engine:
    restart = eviction is EvictionKind.RESTART
    return policy_engine(read_admission(settings), kv_tokens, restart=restart)


def drawn(seed: int, most: int = 5, last_arrival: int = 6) -> tuple[list[Job], int]:
    rng = np.random.default_rng(seed)
    columns = rng.integers([[0], [1], [1]], [[last_arrival + 1], [4], [6]], (3, most))
    jobs = [Job(*row) for row in columns.T.tolist()]
    return jobs[: int(rng.integers(1, most + 1))], int(rng.integers(8, 14))


def enumerated(jobs: Sequence[Job], kv_tokens: int) -> int:
    """The least total over all beginnings that the memory allows, written out."""
    until = max(job.arrived for job in jobs) + sum(job.output_tokens for job in jobs)
    least = until * len(jobs)

    def place(number: int, used: list[int], total: int) -> None:
        nonlocal least
        if number == len(jobs):
            least = min(least, total)
            return
        job = jobs[number]
        for begin in range(job.arrived, until - job.output_tokens + 1):
            after = list(used)
            for grown in range(job.output_tokens):
                after[begin + grown] += job.prompt_tokens + grown
            latency = begin + job.output_tokens - job.arrived
            if max(after) <= kv_tokens and total + latency < least:
                place(number + 1, after, total + latency)

    place(0, [0] * until, 0)
    return least


@pytest.mark.parametrize("seed", range(25))
def test_no_schedule_is_better_and_the_one_found_is_one(seed: int) -> None:
    jobs, kv_tokens = drawn(seed)

    found = optimum(jobs, kv_tokens)

    used: dict[int, int] = {}
    for job, begin in zip(jobs, found.begins, strict=True):
        assert begin >= job.arrived
        for grown in range(job.output_tokens):
            used[begin + grown] = used.get(begin + grown, 0) + job.prompt_tokens + grown
    ends = (begin + job.output_tokens for job, begin in zip(jobs, found.begins, strict=True))
    assert max(used.values()) <= kv_tokens
    assert sum(ends) - sum(job.arrived for job in jobs) == found.total_steps
    assert found.total_steps == enumerated(jobs, kv_tokens)


def test_alike_jobs_are_counted() -> None:
    """Of three that take 2 and 3 of 5 tokens, one runs at a time and another begins beside it."""
    assert optimum([Job(0, 2, 2)] * 3, 5).total_steps == 2 + 3 + 4


def test_what_never_fits_is_refused() -> None:
    assert optimum([Job(0, 3, 3)], 5).total_steps == 3
    with pytest.raises(ValueError, match=r"output_tokens=4\) can never run in 5 KV tokens"):
        optimum([Job(0, 1, 1), Job(0, 3, 4)], 5)
    with pytest.raises(ValueError, match="give at least one"):
        optimum([], 5)


@pytest.mark.parametrize("numbers", [(-1, 1, 1), (0, 0, 1), (0, 1, 0)])
def test_a_job_that_makes_no_sense_is_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="steps count from 0, tokens from 1"):
        Job(*numbers)


def test_mc_sf_is_not_optimal_although_theorem_4_2_says_so() -> None:
    """Section 4 of arXiv 2502.07115, s = 1, M = 11, o = 3, 3, 4, 5, 6, all at once: 31 against 30.

    By its (1) a request holds s, …, s + o and its latency is o: one token and one step more here.
    """
    jobs = [Job(0, 1, output + 1) for output in (3, 3, 4, 5, 6)]

    by_mc_sf = total_steps(engine(11, EvictionKind.RESTART, **MC_SF), jobs)

    assert by_mc_sf - len(jobs) == 31
    assert optimum(jobs, 11).total_steps - len(jobs) == 30


def test_four_jobs_suffice_to_be_better_than_mc_sf() -> None:
    """It begins 2 and 2 at once, then 3 and, two steps later, 3; better 2 and, a step later, 3."""
    jobs = [Job(0, 1, output) for output in (2, 2, 3, 3)]

    assert total_steps(engine(4, EvictionKind.RESTART, **MC_SF), jobs) == 2 + 2 + 5 + 7
    assert optimum(jobs, 4).total_steps == 15


def semi_online(jobs: list[Job], kv_tokens: int) -> int:
    """Algorithm 1 of arXiv 2502.07115, line by line, for jobs that are all there at first."""
    waiting = sorted(jobs, key=lambda job: job.output_tokens)
    running: list[tuple[int, Job]] = []
    now = total = 0
    while waiting or running:
        while waiting:
            batch = [*running, (now, waiting[0])]
            ends = {begun + job.output_tokens - 1 for begun, job in batch}
            held = [
                sum(
                    job.prompt_tokens + end - begun
                    for begun, job in batch
                    if end < begun + job.output_tokens
                )
                for end in ends
            ]
            if max(held) > kv_tokens:
                break
            running.append((now, waiting.pop(0)))
        now += 1
        total += sum(now for begun, job in running if begun + job.output_tokens == now)
        running = [(begun, job) for begun, job in running if begun + job.output_tokens > now]
    return total


@pytest.mark.parametrize("seed", range(40))
def test_mc_sf_is_the_semi_online_algorithm_where_all_are_there_at_first(seed: int) -> None:
    jobs, kv_tokens = drawn(seed, most=8, last_arrival=0)
    jobs = [Job(0, 1, job.output_tokens) for job in jobs]

    on_engine = engine(kv_tokens, EvictionKind.RESTART, **MC_SF)
    by_mc_sf = total_steps(on_engine, jobs)

    assert by_mc_sf == semi_online(jobs, kv_tokens)
    assert on_engine.preemptions_total == 0
    assert optimum(jobs, kv_tokens).total_steps <= by_mc_sf


@pytest.mark.parametrize("seed", range(25))
def test_no_policy_is_better_than_hindsight(seed: int) -> None:
    jobs, kv_tokens = drawn(seed, most=8, last_arrival=4)
    least = optimum(jobs, kv_tokens).total_steps

    totals = {
        policy: total_steps(engine(kv_tokens, EvictionKind.RESTART, policy=policy), jobs)
        for policy in ADMISSIONS
    }

    assert {policy: total for policy, total in totals.items() if total / least < 1} == {}


def test_who_keeps_tokens_may_be_better_than_without_interruption() -> None:
    """1 and 1, 2 and 2, 3 and 3 of 6 tokens; one pauses as the other goes on to 5, then ends."""
    jobs = [Job(0, 1, 5)] * 2

    assert total_steps(engine(6, EvictionKind.KEEP, policy="off"), jobs) == 5 + 7
    assert total_steps(engine(6, EvictionKind.RESTART, policy="off"), jobs) == 5 + 9
    assert optimum(jobs, 6).total_steps == 5 + 9


@pytest.mark.parametrize("policy", ADMISSIONS)
@pytest.mark.parametrize("eviction", EvictionKind)
def test_totals_are_those_of_the_simulation(policy: str, eviction: EvictionKind) -> None:
    """Which leaves out the first requests, unless all come at once."""
    for seed in range(5):
        jobs, kv_tokens = drawn(seed, most=8, last_arrival=0)
        simulated = simulate_admission(config(jobs, kv_tokens, eviction, policy=policy))
        total = total_steps(engine(kv_tokens, eviction, policy=policy), jobs)
        assert simulated.latency_mean_s == pytest.approx(total / len(jobs))


def test_arrivals_are_waited_for() -> None:
    jobs = [Job(70_000, 2, 3), Job(7, 2, 1)]

    assert total_steps(engine(9, EvictionKind.KEEP, policy="off"), jobs) == 3 + 1


def test_jobs_that_are_always_cleared_never_end() -> None:
    cleared = engine(12, EvictionKind.RESTART, policy="alpha_beta", alpha=0.1, beta=1.0)
    with pytest.raises(EndlessError, match="no request ended in 10,000 steps"):
        total_steps(cleared, [Job(0, 4, 7)] * 2)
