"""BF-IO without look-ahead (arXiv 2601.17855, equation 6 with H = 0), made strict by a tie-break.

Minimizes, over which of the pool's requests enter and where,

    J' = G max L - sum L + mu * sum (L - mean L)^2        L: load of each worker once they are in

with every free slot filled. Any filling under the maximum has the same J; the quadratic term
decides among them. A request's marginal cost on a worker is convex in its size, so the best
candidate is found by bisection in the pool sorted by size; where all get in, the largest go first.
A local search then mends the greedy filling. Deterministic.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from router.policies.baselines import PerRequest, fcfs
from router.policies.room import Room
from router.types import Assignment, Request, WorkerView

_IMPROVEMENTS = 64
_EPSILON = 1e-6


@dataclass(slots=True)
class _Item:
    """A waiting request and where it has been placed."""

    request: Request
    size: int
    worker: int = -1


class _Loads:
    """Loads of the workers with the sums that the objective needs."""

    def __init__(self, load_tokens: Sequence[int], tie_weight: float) -> None:
        self.tokens = list(load_tokens)
        self._mu = tie_weight
        self._sum = sum(load_tokens)
        self._squares = sum(load * load for load in load_tokens)

    def change(self, worker: int, tokens: int) -> None:
        load = self.tokens[worker]
        self._sum += tokens
        self._squares += tokens * (2 * load + tokens)
        self.tokens[worker] = load + tokens

    def cost(self, peak: int | None = None) -> float:
        """J' of these loads, ``peak`` being the highest if it is known."""
        workers = len(self.tokens)
        spread = (workers * self._squares - self._sum * self._sum) / workers
        highest = max(self.tokens) if peak is None else peak
        return workers * highest - self._sum + self._mu * spread

    def cost_after(self, worker: int, tokens: int, peak: int) -> float:
        """J' once a worker has so many tokens more, ``peak`` being the highest before."""
        self.change(worker, tokens)
        cost = self.cost(max(peak, self.tokens[worker]))
        self.change(worker, -tokens)
        return cost

    def ideal_size(self, worker: int, peak: int) -> float:
        """The size that would suit a worker best: up to the mean, a little more, never over."""
        workers = len(self.tokens)
        room = peak - self.tokens[worker]
        if self._mu == 0:
            return room
        lack = self._sum / workers - self.tokens[worker] + 0.5 / self._mu
        return min(room, lack * workers / (workers - 1))


class _Shelf:
    """Candidates sorted by size, the older first among equals."""

    def __init__(self, items: Sequence[_Item]) -> None:
        self._items = sorted(items, key=lambda item: item.size)
        self._sizes = [item.size for item in self._items]

    def __len__(self) -> int:
        return len(self._items)

    def largest(self) -> _Item:
        return self._items[-1]

    def nearest(self, size: float) -> list[_Item]:
        """The oldest of the smallest candidates of at least the size, and of the largest below."""
        at = bisect_left(self._sizes, size)
        found = self._items[at : at + 1]
        if at > 0:
            found.append(self._items[bisect_left(self._sizes, self._sizes[at - 1])])
        return found

    def take(self, item: _Item) -> None:
        at = bisect_left(self._sizes, item.size)
        while self._items[at] is not item:
            at += 1
        del self._items[at], self._sizes[at]

    def put(self, item: _Item) -> None:
        at = bisect_left(self._sizes, item.size)
        self._items.insert(at, item)
        self._sizes.insert(at, item.size)


class BfIo:
    """Assigns the pool jointly by J'.

    Args:
        tie_weight: mu, in 1/tokens.
    """

    def __init__(self, tie_weight: float) -> None:
        self._mu = tie_weight

    def assign(
        self, waiting: Sequence[Request], workers: Sequence[WorkerView]
    ) -> Sequence[Assignment]:
        """See ``types.Policy.assign``; a worker alone has nothing to balance and serves by age."""
        if len(workers) < 2:
            return PerRequest(fcfs).assign(waiting, workers)
        # Ties go to the earlier worker: sorted, the order of their configuration decides nothing.
        room = Room(sorted(workers, key=lambda worker: (worker.load_tokens, worker.capacity)))
        wide = [request for request in waiting if request.slots > 1]
        for request in wide:
            self._place_wide(room, request)
        items = [_Item(request, request.load_tokens) for request in waiting if request.slots == 1]
        search = _Search(room, items, self._mu)
        search.fill()
        search.improve()
        for item in search.placed:
            room.place(item.worker, item.request)
        return room.assignments

    def _place_wide(self, room: Room, request: Request) -> None:
        """A request of several slots goes where J' grows least; it is never traded later."""
        open_ = room.open_to(request)
        if not open_:
            return
        loads = _Loads(room.load_tokens, self._mu)
        peak = max(loads.tokens)
        size = request.load_tokens
        room.place(min(open_, key=lambda i: loads.cost_after(i, size, peak)), request)


