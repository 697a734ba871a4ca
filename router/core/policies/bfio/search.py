"""The solver's search: greedy filling, local search, and kicks out of local optima.

arXiv 2601.17855 poses the program (section 4, (IO)); this search is our own. A larger budget only
continues it, and never ends worse.
"""

from __future__ import annotations

from router.core.forecast.forecast import Ints
from router.core.policies.bfio.compiled import compiled, inner
from router.core.policies.bfio.filling import (
    drawn_reserve,
    fill,
    place_item,
    quantile,
    remove_item,
    settle,
    spread,
    top_up,
)
from router.core.policies.bfio.kernels import (
    BUDGET,
    EMPTY,
    KICKS,
    NOTHING,
    SHELF,
    SPENT,
    State,
    above,
    below,
    cost_of,
    draw,
    objective,
    rank_peaks,
    room_of,
    view,
)
from router.core.policies.bfio.local_search import exchange_kind, improve

# Items per worker from which most of the load is still to come, and greedy filling would begin with
# small items.
MANY_ITEMS = 16
KICKS_PER_PLAN = 5

JOLTED_ITEMS = 2
JOLT_RANKS = 20
RUINED_WORKERS = 3
SHIFTED_WORKERS = 48
SHIFT_RANKS = 10


@compiled
def search(state: State, least: float) -> None:
    """Fill, improve, then kick and improve while the budget lasts; keep the best filling.

    Improvements below ``least`` are rounding.
    """
    rank_peaks(state)
    items = len(state.item_kind)
    if items < state.counts[SHELF] and items < MANY_ITEMS * len(state.loads):
        fill(state, 0)
    else:
        spread(state)
    improve(state, least)
    best = state.cost[0]
    remember(state)
    movable = items > 1 and state.counts[SHELF] > 0 and len(state.loads) > 1
    movable &= state.counts[EMPTY] < items
    while movable and state.counts[SPENT] < state.counts[BUDGET]:
        kick(state)
        improve(state, least)
        if state.cost[0] < best - least:
            best = state.cost[0]
            remember(state)
        else:
            go_back(state)
            state.cost[0] = best
    state.cost[0] = objective(state)


@compiled
def read_off(item_kind: Ints, item_worker: Ints, order: Ints, first: Ints, places: Ints) -> None:
    """Write the candidates' places, shape (R,): of each kind the first ones enter.

    ``order`` has shape (R,), candidates grouped by kind. ``first`` has shape (Q,), the start of
    each kind in that order; it moves past those that enter.
    """
    for item in range(len(item_kind)):
        kind = item_kind[item]
        if kind != NOTHING:
            places[order[first[kind]]] = item_worker[item]
            first[kind] += 1


@inner
def remember(state: State) -> None:
    """Save the filling as the best so far."""
    for h in range(len(state.totals)):
        state.peaks[3, h] = state.peaks[0, h]
    for item in range(len(state.item_kind)):
        state.best[0, item] = state.item_kind[item]
        state.best[1, item] = state.item_worker[item]


@inner
def go_back(state: State) -> None:
    """Restore the best filling."""
    for item in range(len(state.item_kind)):
        if state.item_kind[item] != NOTHING and (
            state.item_kind[item] != state.best[0, item]
            or state.item_worker[item] != state.best[1, item]
        ):
            remove_item(state, item)
    for item in range(len(state.item_kind)):
        if state.item_kind[item] == NOTHING and state.best[0, item] != NOTHING:
            place_item(state, item, state.best[0, item], state.best[1, item])


@inner
def kick(state: State) -> None:
    """Worsen the filling, so that local search takes another path."""
    state.counts[KICKS] += 1
    plan, turn = divmod(state.counts[KICKS] - 1, KICKS_PER_PLAN)
    way = draw(state, 3)
    if turn == 0:
        start_over(state, plan + 1)
    elif way == 0:
        jolt(state)
    elif way == 1:
        ruin(state)
    else:
        shift(state)
    top_up(state)


@inner
def start_over(state: State, plan: int) -> None:
    """Fill again by another plan."""
    for item in range(len(state.item_kind)):
        if state.item_kind[item] != NOTHING:
            remove_item(state, item)
    fill(state, plan)


@inner
def jolt(state: State) -> None:
    """Give a few items kinds of about their own size."""
    for _ in range(JOLTED_ITEMS):
        item = draw(state, len(state.item_kind))
        nudge(state, item, draw(state, 2 * JOLT_RANKS + 1) - JOLT_RANKS)


@inner
def ruin(state: State) -> None:
    """Refill a few workers."""
    items = len(state.item_kind)
    for _ in range(draw(state, RUINED_WORKERS) + 1):
        worker = state.item_worker[draw(state, items)]
        for item in range(items):
            if state.item_worker[item] == worker and state.item_kind[item] != NOTHING:
                remove_item(state, item)
    later, first = quantile(state, drawn_reserve(state)), draw(state, items)
    for step in range(items):
        item = (first + step) % items
        if state.item_kind[item] == NOTHING:
            settle(state, item, state.item_worker[item], later)
    state.cost[0] = objective(state)


@inner
def shift(state: State) -> None:
    """Give an item of each worker a kind some ranks larger, or smaller: the peaks follow.

    If several workers are at the peak at different steps no single change helps, while a common one
    is almost free.
    """
    ranks = draw(state, SHIFT_RANKS) + 1
    if draw(state, 2) == 0:
        ranks = -ranks
    items = len(state.item_kind)
    first = draw(state, items)
    for worker in range(len(state.loads)):
        state.queue[worker] = 0
    for step in range(min(items, SHIFTED_WORKERS)):
        item = (first + step) % items
        if state.item_kind[item] != NOTHING and state.queue[state.item_worker[item]] == 0:
            state.queue[state.item_worker[item]] = 1
            nudge(state, item, ranks)


@inner
def nudge(state: State, item: int, ranks: int) -> None:
    """Replace an item by a kind that many ranks up or down, or the next beyond."""
    kind, worker = state.item_kind[item], state.item_worker[item]
    if kind == NOTHING:
        return
    room = room_of(state, worker, kind)
    rank = min(max(kind + ranks, 0), len(state.left) - 1)
    other = above(state, rank - 1, room) if ranks > 0 else below(state, rank + 1, room)
    if other not in (NOTHING, kind):
        view(state, worker, kind)
        state.cost[0] += cost_of(state, other) - cost_of(state, kind)
        exchange_kind(state, item, other)
