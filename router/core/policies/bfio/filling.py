"""Greedy filling: items get workers and kinds by one of several plans, while any candidate fits.

Among parallel profiles the cost of a kind on a worker is convex in its size, so bisection finds the
best kind.
"""

from __future__ import annotations

from router.core.policies.bfio.compiled import inlined, inner
from router.core.policies.bfio.kernels import (
    EMPTY,
    LOW,
    NOTHING,
    SHELF,
    SPENT,
    State,
    above,
    below,
    change_load,
    cost_of,
    draw,
    foresee,
    least_left,
    objective,
    rank_peaks,
    room_of,
    view,
)

FULLEST, EMPTIEST, NARROWEST = range(3)

# Plans of filling: (share of the shelf whose kind stands in for a worker's later places; first
# worker: fullest, emptiest or with fewest places; level of a virtual peak above the present one, in
# median kinds). Found by trial on simulated instances: the first is best alone, the others
# complement it. Later plans are drawn.
PLANS = (
    (0.25, FULLEST, 0.0),
    (0.1, EMPTIEST, 0.0),
    (0.4, FULLEST, 0.25),
    (0.4, EMPTIEST, 0.5),
    (0.1, FULLEST, 1.0),
)
MOST_RESERVE = 0.5


@inner
def fill(state: State, plan: int) -> None:
    """Give items a worker and the kind that costs least there, worker by worker."""
    if plan < len(PLANS):
        reserve, first, level = PLANS[plan]
        raise_floor(state, level)
    else:
        reserve, first = drawn_reserve(state), draw(state, 3)
        raise_floor_to_best(state, draw(state, 1000) / 1000)
    later = quantile(state, reserve)
    length = queue_up(state, later, first == NARROWEST)
    item = 0
    for place in range(length):
        worker = state.queue[length - 1 - place if first == FULLEST else place]
        while item < len(state.item_kind) and settle(state, item, worker, later):
            item += 1
    raise_floor(state, 0.0)
    state.cost[0] = objective(state)


@inner
def drawn_reserve(state: State) -> float:
    """Random share of the shelf, as in plans."""
    return MOST_RESERVE * draw(state, 1000) / 1000


@inner
def settle(state: State, item: int, worker: int, later: int) -> bool:
    """Put an item on a worker whose other free places will hold ``later``; false: none fits."""
    if state.capacity[worker] <= 0:
        return False
    view(state, worker, NOTHING)
    foresee(state, later, max(0, expected(state, worker, later) - 1))
    kind, _ = best_kind(state, 0, len(state.left) - 1, room_of(state, worker, NOTHING))
    if kind == NOTHING:
        return False
    place_item(state, item, kind, worker)
    return True


