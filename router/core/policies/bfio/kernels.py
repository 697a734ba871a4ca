"""The solver's innermost loops, compiled where possible: loads and their peaks, costs, the shelf.

Candidates of one profile form one *kind*; kinds are sorted by size. A candidate is on the *shelf*,
or it is an *item*, placed on a worker. Work is *weighed*: multiplied by its step's weight, so that
a cost is a plain sum over steps. Each computed cost counts against the budget, and other work as so
many costs.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np

from router.core.forecast.forecast import Floats, Ints
from router.core.policies.bfio.compiled import inlined, inner

# The last row of ``State.kinds`` is zero: an empty place adds nothing. (For a plain constant numba
# would compile a kernel a second time.)
NOTHING = cast(int, np.int64(-1))

# Below every load.
LOW = -1e300

# Room of an idle worker: any need is less.
UNLIMITED = cast(int, np.int64(1 << 60))

SHELF, SPENT, PRICE, BUDGET, SEED, KICKS, EMPTY = range(7)


class State(NamedTuple):
    """G workers, Q kinds, U items, K steps; all work is weighed.

    Attributes:
        loads: (G, K) loads with the placed items.
        totals: (K,) sums of the loads over the workers.
        peaks: (4, K) three highest loads per step, highest first; the highest in the best filling.
        owners: (3, K) their workers; -1: none.
        floor: (K,) virtual peak, ``LOW`` for none.
        kinds: (Q + 1, K) work of a candidate per kind; the last row is zero.
        worth: (Q + 1,) cost of a kind on any worker: less idle work, more spread.
        need: (Q + 1,) memory of a candidate per kind; the last is zero.
        least_need: (Q,) least need of this kind and all larger ones.
        left: (Q,) candidates per kind on the shelf.
        capacity: (G,) free places.
        room: (G,) free memory; negative beside one too large for an idle worker.
        aboard: (G,) requests on the worker; none: it takes any candidate.
        pull: (K,) 2 mu / weight: slope of the quadratic term per token off the mean.
        item_kind, item_worker: (U,) kind and worker of each item; ``NOTHING``: an empty item.
        gap: (K,) load of the worker in view above the others' peak.
        slope: (K,) quadratic term per token on the worker in view.
        cost: (1,) objective, up to a constant.
        best: (2, U) kinds and workers in the best filling so far.
        queue: (G or U,) workers with room in order; or items that have entered last.
        queued: (G,) keys of that order by worker.
        counts: candidates on the shelf, budget spent, price of a cost, budget, random state, kicks
            so far, empty items.
    """

    loads: Floats
    totals: Floats
    peaks: Floats
    owners: Ints
    floor: Floats
    kinds: Floats
    worth: Floats
    need: Ints
    least_need: Ints
    left: Ints
    capacity: Ints
    room: Ints
    aboard: Ints
    pull: Floats
    item_kind: Ints
    item_worker: Ints
    gap: Floats
    slope: Floats
    cost: Floats
    best: Ints
    queue: Ints
    queued: Floats
    counts: Ints


# --- peaks ----------------------------------------------------------------------------------------


@inner
def rank_peaks(state: State) -> None:
    """Find the three highest loads of every step."""
    for h in range(len(state.totals)):
        rank_step(state, h)


@inner
def rank_step(state: State, h: int) -> None:
    """Find the three highest loads of one step."""
    state.peaks[0, h] = state.floor[h]
    state.peaks[1, h] = state.peaks[2, h] = LOW
    state.owners[0, h] = state.owners[1, h] = state.owners[2, h] = -1
    for worker in range(len(state.loads)):
        load = state.loads[worker, h]
        if load > state.peaks[2, h]:
            _sort_in(state, h, 2, worker, load)


@inlined
def _sort_in(state: State, h: int, rank: int, worker: int, load: float) -> None:
    while rank > 0 and load > state.peaks[rank - 1, h]:
        state.peaks[rank, h], state.owners[rank, h] = (
            state.peaks[rank - 1, h],
            state.owners[rank - 1, h],
        )
        rank -= 1
    while rank < 2 and load < state.peaks[rank + 1, h]:
        state.peaks[rank, h], state.owners[rank, h] = (
            state.peaks[rank + 1, h],
            state.owners[rank + 1, h],
        )
        rank += 1
    state.peaks[rank, h], state.owners[rank, h] = load, worker


@inlined
def change_load(state: State, worker: int, out: int, into: int) -> None:
    """Exchange one kind on a worker for another."""
    for h in range(len(state.totals)):
        change = state.kinds[into, h] - state.kinds[out, h]
        load = state.loads[worker, h] + change
        state.loads[worker, h] = load
        state.totals[h] += change
        rank = 0
        while rank < 3 and state.owners[rank, h] != worker:
            rank += 1
        if load >= state.peaks[2, h]:
            _sort_in(state, h, min(rank, 2), worker, load)
        elif rank < 3:
            rank_step(state, h)
    state.room[worker] += state.need[out] - state.need[into]
    state.counts[SPENT] += 2 * state.counts[PRICE]


@inlined
def peak_of(state: State, worker: int) -> int:
    """The first step at which a worker has the highest load, or -1."""
    step = -1
    for h in range(len(state.totals) - 1, -1, -1):
        if state.owners[0, h] == worker:
            step = h
    return step


@inner
def objective(state: State) -> float:
    """The program's objective, from scratch."""
    workers, steps = state.loads.shape
    cost = 0.0
    for h in range(steps):
        cost += workers * state.peaks[0, h] - state.totals[h]
        spread = -state.totals[h] * state.totals[h] / workers
        for worker in range(workers):
            spread += state.loads[worker, h] * state.loads[worker, h]
        cost += 0.5 * state.pull[h] * spread
    state.counts[SPENT] += workers * state.counts[PRICE] // 4
    return cost


