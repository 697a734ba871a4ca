"""The integer program of BF-IO (arXiv 2601.17855, section 4, (IO)) on plain arrays.

    minimize  sum_h weights[h] * [ G max_g L_g(h) - sum_g L_g(h) + mu sum_g (L_g(h) - mean(h))^2 ]

over the candidates that enter and their workers, with L the loads afterwards. A candidate enters at
most one worker, no worker exceeds its slots or its memory, and nobody waits who fits somewhere: so
every free slot is filled where memory is no limit. With mu = 0 this is the paper's program; the
quadratic term breaks its many ties. Memory is not in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from router.core.forecast.forecast import Bools, Floats, Ints

if TYPE_CHECKING:
    from router.core.policies.bfio.kernels import State

DEFAULT_MOVES = 30_000
# Items for which the whole budget is used; fewer have as many fewer pairs to try.
_MANY_ITEMS = 8

# Price of a cost over one step; over K steps it is K + 5.
_MOVE = 6
# Improvements below this share of the loads are rounding.
_ROUNDING = 1e-12


# Memory of a worker without a limit; sums of needs stay far below it.
UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True)
class Memory:
    """KV memory as a second capacity, in whole units of any size.

    Attributes:
        room: shape (G,), units that each worker can take; ``UNLIMITED`` without a limit.
        need: shape (R,), units that each candidate takes on any worker.
        idle: shape (G,), true for workers that run nothing: such a one takes any candidate alone.
    """

    room: Ints
    need: Ints
    idle: Bools


@dataclass(frozen=True, slots=True)
class Instance:
    """One decision: G workers, R candidates, K steps of look-ahead including the present one.

    Attributes:
        loads: shape (G, K), predicted work of each worker without newcomers.
        candidates: shape (R, K), work that each candidate adds.
        capacity: shape (G,), candidates that each worker can take; negative counts as 0.
        weights: shape (K,), weight of each step: discount to the power h.
        tie_weight: mu, in 1/tokens.
        alike: shape (R,), equal numbers for candidates with equal rows and needs; None: computed.
        memory: None: no worker has a limit.
    """

    loads: Floats
    candidates: Floats
    capacity: Ints
    weights: Floats
    tie_weight: float
    alike: Ints | None = None
    memory: Memory | None = None

    @property
    def most_admitted(self) -> int:
        """All candidates, or as many as there are free slots; memory may admit fewer."""
        return min(len(self.candidates), int(np.maximum(self.capacity, 0).sum()))

    def loads_after(self, places: Ints) -> Floats:
        """Loads with the candidates at these places."""
        loads = self.loads.copy()
        entered = places >= 0
        np.add.at(loads, places[entered], self.candidates[entered])
        return loads

    def objective(self, places: Ints) -> float:
        loads = self.loads_after(places)
        total = loads.sum(axis=0)
        idle = len(loads) * loads.max(axis=0) - total
        spread = ((loads - total / len(loads)) ** 2).sum(axis=0)
        return float(self.weights @ (idle + self.tie_weight * spread))


@dataclass(frozen=True, slots=True)
class Solution:
    """A worker's index for each candidate, or -1 if it keeps waiting; shape (R,)."""

    places: Ints
    objective: float
    moves: int


def solve(instance: Instance, moves: int = DEFAULT_MOVES) -> Solution:
    """Search within a budget; every result is valid, and a larger budget never ends worse.

    Deterministic. Neither order of workers or candidates matters; among equal candidates the first
    ones enter. The first call loads the kernels, and compiles them once per machine.

    ``moves`` counts costs over one step; K steps count as (K + 5) / 6 of them. The first filling is
    always complete.
    """
    workers = len(instance.loads)
    places = np.full(len(instance.candidates), -1, dtype=np.int64)
    if not workers or not len(places):
        return Solution(places, instance.objective(places) if workers else 0.0, 0)
    return (_alone if len(places) == 1 else _searched)(instance, places, moves)


