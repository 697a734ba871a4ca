"""The solver: what holds for every instance, whatever its profiles, weights and budget."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.core.forecast.forecast import Floats, Ints
from router.core.policies.bfio.solver import (
    DEFAULT_MOVES,
    UNLIMITED,
    Instance,
    Memory,
    Solution,
    _searched,
    solve,
)
from tests.support.instances import admits
from tests.support.uncompiled import uncompiled

BUDGETS = [0, 50, 500, 5000]
STEPS = st.sampled_from([1, 6])
TIE_WEIGHTS = st.sampled_from([0.0, 1e-4, 0.1])
TOKENS = st.integers(0, 3000)


@st.composite
def instances(draw: st.DrawFn) -> Instance:
    """Few workers and sizes, so that ties, duplicates, full groups and empty pools come up."""
    steps = draw(STEPS)
    loads = draw(st.lists(st.integers(0, 9000), min_size=1, max_size=5))
    capacity = draw(st.lists(st.integers(-2, 4), min_size=len(loads), max_size=len(loads)))
    candidates = draw(st.one_of(_parallel(steps), _general(steps)))
    return Instance(
        loads=np.array([_grown(load, steps, 3) for load in loads], dtype=np.float64),
        candidates=candidates,
        capacity=np.array(capacity, dtype=np.int64),
        weights=np.array(draw(_weights(steps))),
        tie_weight=draw(TIE_WEIGHTS),
        memory=draw(st.none() | _memory(len(loads), candidates)),
    )


@st.composite
def _memory(draw: st.DrawFn, workers: int, candidates: Floats) -> Memory:
    """Rooms that bind, or do not; needs that follow the sizes, or do not."""
    room = st.integers(0, 6000) | st.sampled_from([0, UNLIMITED])
    need: Ints = np.array(candidates[:, 0], dtype=np.int64)
    if draw(st.booleans()):
        some = st.lists(st.integers(0, 3000), min_size=len(need), max_size=len(need))
        need = np.array(draw(some), dtype=np.int64)
    return Memory(
        room=np.array(draw(st.lists(room, min_size=workers, max_size=workers))),
        need=need,
        idle=np.array(draw(st.lists(st.booleans(), min_size=workers, max_size=workers))),
    )


def _grown(size: int, steps: int, growth: int) -> list[int]:
    return [size + growth * h for h in range(steps)]


def _rows(rows: list[list[int]], steps: int) -> Floats:
    return np.array(rows, dtype=np.float64).reshape(-1, steps)


def _parallel(steps: int) -> st.SearchStrategy[Floats]:
    sizes = st.lists(TOKENS | st.sampled_from([7, 8]), max_size=24)
    return sizes.map(lambda some: _rows([_grown(size, steps, 1) for size in some], steps))


def _general(steps: int) -> st.SearchStrategy[Floats]:
    rows = st.lists(st.lists(TOKENS, min_size=steps, max_size=steps), max_size=12)
    return rows.map(lambda some: _rows(some, steps))


def _weights(steps: int) -> st.SearchStrategy[list[float]]:
    some = st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=steps, max_size=steps)
    return some | st.just([0.7**h for h in range(steps)])


def instance_of(
    loads: list[list[float]],
    candidates: list[list[float]],
    capacity: list[int],
    weights: list[float],
    mu: float = 0.1,
) -> Instance:
    rows = np.array(candidates, dtype=np.float64).reshape(-1, len(weights))
    return Instance(np.array(loads), rows, np.array(capacity), np.array(weights), mu)


NOBODY = instance_of([[1.0], [5.0]], [], [1, 2], [1.0])
NO_ROOM = instance_of([[1.0], [5.0]], [[3.0]], [0, -2], [1.0])
ONE_WORKER = instance_of([[1.0, 9.0]], [[3.0, 4.0], [5.0, 1.0]], [1], [1.0, 0.5])
NO_WEIGHT = instance_of([[1.0, 9.0]] * 2, [[3.0, 4.0], [5.0, 1.0]], [1, 0], [0.0, 0.0])

LEAST_LOADED_IS_WORSE = instance_of([[8.0, 19.0], [27.0, 5.0]], [[3.0, 24.0]], [1, 1], [1.0, 1.0])


def rounding(instance: Instance) -> float:
    """What sums over an instance may differ by."""
    loads = np.abs(instance.loads).sum() + np.abs(instance.candidates).sum()
    return float(1e-9 + 1e-11 * len(instance.loads) * loads * max(1.0, instance.weights.max()))


def check(instance: Instance, solution: Solution) -> None:
    """Every candidate once at most, no worker beyond slots or memory, and nobody waits who fits."""
    places, room = solution.places, np.maximum(instance.capacity, 0)
    assert places.shape == (len(instance.candidates),)
    assert places.min(initial=0) >= -1
    assert places.max(initial=-1) < len(instance.loads)
    entered = np.bincount(places[places >= 0], minlength=len(room))
    assert (entered <= room).all()
    if (memory := instance.memory) is None:
        assert entered.sum() == min(len(places), room.sum()) == instance.most_admitted
    else:
        for worker in range(len(room)):
            needs = memory.need[places == worker]
            assert admits(memory, worker, needs)
            for need in memory.need[places < 0] if len(needs) < room[worker] else ():
                assert not admits(memory, worker, np.append(needs, need))
    assert abs(solution.objective - instance.objective(places)) <= rounding(instance)


@given(instances(), st.sampled_from(BUDGETS))
@example(NOBODY, 500)
@example(NO_ROOM, 500)
@example(ONE_WORKER, 500)
@example(NO_WEIGHT, 500)
@settings(deadline=None)
def test_every_solution_is_valid(instance: Instance, moves: int) -> None:
    check(instance, solve(instance, moves))


@given(instances())
@example(instance_of([[459.0], [0.0]], [[0.0], [0.0], [1.0], [7.0], [918.0]], [0, 3], [1.0]))
@settings(deadline=None)
def test_more_moves_never_end_worse(instance: Instance) -> None:
    """The first budget leaves the greedy filling as it is."""
    found = [solve(instance, moves).objective for moves in BUDGETS]
    for fewer, more in pairwise(found):
        assert more <= fewer + rounding(instance)


@given(instances(), st.sampled_from(BUDGETS))
@settings(deadline=None)
def test_one_instance_has_one_answer(instance: Instance, moves: int) -> None:
    kept = [array.copy() for array in arrays_of(instance)]
    one, other = solve(instance, moves), solve(instance, moves)
    assert_same(one, other)
    for before, after in zip(kept, arrays_of(instance), strict=True):
        np.testing.assert_array_equal(before, after, "the arguments are the caller's")


def arrays_of(instance: Instance) -> list[Floats | Ints]:
    return [instance.loads, instance.candidates, instance.capacity, instance.weights]


def assert_same(one: Solution, other: Solution) -> None:
    np.testing.assert_array_equal(one.places, other.places)
    assert (one.objective, one.moves) == (other.objective, other.moves)


@given(instances(), st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_the_order_of_candidates_does_not_matter(instance: Instance, seed: int) -> None:
    """Where no two different rows weigh the same: those are alike to the ranking."""
    candidates, first = np.unique(instance.candidates, axis=0, return_index=True)
    sizes, memory = candidates @ instance.weights, instance.memory
    if len(np.unique(sizes)) < len(sizes):
        return
    if memory is not None:
        memory = replace(memory, need=memory.need[first])
    one = replace(instance, candidates=candidates, memory=memory)
    shuffled = np.random.default_rng(seed).permutation(len(candidates))
    if memory is not None:
        memory = replace(memory, need=memory.need[shuffled])
    other = replace(one, candidates=candidates[shuffled], memory=memory)
    np.testing.assert_array_equal(solve(one, 500).places[shuffled], solve(other, 500).places)


@given(instances(), st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_the_order_of_workers_does_not_matter(instance: Instance, seed: int) -> None:
    """Where no two have the same load: among those, the order decides."""
    loads = instance.loads @ instance.weights
    if len(np.unique(loads)) < len(loads):
        return
    shuffled = np.random.default_rng(seed).permutation(len(loads))
    memory = instance.memory
    if memory is not None:
        memory = replace(memory, room=memory.room[shuffled], idle=memory.idle[shuffled])
    other = replace(
        instance,
        loads=instance.loads[shuffled],
        capacity=instance.capacity[shuffled],
        memory=memory,
    )
    places = solve(other, 500).places
    expected = np.where(places < 0, -1, shuffled[places])
    np.testing.assert_array_equal(solve(instance, 500).places, expected)


@given(instances(), st.sampled_from(BUDGETS))
@settings(deadline=None)
def test_ample_memory_changes_nothing(instance: Instance, moves: int) -> None:
    """Ample is what holds any choice; needs follow sizes, as they tell candidates apart."""
    plain = replace(instance, memory=None)
    alike = np.unique(plain.candidates, axis=0, return_inverse=True)[1].reshape(-1)
    need = 1 + 3 * alike
    room = np.maximum(plain.capacity, 0) * need.max(initial=0)
    ample = Memory(room, need, np.zeros(len(room), dtype=np.bool_))
    assert_same(solve(plain, moves), solve(replace(plain, memory=ample), moves))


@pytest.mark.parametrize("moves", BUDGETS)
def test_the_first_ones_enter_among_alike_candidates(moves: int) -> None:
    instance = instance_of([[0.0], [9.0]], [[5.0], [4.0]] * 6, [2, 2], [1.0])
    entered = solve(instance, moves).places >= 0
    for kind in (0, 1):
        alike = entered[kind::2]
        assert (np.diff(alike.astype(np.int64)) <= 0).all()


def test_a_step_without_weight_decides_nothing() -> None:
    seen = instance_of([[0.0], [90.0]], [[80.0], [10.0]], [1, 0], [1.0])
    blind = instance_of([[0.0, 0.0], [90.0, 0.0]], [[80.0, 999.0], [10.0, 0.0]], [1, 0], [1.0, 0.0])
    assert solve(seen).places.tolist() == solve(blind).places.tolist() == [0, -1]


@given(
    rows=st.sampled_from([1, 6]).flatmap(
        lambda steps: st.lists(
            st.lists(st.integers(0, 3) | st.integers(0, 9000), min_size=steps, max_size=steps),
            min_size=2,
            max_size=9,
        )
    ),
    free=st.lists(st.integers(-1, 3), min_size=9, max_size=9),
    rooms=st.none() | st.lists(st.sampled_from([3, 5, 9, UNLIMITED]), min_size=9, max_size=9),
    idle=st.lists(st.booleans(), min_size=9, max_size=9),
    tie_weight=TIE_WEIGHTS,
    discount=st.sampled_from([0.5, 0.7, 1.0]),
)
@settings(deadline=None)  # the first search loads the kernels
def test_one_candidate_alone_goes_where_the_search_would_put_it(
    rows: list[list[int]],
    free: list[int],
    rooms: list[int] | None,
    idle: list[bool],
    tie_weight: float,
    discount: float,
) -> None:
    row, *loads = np.array(rows, dtype=np.float64)
    memory = None
    if rooms is not None:
        some = slice(len(loads))
        memory = Memory(np.array(rooms[some]), np.array([5]), np.array(idle[some]))
    alone = Instance(
        loads=np.array(loads),
        candidates=row[None],
        capacity=np.array(free[: len(loads)], dtype=np.int64),
        weights=np.array([discount**h for h in range(len(row))]),
        tie_weight=tie_weight,
        memory=memory,
    )
    one, other = solve(alone), _searched(alone, np.array([-1]), DEFAULT_MOVES)
    assert one.places.tolist() == other.places.tolist()
    assert one.objective == pytest.approx(other.objective)


def test_one_that_went_to_the_least_loaded_worker_moves_on() -> None:
    assert solve(LEAST_LOADED_IS_WORSE).places.tolist() == [1]


def drawn(count: int, *, choice: bool) -> Iterator[Instance]:
    """Random instances of every kind, without and with look-ahead, quadratic term and memory."""
    rng = np.random.default_rng(3)
    for number in range(count):
        steps, workers = (1, 7)[number % 2], int(rng.integers(2, 7))
        capacity = rng.integers(-1, 4, workers)
        room = int(np.maximum(capacity, 0).sum())
        pool = room + int(rng.integers(1, 40)) if choice else int(rng.integers(0, room + 1))
        sizes = np.ceil(rng.lognormal(5, 1.2, pool))[:, None]
        ahead = np.arange(steps, dtype=np.float64)
        general = rng.random((pool, steps)) < (0.5, 1.0)[number % 3 > 0]
        memory = Memory(
            room=rng.integers(0, 900, workers),
            need=sizes[:, 0].astype(np.int64),
            idle=rng.random(workers) < 0.2,
        )
        yield Instance(
            loads=rng.integers(2000, 4000, (workers, 1)) + rng.integers(0, 9, (workers, 1)) * ahead,
            candidates=np.where(general, sizes + ahead, 0.0),
            capacity=capacity,
            weights=np.array([0.8**h for h in range(steps)]),
            tie_weight=(0.0, 1e-3, 0.1)[number // 2 % 3],
            memory=memory if number % 5 < 2 else None,
        )


@pytest.mark.parametrize("choice", [True, False])
def test_without_numba_the_answers_are_the_same(choice: bool) -> None:
    tried = [LEAST_LOADED_IS_WORSE, *drawn(50, choice=choice)]
    expected = [solve(instance, 1500) for instance in tried]
    with uncompiled() as plain:
        found = [plain(instance, 1500) for instance in tried]
    for instance, one, other in zip(tried, expected, found, strict=True):
        check(instance, one)
        assert_same(one, other)


def test_without_numba_what_costs_too_much_in_all_is_taken_back_alike() -> None:
    """Memory for a few of many candidates: each change makes room for others."""
    rng = np.random.default_rng(7)
    tried = []
    for _ in range(40):
        workers = int(rng.integers(2, 5))
        sizes = np.ceil(rng.lognormal(5, 1.0, 16))
        tried.append(
            Instance(
                loads=rng.integers(0, 1500, (workers, 1)).astype(np.float64),
                candidates=sizes[:, None],
                capacity=np.full(workers, 5),
                weights=np.ones(1),
                tie_weight=0.0,
                memory=Memory(
                    room=rng.integers(100, 700, workers),
                    need=sizes.astype(np.int64),
                    idle=np.zeros(workers, dtype=np.bool_),
                ),
            )
        )
    expected = [solve(instance, 3000) for instance in tried]
    with uncompiled() as plain:
        found = [plain(instance, 3000) for instance in tried]
    for instance, one, other in zip(tried, expected, found, strict=True):
        check(instance, one)
        assert_same(one, other)
