"""The solver's inner loops, interpreted: costs against the objective, peaks against a scan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from router.core.policies.bfio.solver import UNLIMITED, Instance, Memory, _kinds, _state
from tests.support.instances import programs
from tests.support.uncompiled import uncompiled

with uncompiled():
    kernels, filling, local = (
        import_module(f"router.core.policies.bfio.{name}")
        for name in ("kernels", "filling", "local_search")
    )
LEAST, ANY = 1e-6, UNLIMITED


def state_of(instance: Instance) -> Any:
    workers = np.arange(len(instance.loads))
    with uncompiled():
        state = _state(instance, workers, _kinds(instance), 10**6)
    kernels.rank_peaks(state)
    return state


@pytest.fixture(params=[(1, 0.0), (5, 0.0), (5, 0.1)], ids=["one step", "steps", "quadratic"])
def filled(request: pytest.FixtureRequest) -> Any:
    """A program that is filled, in its initial order of workers."""
    steps, tie_weight = request.param
    (instance,) = programs(1, (6, 6), (40, 40), steps, tie_weight=tie_weight, seed=5)
    state = state_of(instance)
    filling.fill(state, 0)
    return state


def objective(state: Any) -> float:
    """By numpy, from the loads."""
    loads = state.loads
    idle = (len(loads) * loads.max(axis=0) - loads.sum(axis=0)).sum()
    spread = ((loads - loads.mean(axis=0)) ** 2).sum(axis=0)
    return float(idle + 0.5 * state.pull @ spread)


def difference(state: Any, change: Callable[[], object]) -> float:
    before = objective(state)
    change()
    return objective(state) - before


def ranked(state: Any) -> bool:
    order = np.sort(state.loads, axis=0)[::-1][:3]
    return bool(
        (state.peaks[:3] == order).all()
        and np.allclose(state.totals, state.loads.sum(axis=0))
        and all(
            state.loads[state.owners[rank, h], h] == state.peaks[rank, h]
            for rank in range(3)
            for h in range(state.loads.shape[1])
        )
    )


def test_peaks_follow_every_change(filled: Any) -> None:
    rng = np.random.default_rng(1)
    for _ in range(300):
        worker, out, into = rng.integers(len(filled.loads)), *rng.integers(-1, 30, 2)
        kernels.change_load(filled, worker, out, into)
        assert ranked(filled)


def test_a_floor_is_a_peak_of_nobody(filled: Any) -> None:
    filled.floor[:] = filled.peaks[1] + 0.5
    kernels.rank_peaks(filled)
    assert (filled.owners[1] == -1).all()
    worker = filled.owners[0, 0]
    kernels.view(filled, worker, kernels.NOTHING)
    assert filled.gap[0] == filled.loads[worker, 0] - filled.floor[0]


def test_costs_are_differences_of_the_objective(filled: Any) -> None:
    assert filled.cost[0] == pytest.approx(objective(filled))
    for item in range(len(filled.item_kind)):
        kind, worker = filled.item_kind[item], filled.item_worker[item]
        lower, upper = (step(filled, kind, ANY) for step in (kernels.below, kernels.above))
        down, up = kernels.costs_of_neighbours(filled, worker, kind, lower, upper)
        kernels.view(filled, worker, kind)
        now = kernels.cost_of(filled, kind)
        assert kernels.cost_of(filled, lower) - now == pytest.approx(down, abs=LEAST)
        change = difference(filled, lambda: local.exchange_kind(filled, item, upper))  # noqa: B023
        assert change == pytest.approx(up, abs=LEAST)


@pytest.mark.parametrize(("one", "two"), [(3, 20), (25, 4)])
def test_costs_of_two_kinds(filled: Any, one: int, two: int) -> None:
    nothing, worker, other = kernels.NOTHING, 0, 1
    exchanged = kernels.cost_of_exchange(filled, worker, other, one, two)
    change = difference(filled, lambda: local.exchange(filled, worker, other, one, two))
    assert exchanged == pytest.approx(change, abs=LEAST)
    kernels.view(filled, worker, nothing)
    both = kernels.cost_of_two(filled, one, two) - kernels.cost_of(filled, nothing)
    kernels.foresee(filled, one, 1)
    second = kernels.cost_of(filled, two) - kernels.cost_of(filled, nothing)
    first = difference(filled, lambda: kernels.change_load(filled, worker, nothing, one))
    assert second == pytest.approx(
        difference(filled, lambda: kernels.change_load(filled, worker, nothing, two)), abs=LEAST
    )
    assert both == pytest.approx(first + second, abs=LEAST)


def test_local_search_improves_and_keeps_its_books(filled: Any) -> None:
    before, admitted = filled.cost[0], filled.counts[kernels.SHELF] + len(filled.item_kind)
    local.improve(filled, LEAST)
    assert filled.cost[0] <= before
    assert filled.cost[0] == pytest.approx(objective(filled))
    assert ranked(filled)
    assert filled.left.sum() == filled.counts[kernels.SHELF] == admitted - len(filled.item_kind)
    assert not local.improve_singles(filled, LEAST)
    assert not local.improve_swaps(filled, LEAST)
    assert not local.improve_pairs(filled, LEAST)


def test_an_item_moves_to_a_worker_with_room_where_that_is_better() -> None:
    loads, candidates = np.array([[0.0], [10.0], [9.0]]), np.array([[3.0], [5.0]])
    state = state_of(Instance(loads, candidates, np.array([2, 2, 0]), np.ones(1), 0.1))
    filling.place_item(state, 0, 0, 1)  # the load of 10 is not the one to be raised
    filling.place_item(state, 1, 1, 0)
    state.cost[0] = before = objective(state)

    assert local.move(state, 0, LEAST)
    assert (state.item_worker.tolist(), state.capacity.tolist()) == ([0, 0], [0, 2, 0])
    assert state.cost[0] == pytest.approx(objective(state))
    assert state.cost[0] < before
    assert ranked(state)
    assert not local.move(state, 0, LEAST)


def test_neighbours_on_the_shelf() -> None:
    state = state_of(next(programs(1, (3, 3), (9, 9), 1)))
    state.left[:] = [0, 1, 0, 0, 2, 0, 1, 0, 0]
    assert [kernels.above(state, kind, ANY) for kind in (-1, 0, 1, 4, 6)] == [1, 1, 4, 6, -1]
    assert [kernels.below(state, kind, ANY) for kind in (9, 6, 4, 1, 0)] == [6, 4, 1, -1, -1]
    state.counts[kernels.SHELF] = 4
    assert [filling.quantile(state, share) for share in (0.0, 0.3, 0.5, 0.9)] == [1, 4, 4, 6]


def test_neighbours_within_a_room() -> None:
    needs = np.array([5, 3, 9, 4, 8, 7, 9, 6, 9])
    plain = next(programs(1, (3, 3), (9, 9), 1))
    sizes = np.arange(1.0, 10.0)[:, None]
    memory = Memory(np.array([20, 20, UNLIMITED]), needs, np.array([False, True, False]))
    state = state_of(replace(plain, candidates=sizes, memory=memory))
    state.left[:] = [1, 1, 1, 0, 1, 1, 1, 1, 1]
    assert state.least_need.tolist() == [3, 3, 4, 4, 6, 6, 6, 6, 9]
    assert [kernels.above(state, kind, 5) for kind in (-1, 0, 1)] == [0, 1, -1]
    assert [kernels.above(state, kind, 7) for kind in (1, 5, 7)] == [5, 7, -1]
    assert [kernels.below(state, kind, 6) for kind in (9, 7, 1, 0)] == [7, 1, 0, -1]
    assert [filling.last_within(state, 8, room) for room in (2, 3, 5, 8, 9)] == [-1, 1, 3, 7, 8]
    assert kernels.least_left(state) == 3
    assert [kernels.room_of(state, worker, -1) for worker in range(3)] == [20, ANY, ANY]


def test_draws_are_the_same_in_every_search() -> None:
    one, other = (state_of(next(programs(1, (3, 3), (9, 9), 1))) for _ in range(2))
    drawn = [kernels.draw(one, 10) for _ in range(1000)]
    assert drawn == [kernels.draw(other, 10) for _ in range(1000)]
    assert all(70 < count < 130 for count in np.bincount(drawn, minlength=10))
