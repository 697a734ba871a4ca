"""The integer program of BF-IO (arXiv 2601.17855, section 4, (IO)) on plain arrays.

    minimize  sum_h weights[h] * [ G max_g L_g(h) - sum_g L_g(h) + mu sum_g (L_g(h) - mean(h))^2 ]

over which candidates enter and where, L being the loads once they are in: each candidate on one
worker at most, no more on a worker than it has room for, and every free slot filled. With mu = 0
this is the paper's program; the quadratic term breaks its many ties.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from router.workload import Floats, Ints

if TYPE_CHECKING:
    from router.policies.kernels import State

DEFAULT_MOVES = 30_000

# What a cost over one step counts for; one over K steps counts for K + 5.
_MOVE = 6
# Improvements by less than this share of the loads are rounding.
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class Instance:
    """One step's program; G workers, R candidates, K steps of look-ahead, the present one included.

    Attributes:
        loads: shape (G, K), predicted work of each worker without newcomers.
        candidates: shape (R, K), what each candidate adds to the worker that it enters.
        capacity: shape (G,), candidates that each worker can take; negative counts as none.
        weights: shape (K,), weight of each step: discount to the power h.
        tie_weight: mu, in 1/tokens.
        alike: shape (R,), equal numbers where candidates are known to have equal rows; None: to be
            found out.
    """

    loads: Floats
    candidates: Floats
    capacity: Ints
    weights: Floats
    tie_weight: float
    alike: Ints | None = None

    @property
    def admitted(self) -> int:
        """How many candidates enter: as many as there are, or as there is room for."""
        return min(len(self.candidates), int(np.maximum(self.capacity, 0).sum()))

    def loads_after(self, places: Ints) -> Floats:
        """Loads once the candidates are in; places: shape (R,), a worker's index or -1."""
        loads = self.loads.copy()
        entered = places >= 0
        np.add.at(loads, places[entered], self.candidates[entered])
        return loads

    def objective(self, places: Ints) -> float:
        """The objective's value for the candidates' places."""
        loads = self.loads_after(places)
        total = loads.sum(axis=0)
        idle = len(loads) * loads.max(axis=0) - total
        spread = ((loads - total / len(loads)) ** 2).sum(axis=0)
        return float(self.weights @ (idle + self.tie_weight * spread))


@dataclass(frozen=True, slots=True)
class Solution:
    """Where the candidates go.

    Attributes:
        places: shape (R,), a worker's index, or -1 for a candidate that goes on waiting.
        objective: its value.
        moves: what was spent of the budget.
    """

    places: Ints
    objective: float
    moves: int


def solve(instance: Instance, moves: int = DEFAULT_MOVES) -> Solution:
    """Search while moves are left; valid whatever they are, and more of them never end worse.

    Deterministic. Workers and candidates may stand in any order; among alike candidates the first
    ones enter. The first call loads the kernels, and compiles them on a machine's first one.

    Args:
        instance: the program.
        moves: the budget, in costs that are worked out for one step; K steps count as
            (K + 5) / 6 of them. The first filling is never cut short.
    """
    workers, places = len(instance.loads), _nowhere(instance)
    if not workers or not len(places):
        return Solution(places, instance.objective(places) if workers else 0.0, 0)
    return _alone(instance) if len(places) == 1 else _searched(instance, moves)


