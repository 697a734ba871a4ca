from dataclasses import replace
from itertools import product

import highspy
import numpy as np
import pytest

from router.core.forecast.forecast import Floats, Ints
from router.core.policies.bfio import exact
from router.core.policies.bfio.exact import solve_exact
from router.core.policies.bfio.solver import UNLIMITED, Instance, Memory, solve
from tests.support.instances import admits


def instance(
    loads: list[list[float]],
    candidates: list[list[float]],
    capacity: list[int],
    discount: float = 1.0,
    memory: Memory | None = None,
) -> Instance:
    steps = len(loads[0])
    rows = np.array(candidates, dtype=np.float64).reshape(len(candidates), steps)
    weights = discount ** np.arange(steps, dtype=np.float64)
    whole = np.array(loads, dtype=np.float64)
    return Instance(whole, rows, np.array(capacity), weights, 0.0, memory=memory)


def imbalance(loads: Floats, weights: Floats) -> float:
    """Written out, so that it shares nothing with the program's own."""
    total = 0.0
    for weight, column in zip(weights.tolist(), loads.T.tolist(), strict=True):
        total += weight * sum(max(column) - load for load in column)
    return total


def enumerated(problem: Instance) -> float:
    """The least imbalance over every way to fill slots and memory."""
    room = np.maximum(problem.capacity, 0)
    best = np.inf
    for places in product(range(-1, len(room)), repeat=len(problem.candidates)):
        loads, taken = problem.loads.copy(), np.zeros_like(room)
        for place, row in zip(places, problem.candidates, strict=True):
            if place >= 0:
                loads[place] += row
                taken[place] += 1
        if (taken <= room).all() and maximal(problem, places, taken):
            best = min(best, imbalance(loads, problem.weights))
    return best


def maximal(problem: Instance, places: tuple[int, ...], taken: Ints) -> bool:
    room, memory = np.maximum(problem.capacity, 0), problem.memory
    if memory is None:
        return bool(taken.sum() == min(room.sum(), len(places)))
    for worker, free in enumerate(room - taken):
        mine = memory.need[np.array(places) == worker]
        if not admits(memory, worker, mine):
            return False
        waiting = memory.need[np.array(places) < 0] if free else ()
        if any(admits(memory, worker, np.append(mine, need)) for need in waiting):
            return False
    return True


def drawn(seed: int) -> Instance:
    """A tiny program: plain or any profile, full or with slots to spare, with alike candidates.

    Two of three have memory, which binds for some workers.
    """
    rng = np.random.default_rng(seed)
    workers, count, steps = rng.integers(1, 4), rng.integers(0, 6), rng.integers(1, 4)
    candidates = rng.integers(0, 30, (count, steps))
    if seed % 2:
        candidates = rng.integers(1, 6, (count, 1)) * 7 + np.arange(steps)
    loads = rng.integers(0, 40, (workers, steps))
    capacity = rng.integers(-1, 4, workers)
    memory = None
    if seed % 3:
        memory = Memory(
            room=np.where(rng.random(workers) < 0.2, UNLIMITED, rng.integers(0, 90, workers)),
            need=(candidates[:, 0] if seed % 4 else rng.integers(0, 60, count)) + 1,
            idle=rng.random(workers) < 0.3,
        )
    return instance(
        loads.tolist(), candidates.tolist(), capacity.tolist(), discount=0.8, memory=memory
    )


def contended(seed: int = 1, steps: int = 8) -> Instance:
    """A program that takes a few stages: 5 workers, 6 free slots, 16 candidates."""
    rng = np.random.default_rng(seed)
    ahead = np.arange(steps)
    loads = rng.integers(9_000, 11_000, (5, 1)) + rng.integers(-90, 90, (5, 1)) * ahead
    candidates = rng.integers(20, 3_000, (16, 1)) + ahead
    return instance(loads.tolist(), candidates.tolist(), [0, 1, 1, 2, 2])


@pytest.mark.parametrize("seed", range(120))
def test_it_finds_the_least_imbalance_of_all(seed: int) -> None:
    problem = drawn(seed)
    found = solve_exact(problem)
    assert found.proven
    assert found.objective == pytest.approx(problem.objective(found.places))
    assert found.objective == pytest.approx(enumerated(problem), abs=0.5)
    assert found.bound <= found.objective


@pytest.mark.parametrize("seed", range(120))
def test_the_bound_is_below_every_filling(seed: int) -> None:
    problem = drawn(seed)
    assert solve_exact(problem).bound <= enumerated(problem) + 1e-6


def test_places_are_a_filling() -> None:
    problem = contended()
    found = solve_exact(problem)
    entered = np.bincount(found.places[found.places >= 0], minlength=5)
    assert entered.tolist() == problem.capacity.tolist()


@pytest.mark.parametrize("steps", [1, 8])
def test_a_bad_start_does_not_matter(steps: int) -> None:
    problem = contended(steps=steps)
    largest = np.argsort(-problem.candidates[:, 0])[: problem.most_admitted]
    places = np.full(len(problem.candidates), -1)
    places[largest] = np.repeat(np.arange(5), problem.capacity)
    found = solve_exact(problem, start=places)
    assert found.proven
    assert found.objective < 0.9 * problem.objective(places)
    assert found.objective == pytest.approx(solve_exact(problem).objective, rel=2e-4, abs=1)


def test_it_is_never_above_the_start() -> None:
    problem = contended()
    assert solve_exact(problem).objective <= solve(problem).objective


def test_among_alike_candidates_the_first_ones_enter() -> None:
    problem = instance([[50], [0]], [[7], [50], [7], [50]], [0, 1])
    assert solve_exact(problem).places.tolist() == [-1, 1, -1, -1]


def test_without_room_or_candidates_there_is_nothing_to_prove() -> None:
    found = solve_exact(instance([[5.0], [1.0]], [[3.0]], [0, -2]))
    assert (found.places.tolist(), found.objective, found.bound) == ([-1], 4.0, 4.0)
    assert found.proven
    assert solve_exact(instance([[5.0], [1.0]], [], [1, 1])).objective == 4.0


@pytest.mark.parametrize("steps", [1, 8])
def test_what_is_known_when_time_is_up(steps: int) -> None:
    problem = contended(steps=steps)
    start = solve(problem)
    found = solve_exact(problem, 0.0, start.places)
    assert found.objective <= start.objective
    assert 0 <= found.bound <= found.objective


def test_counts_that_are_not_filled_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run counts as 60 s of 100, so that the first finds its bound on a slow machine too."""
    monkeypatch.setattr(exact, "_FILL_SHARE", 0.0)
    monkeypatch.setattr(highspy.Highs, "getRunTime", lambda _self: 60.0)
    problem = contended(seed=3)
    start = solve(problem, 0)
    found = solve_exact(problem, 100.0, start.places)
    assert found.objective == start.objective
    assert found.bound > 0


def test_the_tie_weight_has_no_place_in_it() -> None:
    with pytest.raises(ValueError, match=r"tie weight is 0\.1: make it 0"):
        solve_exact(replace(contended(), tie_weight=0.1))


def test_a_program_that_highs_refuses_is_no_endless_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Since 1.16 so it does where the process has run it with another number of threads."""
    monkeypatch.setattr(highspy.Highs, "run", lambda _self: highspy.HighsStatus.kError)
    with pytest.raises(RuntimeError, match="refuses to run"):
        solve_exact(contended())