class _Search:
    """Greedy filling and local search over requests of one slot each."""

    def __init__(self, room: Room, items: Sequence[_Item], tie_weight: float) -> None:
        self._loads = _Loads(room.load_tokens, tie_weight)
        self._capacity = list(room.capacity)
        self._shelf = _Shelf(items)
        self.placed: list[_Item] = []

    def fill(self) -> None:
        """Fill slot after slot until slots or candidates run out."""
        free = sum(capacity for capacity in self._capacity if capacity > 0)
        choose = self._largest if len(self._shelf) <= free else self._cheapest
        for _ in range(min(free, len(self._shelf))):
            self._put(*choose())

    def improve(self) -> None:
        """Trade, move and swap while J' falls, a bounded number of times."""
        for _ in range(_IMPROVEMENTS):
            if not (self._trade() or self._move() or self._swap()):
                return

    def _open(self) -> list[int]:
        return [i for i, capacity in enumerate(self._capacity) if capacity > 0]

    def _least_loaded(self) -> int:
        """Where any request costs least."""
        return min(self._open(), key=self._loads.tokens.__getitem__)

    def _largest(self) -> tuple[_Item, int]:
        """The largest candidate, where it costs least."""
        return self._shelf.largest(), self._least_loaded()

    def _cheapest(self) -> tuple[_Item, int]:
        """The candidate that costs least wherever it costs least."""
        peak = max(self._loads.tokens)
        found = (self._best(worker, peak) for worker in self._open())
        _, worker, item = min(found, key=lambda best: best[0])
        return item, worker

    def _best(self, worker: int, peak: int) -> tuple[float, int, _Item]:
        nearest = self._shelf.nearest(self._loads.ideal_size(worker, peak))
        costs = [(self._loads.cost_after(worker, item.size, peak), item) for item in nearest]
        cost, item = min(costs, key=lambda found: found[0])
        return cost, worker, item

    def _put(self, item: _Item, worker: int) -> None:
        self._shelf.take(item)
        self._loads.change(worker, item.size)
        self._capacity[worker] -= 1
        item.worker = worker
        self.placed.append(item)

    def _trade(self) -> bool:
        """Put a placed request back for a better one of the pool."""
        if not self._shelf:
            return False
        traded = False
        for at, item in enumerate(self.placed):
            before = self._loads.cost()
            self._loads.change(item.worker, -item.size)
            cost, worker, other = self._best(item.worker, max(self._loads.tokens))
            if cost < before - _EPSILON:
                self._shelf.take(other)
                self._shelf.put(item)
                other.worker, item.worker = worker, -1
                self.placed[at] = item = other
                traded = True
            self._loads.change(item.worker, item.size)
        return traded

    def _move(self) -> bool:
        """Move a placed request to a worker that has a slot left."""
        moved = False
        for item in self.placed if self._open() else ():
            worker = self._least_loaded()
            if self._shift(item.size, item.worker, worker):
                self._capacity[item.worker] += 1
                self._capacity[worker] -= 1
                item.worker = worker
                moved = True
        return moved

    def _swap(self) -> bool:
        """Swap two placed requests, one of them on the most loaded worker."""
        loads = self._loads.tokens
        peak = max(range(len(loads)), key=loads.__getitem__)
        for item in [i for i in self.placed if i.worker == peak]:
            for other in self.placed:
                if self._shift(item.size - other.size, peak, other.worker):
                    item.worker, other.worker = other.worker, peak
                    return True
        return False

    def _shift(self, tokens: int, source: int, target: int) -> bool:
        """Shift tokens from one worker to another if J' falls by it."""
        loads = self._loads
        if not 0 < tokens < loads.tokens[source] - loads.tokens[target]:
            return False
        before = loads.cost()
        loads.change(source, -tokens)
        loads.change(target, tokens)
        if loads.cost() < before - _EPSILON:
            return True
        loads.change(source, tokens)
        loads.change(target, -tokens)
        return False