def _searched(instance: Instance, moves: int) -> Solution:
    from router.policies.search import read_off, search

    kinds, ranked, places = _kinds(instance), _ranked(instance), _nowhere(instance)
    state = _state(instance, ranked, kinds, moves)
    search(state, _least(len(ranked), float(np.abs(state.loads).max(axis=0).sum())))
    read_off(state.item_kind, ranked[state.item_worker], kinds.order, kinds.first, places)
    cost = float(state.cost[0]) if instance.weights.any() else 0.0
    return Solution(places, cost, int(state.counts[1]) // _MOVE)


def _alone(instance: Instance) -> Solution:
    """One candidate: the best worker with room, if there is one. Where the search would put it."""
    places = _nowhere(instance)
    open_ = np.flatnonzero(instance.capacity > 0).tolist()
    if open_:
        places[0] = (_least_loaded if instance.loads.shape[1] == 1 else _cheapest)(instance, open_)
    return Solution(places, instance.objective(places), 0)


def _least_loaded(instance: Instance, open_: Sequence[int]) -> int:
    """Without a look-ahead: both terms grow with the load of the worker that is entered."""
    loads, capacity = instance.loads[:, 0].tolist(), instance.capacity.tolist()
    return min(open_, key=lambda worker: (loads[worker], capacity[worker], worker))


def _cheapest(instance: Instance, open_: Sequence[int]) -> int:
    """The worker that the objective grows least on; among equals the first by rank."""
    loads, row, peaks = instance.loads, instance.candidates[0], instance.loads.max(axis=0)
    raised = len(loads) * np.maximum(loads + row, peaks)
    costs = ((raised + 2 * instance.tie_weight * row * loads) @ instance.weights).tolist()
    least = _least(len(loads), float(np.abs(peaks) @ instance.weights))
    ranked: list[int] = _ranked(instance).tolist()
    best, *others = (worker for worker in ranked if worker in open_)
    for worker in others:
        if costs[worker] < costs[best] - least:
            best = worker
    return best


def _ranked(instance: Instance) -> Ints:
    """The workers in an order in which nothing depends on how they are numbered."""
    ranked: Ints = np.lexsort((instance.capacity, instance.loads @ instance.weights))
    return ranked


def _least(workers: int, peaks: float) -> float:
    """Improvements by less are rounding; peaks: weighted, summed over the steps."""
    return _ROUNDING * workers * peaks + _ROUNDING


def _nowhere(instance: Instance) -> Ints:
    return np.full(len(instance.candidates), -1, dtype=np.int64)


class _Kinds(NamedTuple):
    """Candidates of one profile together, by size: Q kinds.

    Attributes:
        order: (R,) candidates by their size.
        first: (Q,) where in that order each kind begins.
        number: (Q,) how many there are of each.
        rows: (K, Q) what a candidate of each kind adds.
    """

    order: Ints
    first: Ints
    number: Ints
    rows: Floats


def _kinds(instance: Instance) -> _Kinds:
    alike = instance.alike
    if alike is None:
        alike = np.unique(instance.candidates, axis=0, return_inverse=True)[1].reshape(-1)
    order = np.argsort(alike, kind="stable")
    alike = alike[order]
    bounds = np.flatnonzero(np.concatenate(([True], alike[1:] != alike[:-1], [True])))
    first, number = bounds[:-1], bounds[1:] - bounds[:-1]
    rows = instance.candidates.T.take(order[first], axis=1)
    sizes = instance.weights @ rows
    if (sizes[1:] < sizes[:-1]).any():
        by_size = np.argsort(sizes, kind="stable")
        order = np.concatenate([order[first[kind] :][: number[kind]] for kind in by_size])
        number, rows = number[by_size], rows[:, by_size]
        first = np.cumsum(number) - number
    return _Kinds(order, first, number, rows)


def _state(instance: Instance, ranked: Ints, kinds: _Kinds, moves: int) -> State:
    """The kernels' arrays; steps that do not count are left out."""
    from router.policies.kernels import LOW, State

    loads, rows, weights = instance.loads[ranked], kinds.rows, instance.weights
    if not (weights > 0).all():
        counted = np.flatnonzero(weights > 0) if weights.any() else np.array([0])
        loads, rows, weights = loads[:, counted], rows[counted], weights[counted]
    loads = loads * weights
    workers, steps = loads.shape
    items = instance.admitted
    sizes = np.zeros((rows.shape[1] + 1, steps))
    np.multiply(rows.T, weights, out=sizes[:-1])
    pull = 2 * instance.tie_weight / np.where(weights > 0, weights, 1.0)
    return State(
        loads=loads,
        totals=loads.sum(axis=0),
        peaks=np.empty((3, steps)),
        owners=np.empty((3, steps), dtype=np.int64),
        floor=np.full(steps, LOW),
        kinds=sizes,
        worth=(sizes * sizes) @ pull * (0.5 - 0.5 / workers) - sizes.sum(axis=1),
        left=kinds.number,
        capacity=np.maximum(instance.capacity, 0)[ranked],
        pull=pull,
        item_kind=np.empty(items, dtype=np.int64),
        item_worker=np.empty(items, dtype=np.int64),
        gap=np.empty(steps),
        slope=np.empty(steps),
        cost=np.zeros(1),
        best_kind=np.empty(items, dtype=np.int64),
        best_worker=np.empty(items, dtype=np.int64),
        best_peak=np.empty(steps),
        queue=np.empty(workers, dtype=np.int64),
        queued=np.empty(workers),
        counts=np.array([len(kinds.order), 0, steps + _MOVE - 1, _MOVE * moves, 1, 0]),
    )