# --- costs ----------------------------------------------------------------------------------------


@inlined
def view(state: State, worker: int, out: int) -> None:
    """Set the worker in view, as if one kind had left it."""
    workers, steps = state.loads.shape
    for h in range(steps):
        left = state.kinds[out, h]
        load = state.loads[worker, h] - left
        rest = state.peaks[1, h] if state.owners[0, h] == worker else state.peaks[0, h]
        state.gap[h] = load - rest
        state.slope[h] = state.pull[h] * (load - (state.totals[h] - left) / workers)
    state.counts[SPENT] += state.counts[PRICE]


@inlined
def foresee(state: State, kind: int, places: int) -> None:
    """Add so many candidates of a kind to the worker in view."""
    above_mean = 1 - 1 / len(state.loads)  # the mean moves too
    for h in range(len(state.gap)):
        load = places * state.kinds[kind, h]
        state.gap[h] += load
        state.slope[h] += state.pull[h] * load * above_mean


@inlined
def cost_of(state: State, kind: int) -> float:
    """Cost of a kind on the worker in view, up to a constant."""
    over = spread = 0.0
    if state.pull[0] > 0:
        for h in range(len(state.gap)):
            size = state.kinds[kind, h]
            over += max(state.gap[h] + size, 0.0)
            spread += state.slope[h] * size
    else:
        for h in range(len(state.gap)):
            over += max(state.gap[h] + state.kinds[kind, h], 0.0)
    state.counts[SPENT] += state.counts[PRICE]
    return float(len(state.loads) * over + spread + state.worth[kind])


@inlined
def cost_of_two(state: State, one: int, other: int) -> float:
    """Cost of two kinds together on the worker in view, up to the same constant."""
    workers = len(state.loads)
    over = spread = 0.0
    for h in range(len(state.gap)):
        first, second = state.kinds[one, h], state.kinds[other, h]
        over += max(state.gap[h] + first + second, 0.0)
        both = (1 - 1 / workers) * first * second
        spread += state.slope[h] * (first + second) + state.pull[h] * both
    state.counts[SPENT] += state.counts[PRICE]
    return float(workers * over + spread + state.worth[one] + state.worth[other])


