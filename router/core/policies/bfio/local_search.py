"""Local search: single items, swaps, and pairs of items, while the filling improves."""

from __future__ import annotations

from router.core.policies.bfio.compiled import inlined, inner
from router.core.policies.bfio.filling import best_kind, remove_item, top_up
from router.core.policies.bfio.kernels import (
    BUDGET,
    EMPTY,
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
    room_of,
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
    """Replace each item once by a kind of the shelf; move it if there are free places."""
    improved = False
    for item in range(len(state.item_kind)):
        if state.counts[SPENT] >= state.counts[BUDGET]:
            return False
        if state.item_kind[item] == NOTHING:
            continue
        if state.counts[SHELF] > 0:
            improved |= replace(state, item, least)
        if state.counts[SHELF] == 0 or state.counts[EMPTY] > 0:
            improved |= move(state, item, least)
    return improved


@inner
def pays(state: State, before: float, least: float) -> bool:
    """Let candidates enter that a change has made room for; false: in all it costs too much.

    Then they leave again, and the caller takes back the change.
    """
    added = top_up(state)
    if state.cost[0] < before - least:
        return True
    for place in range(added):
        remove_item(state, state.queue[place])
    state.cost[0] = before
    return False


@inner
def improve_swaps(state: State, least: float) -> bool:
    """Swap each item of a worker at a peak once; with an empty shelf, of every worker."""
    improved = False
    for item in range(len(state.item_kind)):
        if state.counts[SPENT] >= state.counts[BUDGET]:
            return False
        if state.item_kind[item] == NOTHING:
            continue
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
        if (
            state.counts[SHELF] == 0
            or state.item_kind[one] == NOTHING
            or peak_of(state, worker) >= 0
        ):
            continue
        for other in range(one + 1, items):
            if state.counts[SPENT] >= state.counts[BUDGET]:
                return False
            if state.item_worker[other] == worker and state.item_kind[other] != NOTHING:
                improved |= replace_two(state, one, other, least)
    return improved


@inlined
def replace(state: State, item: int, least: float) -> bool:
    """Replace an item by a better kind of the shelf, if a neighbour of its own kind is better."""
    kind, worker = state.item_kind[item], state.item_worker[item]
    room, before = room_of(state, worker, kind), state.cost[0]
    lower, upper = below(state, kind, room), above(state, kind, room)
    down, up = costs_of_neighbours(state, worker, kind, lower, upper)
    if upper != NOTHING and up < -least:
        start, way = upper, 1
    elif lower != NOTHING and down < -least:
        start, way = lower, -1
    else:
        return False
    view(state, worker, kind)
    better, cost = descend(state, start, way, room)
    state.cost[0] += cost - cost_of(state, kind)
    exchange_kind(state, item, better)
    if state.counts[EMPTY] > 0 and not pays(state, before, least):
        exchange_kind(state, item, kind)
        return False
    return True


@inlined
def descend(state: State, kind: int, way: int, room: int) -> tuple[int, float]:
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
    return best_kind(state, min(before, end), max(before, end), room)


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
    first, second, worker = state.item_kind[one], state.item_kind[other], state.item_worker[one]
    state.left[first] += 1
    state.left[second] += 1
    view(state, worker, first)
    foresee(state, second, -1)
    room = int(state.room[worker] + state.need[first] + state.need[second])
    present = cost_of_two(state, first, second)
    best = present - least
    low, high = above(state, NOTHING, room), below(state, len(state.left), room)
    small, large = first, second
    while low != NOTHING and low <= high:
        beside = room - state.need[low]
        if state.need[high] > beside:
            high = below(state, high, beside)
            if high < low:
                break
        cost = cost_of_two(state, low, high)
        lower = below(state, high, beside)
        while lower >= low:
            there = cost_of_two(state, low, lower)
            if there > cost:
                break
            high, cost, lower = lower, there, below(state, lower, beside)
        if cost < best and (low < high or state.left[low] > 1):
            best, small, large = cost, low, high
        low = above(state, low, room)
    state.left[small] -= 1
    state.left[large] -= 1
    if best >= present - least:
        return False
    before = state.cost[0]
    state.cost[0] += best - present
    exchange_two(state, one, other, small, large)
    if state.counts[EMPTY] > 0 and not pays(state, before, least):
        state.left[small] += 1
        state.left[large] += 1
        state.left[first] -= 1
        state.left[second] -= 1
        exchange_two(state, one, other, first, second)
        return False
    return True


@inlined
def exchange_two(state: State, one: int, other: int, small: int, large: int) -> None:
    """Give two items of a worker these kinds; the shelf is the caller's."""
    change_load(state, state.item_worker[one], state.item_kind[one], small)
    change_load(state, state.item_worker[one], state.item_kind[other], large)
    state.item_kind[one], state.item_kind[other] = small, large


@inlined
def move(state: State, item: int, least: float) -> bool:
    """Move an item to a worker with a free place, if that is better."""
    moved = False
    for worker in range(len(state.capacity)):
        kind, mine = state.item_kind[item], state.item_worker[item]
        if state.capacity[worker] <= 0 or worker == mine:
            continue
        cost = cost_of_exchange(state, mine, worker, kind, NOTHING)
        if cost < -least and room_of(state, worker, NOTHING) >= state.need[kind]:
            before = state.cost[0]
            state.cost[0] += cost
            relocate(state, item, worker)
            if state.counts[EMPTY] > 0 and not pays(state, before, least):
                relocate(state, item, mine)
            else:
                moved = True
    return moved


@inlined
def relocate(state: State, item: int, worker: int) -> None:
    """Move an item to another worker."""
    mine = state.item_worker[item]
    exchange(state, mine, worker, state.item_kind[item], NOTHING)
    state.capacity[mine] += 1
    state.capacity[worker] -= 1
    state.aboard[mine] -= 1
    state.aboard[worker] += 1
    state.item_worker[item] = worker


@inlined
def swap(state: State, item: int, peak: int, least: float) -> bool:
    """Exchange an item with smaller ones on other workers while that is better.

    If this worker has the peak, the other must stay below it.
    """
    swapped = False
    for other in range(len(state.item_kind)):
        kind, mine = state.item_kind[item], state.item_worker[item]
        theirs, worker = state.item_kind[other], state.item_worker[other]
        if theirs >= kind or theirs == NOTHING or worker == mine:
            continue
        gain = state.kinds[kind, peak] - state.kinds[theirs, peak]
        if peak >= 0 and state.loads[worker, peak] + gain >= state.peaks[0, peak]:
            continue
        cost = cost_of_exchange(state, mine, worker, kind, theirs)
        if cost < -least and fit_exchanged(state, mine, worker, kind, theirs):
            before = state.cost[0]
            state.cost[0] += cost
            exchange(state, mine, worker, kind, theirs)
            state.item_kind[item], state.item_kind[other] = theirs, kind
            if state.counts[EMPTY] > 0 and not pays(state, before, least):
                exchange(state, mine, worker, theirs, kind)
                state.item_kind[item], state.item_kind[other] = kind, theirs
            else:
                swapped = True
    return swapped


@inlined
def fit_exchanged(state: State, one: int, other: int, out: int, into: int) -> bool:
    """Whether two workers have memory to exchange kinds; ``out`` leaves the first."""
    return bool(
        room_of(state, one, out) >= state.need[into]
        and room_of(state, other, into) >= state.need[out]
    )


@inlined
def exchange(state: State, one: int, other: int, out: int, into: int) -> None:
    """Exchange kinds of two workers."""
    change_load(state, one, out, into)
    change_load(state, other, into, out)