@inlined
def expected(state: State, worker: int, kind: int) -> int:
    """Candidates of a kind for which a worker has places and memory."""
    places, need = state.capacity[worker], state.need[kind]
    if need > 0:
        places = min(places, max(0, state.room[worker]) // need)
    return int(places)


@inner
def top_up(state: State) -> int:
    """Let candidates enter where a place and memory are free; their number, listed in ``queue``.

    Without empty items all places are filled, or all candidates have entered.
    """
    added = item = 0
    if state.counts[EMPTY] == 0:
        return added
    least = least_left(state)
    for worker in range(len(state.capacity)):
        while state.capacity[worker] > 0 and room_of(state, worker, NOTHING) >= least:
            view(state, worker, NOTHING)
            room = room_of(state, worker, NOTHING)
            kind, cost = best_kind(state, 0, len(state.left) - 1, room)
            state.cost[0] += cost - cost_of(state, NOTHING)
            while state.item_kind[item] != NOTHING:
                item += 1
            place_item(state, item, kind, worker)
            state.queue[added] = item
            added += 1
            least = least_left(state)
    state.counts[SPENT] += len(state.capacity)
    return added


@inner
def spread(state: State) -> None:
    """Fill if all or very many enter: largest first, each to the least loaded with memory for it.

    It takes an even sample of the shelf by size.
    """
    first, length = 0, queue_up(state, NOTHING, False)
    items, shelf = len(state.item_kind), state.counts[SHELF]
    kind, passed = len(state.left), 0
    for item in range(items):
        while passed <= (2 * item + 1) * shelf // (2 * items):
            kind -= 1
            passed += state.left[kind]
        need, place = state.need[kind], first
        while place < length and room_of(state, state.queue[place], NOTHING) < need:
            place += 1
        if place == length:
            continue
        worker = state.queue[place]
        for behind in range(place, first, -1):
            state.queue[behind] = state.queue[behind - 1]
        state.queue[first] = worker
        place_item(state, item, kind, worker)
        for h in range(len(state.totals)):
            state.queued[worker] += state.kinds[kind, h]
        if state.capacity[worker] > 0:
            sink(state, first, length)
        else:
            first += 1
    top_up(state)
    state.cost[0] = objective(state)


@inner
def quantile(state: State, share: float) -> int:
    """The kind below which this share of the shelf's candidates lies."""
    kind, before = 0, state.left[0]
    while before <= share * state.counts[SHELF]:
        kind += 1
        before += state.left[kind]
    return kind


@inner
def raise_floor(state: State, level: float) -> None:
    """Set a virtual peak that holds at any loads; level 0: none."""
    median = quantile(state, 0.5) if level > 0 else NOTHING
    for h in range(len(state.floor)):
        state.floor[h] = LOW
        if level > 0:
            state.floor[h] = state.peaks[0, h] + level * state.kinds[median, h]
    rank_peaks(state)


@inner
def raise_floor_to_best(state: State, share: float) -> None:
    """Set the virtual peak between the workers' present peak and that of the best filling."""
    lower = (1 - share) * (1 - share)
    for h in range(len(state.floor)):
        best = state.peaks[3, h]
        state.floor[h] = best + lower * (state.peaks[0, h] - best)
    rank_peaks(state)


@inner
def queue_up(state: State, later: int, narrow: bool) -> int:
    """Sort the workers with room by their expected load; returns their number."""
    length = 0
    for worker in range(len(state.capacity)):
        if state.capacity[worker] > 0:
            state.queue[length] = worker
            length += 1
            state.queued[worker] = 0.0
            places = expected(state, worker, later)
            for h in range(len(state.totals)):
                if narrow:
                    state.queued[worker] += places * state.totals[h]
                coming = places * state.kinds[later, h]
                state.queued[worker] += state.loads[worker, h] + coming
    for place in range(length - 1, -1, -1):
        sink(state, place, length)
    return length


@inner
def sink(state: State, place: int, length: int) -> None:
    """Move a worker back in the queue, behind those with less load."""
    queue, queued = state.queue, state.queued
    while place + 1 < length and queued[queue[place + 1]] < queued[queue[place]]:
        queue[place], queue[place + 1] = queue[place + 1], queue[place]
        place += 1


@inlined
def best_kind(state: State, low: int, high: int, room: int) -> tuple[int, float]:
    """The cheapest kind on the shelf within the room, for the worker in view, and its cost.

    Bisection covers kinds off the shelf too; the answer is then one of the two neighbours.
    """
    high = last_within(state, high, room)
    if high < 0:
        return NOTHING, 0.0
    low = min(low, high)
    while low < high:
        middle = (low + high) // 2
        if cost_of(state, middle + 1) < cost_of(state, middle):
            low = middle + 1
        else:
            high = middle
    upper, lower = above(state, low - 1, room), below(state, low, room)
    if upper == low or lower == NOTHING:
        return upper, cost_of(state, upper)
    if upper == NOTHING:
        return lower, cost_of(state, lower)
    down, up = cost_of(state, lower), cost_of(state, upper)
    return (lower, down) if down <= up else (upper, up)


@inlined
def last_within(state: State, kind: int, room: int) -> int:
    """The last kind up to this one that needs no more than the room, or ``NOTHING``."""
    if state.least_need[kind] <= room:
        return kind
    within = NOTHING
    while within + 1 < kind:
        middle = (within + kind) // 2
        if state.least_need[middle] <= room:
            within = middle
        else:
            kind = middle
    return within


@inner
def place_item(state: State, item: int, kind: int, worker: int) -> None:
    """Put an item on a worker."""
    state.left[kind] -= 1
    state.counts[SHELF] -= 1
    state.counts[EMPTY] -= 1
    state.capacity[worker] -= 1
    state.aboard[worker] += 1
    state.item_kind[item], state.item_worker[item] = kind, worker
    change_load(state, worker, NOTHING, kind)


@inner
def remove_item(state: State, item: int) -> None:
    """Put an item's candidate back on the shelf."""
    kind, worker = state.item_kind[item], state.item_worker[item]
    state.left[kind] += 1
    state.counts[SHELF] += 1
    state.counts[EMPTY] += 1
    state.capacity[worker] += 1
    state.aboard[worker] -= 1
    state.item_kind[item] = NOTHING
    change_load(state, worker, kind, NOTHING)