@inlined
def costs_of_neighbours(
    state: State, worker: int, out: int, lower: int, upper: int
) -> tuple[float, float]:
    """Rise of the objective if either of two kinds replaces another.

    As ``view`` and three calls of ``cost_of``, in one loop.
    """
    workers, steps = state.loads.shape
    over = over_lower = over_upper = spread_lower = spread_upper = 0.0
    for h in range(steps):
        size = state.kinds[out, h]
        load = state.loads[worker, h]
        rest = state.peaks[1, h] if state.owners[0, h] == worker else state.peaks[0, h]
        gap = load - rest
        down, up = state.kinds[lower, h] - size, state.kinds[upper, h] - size
        over += max(gap, 0.0)
        over_lower += max(gap + down, 0.0)
        over_upper += max(gap + up, 0.0)
        slope = state.pull[h] * (load - size - (state.totals[h] - size) / workers)
        spread_lower += slope * down
        spread_upper += slope * up
    state.counts[SPENT] += 3 * state.counts[PRICE]
    worth = state.worth[out]
    return (
        workers * (over_lower - over) + spread_lower + state.worth[lower] - worth,
        workers * (over_upper - over) + spread_upper + state.worth[upper] - worth,
    )


@inlined
def cost_of_exchange(state: State, one: int, other: int, out: int, into: int) -> float:
    """Rise of the objective if two workers exchange kinds; ``out`` leaves the first."""
    workers, steps = state.loads.shape
    idle = spread = 0.0
    for h in range(steps):
        change = state.kinds[into, h] - state.kinds[out, h]
        mine, theirs = state.loads[one, h] + change, state.loads[other, h] - change
        first, second = state.owners[0, h], state.owners[1, h]
        taken = (first == one) | (first == other)
        rest = state.peaks[1, h] if taken else state.peaks[0, h]
        if taken & ((second == one) | (second == other)):
            rest = state.peaks[2, h]
        idle += max(rest, mine, theirs) - state.peaks[0, h]
        spread += state.pull[h] * change * (mine - theirs - change)
    state.counts[SPENT] += state.counts[PRICE]
    return float(workers * idle + spread)


# --- the shelf ------------------------------------------------------------------------------------


@inlined
def room_of(state: State, worker: int, out: int) -> int:
    """Memory for another candidate on a worker, as if one kind had left it."""
    if state.aboard[worker] - int(out != NOTHING) == 0:
        return UNLIMITED
    return int(state.room[worker] + state.need[out])


@inlined
def above(state: State, kind: int, room: int) -> int:
    """The next larger kind on the shelf that needs no more than the room, or ``NOTHING``."""
    kinds = len(state.left)
    kind += 1
    while kind < kinds and state.left[kind] == 0:
        kind += 1
    if kind < kinds and state.need[kind] > room:
        kind = _above_within(state, kind, room)
    return kind if kind < kinds else NOTHING


@inner
def _above_within(state: State, kind: int, room: int) -> int:
    kinds = len(state.left)
    while kind < kinds and (state.left[kind] == 0 or state.need[kind] > room):
        kind = kind + 1 if state.least_need[kind] <= room else kinds
    return kind


@inlined
def below(state: State, kind: int, room: int) -> int:
    """The next smaller kind on the shelf that needs no more than the room, or ``NOTHING``."""
    kind -= 1
    while kind >= 0 and state.left[kind] == 0:
        kind -= 1
    if kind >= 0 and state.need[kind] > room:
        kind = _below_within(state, kind, room)
    return kind


@inner
def _below_within(state: State, kind: int, room: int) -> int:
    while kind >= 0 and (state.left[kind] == 0 or state.need[kind] > room):
        kind -= 1
    return kind


@inlined
def least_left(state: State) -> int:
    """The least need on the shelf; more than any room if it is empty."""
    least = UNLIMITED + 1
    for kind in range(len(state.left)):
        if state.least_need[kind] >= least:
            break
        if state.left[kind] > 0:
            least = min(least, state.need[kind])
    return int(least)


# --- chance ---------------------------------------------------------------------------------------


@inlined
def draw(state: State, below: int) -> int:
    """A pseudorandom number below a bound, equal in every search (linear congruential)."""
    state.counts[SEED] = (state.counts[SEED] * 1103515245 + 12345) % 2147483648
    state.counts[SPENT] += state.counts[PRICE]
    return int(state.counts[SEED] >> 12) % below
