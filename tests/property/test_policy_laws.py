"""BF-IO: what holds for every instance, and how far it is from the optimum on small ones."""

import random
from collections.abc import Iterator, Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.policies.bfio.policy import BfIo
from router.core.policies.policy_protocol import Policy
from router.core.policies.policy_table import POLICIES, PolicySettings
from router.core.types import Request, WorkerView
from tests.support.core import request, requests, views

MU = 0.1

SIZES = st.lists(st.integers(0, 3000), max_size=14)
ROWS = st.lists(st.tuples(st.integers(0, 9000), st.integers(-1, 4)), min_size=2, max_size=5)
TIE_WEIGHTS = st.sampled_from([0.0, 1e-4, MU])

Instance = tuple[list[int], list[WorkerView]]


def objective(loads: Sequence[int], mu: float = MU) -> float:
    """J' as the paper writes it, tie-break and all."""
    mean = sum(loads) / len(loads)
    spread = sum((load - mean) ** 2 for load in loads)
    return len(loads) * max(loads) - sum(loads) + mu * spread


def loads_after(
    policy: Policy, waiting: Sequence[Request], workers: Sequence[WorkerView]
) -> dict[str, int]:
    size = {one.id: one.load_tokens for one in waiting}
    loads = {worker.id: worker.load_tokens for worker in workers}
    for assignment in policy.assign(waiting, workers):
        loads[assignment.worker_id] += size[assignment.request_id]
    return loads


def achieved(policy: Policy, instance: Instance, mu: float = MU) -> float:
    sizes, workers = instance
    return objective([*loads_after(policy, requests(sizes), workers).values()], mu)


def baseline(name: str) -> Policy:
    return POLICIES[name].make(PolicySettings())


def optimum(instance: Instance) -> float:
    """The least J' of all fillings that admit as many as fit."""
    sizes, workers = instance
    places = range(-1, len(workers))
    admitted = min(len(sizes), sum(worker.capacity for worker in workers))
    best = float("inf")
    for places_of in product(places, repeat=len(sizes)):
        if len(sizes) - places_of.count(-1) == admitted and all(
            places_of.count(i) <= worker.capacity for i, worker in enumerate(workers)
        ):
            loads = [worker.load_tokens for worker in workers]
            for size, place in zip(sizes, places_of, strict=True):
                if place >= 0:
                    loads[place] += size
            best = min(best, objective(loads))
    return best


def instances(
    count: int, workers: tuple[int, int], slots: int, pool: tuple[int, int], seed: int = 5
) -> Iterator[Instance]:
    """Random instances with prompts of a long tail, busy workers, and at least one free slot."""
    rng = random.Random(seed)
    for _ in range(count):
        number = rng.randint(*workers)
        capacity = [rng.randint(0, slots) for _ in range(number - 1)]
        loads = [rng.randint(10_000, 14_000) for _ in range(number)]
        sizes = [min(8000, int(rng.lognormvariate(6, 1.2)) + 1) for _ in range(rng.randint(*pool))]
        yield sizes, views(loads, [*capacity, rng.randint(1, slots)])


@given(SIZES, ROWS, st.randoms(use_true_random=False))
@settings(deadline=None)
def test_the_order_of_candidates_does_not_matter(
    sizes: list[int], rows: list[tuple[int, int]], rng: random.Random
) -> None:
    waiting, workers = requests(sizes), views(*zip(*rows, strict=True))
    shuffled = rng.sample(waiting, len(waiting))
    policy = BfIo(MU)
    assert loads_after(policy, waiting, workers) == loads_after(policy, shuffled, workers)


@given(SIZES, ROWS, st.integers(0, 3), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_the_order_of_workers_does_not_matter(
    sizes: list[int], rows: list[tuple[int, int]], wide: int, rng: random.Random
) -> None:
    waiting = [*requests(sizes), *(request(100 + i, 500, slots=2) for i in range(wide))]
    workers = views(*zip(*rows, strict=True))
    shuffled = rng.sample(workers, len(workers))
    policy = BfIo(MU)
    ordered = loads_after(policy, waiting, workers), loads_after(policy, waiting, shuffled)
    assert sorted(ordered[0].values()) == sorted(ordered[1].values())


@given(SIZES.filter(bool), ROWS, st.integers(0, 4), TIE_WEIGHTS)
@settings(deadline=None)
def test_one_slot_gets_the_best_candidate(
    sizes: list[int], rows: list[tuple[int, int]], open_: int, mu: float
) -> None:
    capacity = [int(i == open_ % len(rows)) for i in range(len(rows))]
    workers = views([load for load, _ in rows], capacity)
    choices = [achieved(baseline("fcfs"), ([size], workers), mu) for size in sizes]
    assert achieved(BfIo(mu), (sizes, workers), mu) == pytest.approx(min(choices), abs=1e-3)


@given(st.integers(0, 3000), ROWS, TIE_WEIGHTS)
@settings(deadline=None)
def test_one_candidate_gets_the_best_slot(
    size: int, rows: list[tuple[int, int]], mu: float
) -> None:
    loads = [load for load, _ in rows]
    choices = [
        achieved(
            baseline("fcfs"), ([size], views(loads, [int(i == at) for i in range(len(rows))])), mu
        )
        for at, (_, slots) in enumerate(rows)
        if slots > 0
    ]
    workers = views(*zip(*rows, strict=True))
    found = achieved(BfIo(mu), ([size], workers), mu)
    assert found == pytest.approx(min(choices, default=objective(loads, mu)), abs=1e-3)


def test_near_the_optimum_where_that_can_be_found_by_trying_all() -> None:
    """Measured: optimal in 97 % of them; all gaps together 0.2 % of what FCFS leaves to gain."""
    exact = gap = possible = 0.0
    tried = list(instances(150, (2, 3), 2, (1, 6)))
    for instance in tried:
        best, found = optimum(instance), achieved(BfIo(MU), instance)
        assert found >= best - 1e-3
        exact += found <= best + 1e-3
        gap += found - best
        possible += achieved(baseline("fcfs"), instance) - best
    assert exact / len(tried) > 0.9
    assert gap / possible < 0.01


@pytest.mark.parametrize(
    "pool", [pytest.param((40, 60), id="choice"), pytest.param((1, 12), id="all get in")]
)
def test_better_than_every_baseline(pool: tuple[int, int]) -> None:
    """Measured: two thirds of the best baseline's objective, and beaten on 5 % of the instances."""
    total: dict[str, float] = dict.fromkeys(("bfio", *POLICIES), 0.0)
    worse = 0
    tried = list(instances(60, (8, 8), 4, pool))
    for instance in tried:
        values = {name: achieved(baseline(name), instance) for name in total}
        worse += values["bfio"] > min(values.values()) + 1e-3
        total = {name: total[name] + value for name, value in values.items()}
    assert worse / len(tried) <= 0.1
    others = min(value for name, value in total.items() if name != "bfio")
    assert total["bfio"] < 0.75 * others


def test_a_burst_that_just_fits_is_spread_evenly() -> None:
    """Everybody gets in, so there is no choice of whom: only of where."""
    rng = random.Random(2)
    sizes = [min(8000, int(rng.lognormvariate(6, 1.2)) + 1) for _ in range(64)]
    workers = views([0] * 8, 8)
    found = [*loads_after(BfIo(MU), requests(sizes), workers).values()]
    even = [*loads_after(baseline("least_tokens"), requests(sizes), workers).values()]
    assert max(found) - min(found) < 0.1 * (max(even) - min(even))