def _searched(instance: Instance, places: Ints, moves: int) -> Solution:
    from router.core.policies.bfio.search import read_off, search

    kinds, ranked = _kinds(instance), _ranked(instance)
    moves = round(moves * min(1.0, (instance.most_admitted / _MANY_ITEMS) ** 2))
    state = _state(instance, ranked, kinds, moves)
    search(state, _least(len(ranked), float(np.abs(state.loads).max(axis=0).sum())))
    read_off(state.item_kind, ranked[state.item_worker], kinds.order, kinds.first, places)
    cost = float(state.cost[0]) if instance.weights.any() else 0.0
    return Solution(places, cost, int(state.counts[1]) // _MOVE)


def _alone(instance: Instance, places: Ints, _: int) -> Solution:
    open_ = _open_to_one(instance)
    if open_.any():
        ahead = instance.loads.shape[1] > 1
        places[0] = _cheapest(instance, open_) if ahead else _least_loaded(instance, open_)
    return Solution(places, instance.objective(places), 0)


def _open_to_one(instance: Instance) -> Bools:
    """Shape (G,), true for workers that can take a lone candidate."""
    open_, memory = instance.capacity > 0, instance.memory
    if memory is not None:
        open_ &= (memory.need[0] <= memory.room) | memory.idle
    return open_


def _least_loaded(instance: Instance, open_: Bools) -> int:
    """Without a look-ahead both terms grow with the load of the chosen worker."""
    columns = [instance.loads[:, 0].tolist(), instance.capacity.tolist()]
    if instance.memory is not None:
        columns += [instance.memory.room.tolist(), instance.memory.idle.tolist()]
    rows = list(zip(*columns, strict=True))
    some: list[int] = np.flatnonzero(open_).tolist()
    return min(some, key=rows.__getitem__)


def _cheapest(instance: Instance, open_: Bools) -> int:
    """The open worker on which the objective grows least; among equals the first by rank."""
    loads, row, peaks = instance.loads, instance.candidates[0], instance.loads.max(axis=0)
    raised = len(loads) * np.maximum(loads + row, peaks)
    costs = ((raised + 2 * instance.tie_weight * row * loads) @ instance.weights).tolist()
    least = _least(len(loads), float(np.abs(peaks) @ instance.weights))
    ranked = _ranked(instance)
    some: list[int] = ranked[open_[ranked]].tolist()
    best, *others = some
    for worker in others:
        if costs[worker] < costs[best] - least:
            best = worker
    return best


def _ranked(instance: Instance) -> Ints:
    """Workers by load; among equals the order of what else tells them apart."""
    memory = instance.memory
    more = () if memory is None else (memory.idle, memory.room)
    ranked: Ints = np.lexsort((*more, instance.capacity, instance.loads @ instance.weights))
    return ranked


def _least(workers: int, peaks: float) -> float:
    """Improvement below which a change is rounding; peaks: weighted, summed over the steps."""
    return _ROUNDING * workers * peaks + _ROUNDING


class _Kinds(NamedTuple):
    """Candidates grouped by profile, sorted by size: Q kinds.

    Attributes:
        order: (R,) candidates by size.
        first: (Q,) start of each kind in that order.
        number: (Q,) candidates of each kind.
        rows: (K, Q) work of a candidate per kind.
    """

    order: Ints
    first: Ints
    number: Ints
    rows: Floats


def _kinds(instance: Instance) -> _Kinds:
    alike = instance.alike
    if alike is None:
        rows = instance.candidates
        if instance.memory is not None:
            rows = np.column_stack((rows, instance.memory.need))
        alike = np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)
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
    """The kernels' arrays; steps of weight 0 are left out."""
    from router.core.policies.bfio.kernels import LOW, NOTHING, State

    loads, rows, weights = instance.loads[ranked], kinds.rows, instance.weights
    if not (weights > 0).all():
        counted = np.flatnonzero(weights > 0) if weights.any() else np.array([0])
        loads, rows, weights = loads[:, counted], rows[counted], weights[counted]
    loads = loads * weights
    workers, steps = loads.shape
    sizes = np.zeros((rows.shape[1] + 1, steps))
    np.multiply(rows.T, weights, out=sizes[:-1])
    items, memory = instance.most_admitted, instance.memory
    if memory is None:
        need = least_need = np.zeros(len(sizes), dtype=np.int64)
        room, aboard = np.full(workers, UNLIMITED), np.ones(workers, dtype=np.int64)
    else:
        need = np.append(memory.need[kinds.order[kinds.first]], 0)
        least_need = np.minimum.accumulate(need[-2::-1])[::-1].copy()
        room, aboard = memory.room[ranked], 1 - memory.idle[ranked].astype(np.int64)
    pull = 2 * instance.tie_weight / np.where(weights > 0, weights, 1.0)
    return State(
        loads=loads,
        totals=loads.sum(axis=0),
        peaks=np.empty((4, steps)),
        owners=np.empty((3, steps), dtype=np.int64),
        floor=np.full(steps, LOW),
        kinds=sizes,
        worth=(sizes * sizes) @ pull * (0.5 - 0.5 / workers) - sizes.sum(axis=1),
        need=need,
        least_need=least_need,
        left=kinds.number,
        capacity=np.maximum(instance.capacity, 0)[ranked],
        room=room,
        aboard=aboard,
        pull=pull,
        item_kind=np.full(items, NOTHING),
        item_worker=np.zeros(items, dtype=np.int64),
        gap=np.empty(steps),
        slope=np.empty(steps),
        cost=np.zeros(1),
        best=np.empty((2, items), dtype=np.int64),
        queue=np.empty(max(workers, items), dtype=np.int64),
        queued=np.empty(workers),
        counts=np.array([len(kinds.order), 0, steps + _MOVE - 1, _MOVE * moves, 1, 0, items]),
    )
