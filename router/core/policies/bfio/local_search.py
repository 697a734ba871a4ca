"""Local search: single items, swaps, and pairs of items, while the filling improves."""

from __future__ import annotations

from router.core.policies.bfio.compiled import inlined, inner
from router.core.policies.bfio.filling import best_kind
from router.core.policies.bfio.kernels import (
    BUDGET,
    NOTHING,
    SHELF,
    SPENT,
    State,
    above,
    below,
    change_load,
    cost_of,
    cost_of_exchange,
    cost_of_two,
    costs_of_neighbours,
    foresee,
    peak_of,
    view,
)


@inner
def improve(state: State, least: float) -> None:
    """Improve by single items, swaps, then pairs, until nothing helps or the budget is spent."""
    again = True
    while again:
        while improve_singles(state, least):
            pass
        again = improve_swaps(state, least) or improve_pairs(state, least)


@inner
def improve_singles(state: State, least: float) -> bool:
    """Replace each item once by a kind of the shelf; with an empty shelf, move it."""
    improved = False
    for item in range(len(state.item_kind)):
        if state.counts[SPENT] >= state.counts[BUDGET]:
            return False
        if state.counts[SHELF] > 0:
            improved |= replace(state, item, least)
        else:
            improved |= move(state, item, least)
    return improved


@inner
def improve_swaps(state: State, least: float) -> bool:
    """Swap each item of a worker at a peak once; with an empty shelf, of every worker."""
    improved = False
    for item in range(len(state.item_kind)):
        if state.counts[SPENT] >= state.counts[BUDGET]:
            return False
        peak = peak_of(state, state.item_worker[item])
        if peak >= 0 or state.counts[SHELF] == 0:
            improved |= swap(state, item, peak, least)
    return improved


@inner
def improve_pairs(state: State, least: float) -> bool:
    """Replace each two items of a worker below the peaks once by two kinds of the shelf."""
    improved = False
    items = len(state.item_kind)
    for one in range(items):
        worker = state.item_worker[one]
        if state.counts[SHELF] == 0 or peak_of(state, worker) >= 0:
            continue
        for other in range(one + 1, items):
            if state.counts[SPENT] >= state.counts[BUDGET]:
                return False
            if state.item_worker[other] == worker:
                improved |= replace_two(state, one, other, least)
    return improved


@inlined
def replace(state: State, item: int, least: float) -> bool:
    """Replace an item by a better kind of the shelf, if a neighbour of its own kind is better."""
    kind, worker = state.item_kind[item], state.item_worker[item]
    lower, upper = below(state, kind), above(state, kind)
    down, up = costs_of_neighbours(state, worker, kind, lower, upper)
    if upper != NOTHING and up < -least:
        start, way = upper, 1
    elif lower != NOTHING and down < -least:
        start, way = lower, -1
    else:
        return False
    view(state, worker, kind)
    better, cost = descend(state, start, way)
    state.cost[0] += cost - cost_of(state, kind)
    exchange_kind(state, item, better)
    return True


@inlined
def descend(state: State, kind: int, way: int) -> tuple[int, float]:
    """The cheapest kind from this one on, in one direction; see ``best_kind``.

    Strides double while the cost falls.
    """
    stride, last = 1, len(state.left) - 1
    before, cost = kind, cost_of(state, kind)
    while 0 <= kind + way * stride <= last:
        there = cost_of(state, kind + way * stride)
        if there >= cost:
            break
        before, kind, cost, stride = kind, kind + way * stride, there, 2 * stride
    end = min(max(kind + way * stride, 0), last)
    return best_kind(state, min(before, end), max(before, end))


@inlined
def exchange_kind(state: State, item: int, kind: int) -> None:
    """Replace an item's kind by one of the shelf."""
    old = state.item_kind[item]
    state.left[old] += 1
    state.left[kind] -= 1
    state.item_kind[item] = kind
    change_load(state, state.item_worker[item], old, kind)


@inner
def replace_two(state: State, one: int, other: int, least: float) -> bool:
    """Replace two items of a worker by the best two kinds of the shelf.

    The larger one is, the smaller the best other: both walk along the shelf once.
    """
    first, second = state.item_kind[one], state.item_kind[other]
    state.left[first] += 1
    state.left[second] += 1
    view(state, state.item_worker[one], first)
    foresee(state, second, -1)
    before = cost_of_two(state, first, second)
    best, low, high = before - least, above(state, NOTHING), below(state, len(state.left))
    small, large = first, second
    while low != NOTHING and low <= high:
        cost = cost_of_two(state, low, high)
        lower = below(state, high)
        while lower >= low:
            there = cost_of_two(state, low, lower)
            if there > cost:
                break
            high, cost, lower = lower, there, below(state, lower)
        if cost < best and (low < high or state.left[low] > 1):
            best, small, large = cost, low, high
        low = above(state, low)
    state.left[small] -= 1
    state.left[large] -= 1
    if best >= before - least:
        return False
    state.cost[0] += best - before
    change_load(state, state.item_worker[one], first, small)
    change_load(state, state.item_worker[one], second, large)
    state.item_kind[one], state.item_kind[other] = small, large
    return True


@inlined
def move(state: State, item: int, least: float) -> bool:
    """Move an item to a worker with a free place, if that is better."""
    moved = False
    for worker in range(len(state.capacity)):
        kind, mine = state.item_kind[item], state.item_worker[item]
        if state.capacity[worker] <= 0 or worker == mine:
            continue
        cost = cost_of_exchange(state, mine, worker, kind, NOTHING)
        if cost < -least:
            exchange(state, mine, worker, kind, NOTHING)
            state.cost[0] += cost
            state.capacity[mine] += 1
            state.capacity[worker] -= 1
            state.item_worker[item] = worker
            moved = True
    return moved


@inlined
def swap(state: State, item: int, peak: int, least: float) -> bool:
    """Exchange an item with smaller ones on other workers while that is better.

    If this worker has the peak, the other must stay below it.
    """
    swapped = False
    for other in range(len(state.item_kind)):
        kind, mine = state.item_kind[item], state.item_worker[item]
        theirs, worker = state.item_kind[other], state.item_worker[other]
        if theirs >= kind or worker == mine:
            continue
        gain = state.kinds[kind, peak] - state.kinds[theirs, peak]
        if peak >= 0 and state.loads[worker, peak] + gain >= state.peaks[0, peak]:
            continue
        cost = cost_of_exchange(state, mine, worker, kind, theirs)
        if cost < -least:
            exchange(state, mine, worker, kind, theirs)
            state.cost[0] += cost
            state.item_kind[item], state.item_kind[other] = theirs, kind
            swapped = True
    return swapped


@inlined
def exchange(state: State, one: int, other: int, out: int, into: int) -> None:
    """Exchange kinds of two workers."""
    change_load(state, one, out, into)
    change_load(state, other, into, out)
