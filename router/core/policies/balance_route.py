"""BalanceRoute (arXiv 2605.06113): BR-0 without an outlook, BR-H with one.

Worker after worker takes requests that add S to its load, to make

    F(S) = sum_t d^t [alpha S - beta max(0, S - m_t)]        m_t = max_g L_g(t) - L(t)

large. m_t is the margin below the most loaded worker at look-ahead step t, after earlier choices.
Where the formula is open, the code follows the authors' release of BF-IO (arXiv 2601.17855):

- While many slots are free, a worker with the most of them takes the single request of highest F.
- Then the worker of least load at the last look-ahead step takes a subset for its free slots: the
  largest sum that fits at every step, else the smallest sum above. It takes fewer requests if that
  raises F, and only the one of highest F if F is not above 0. This repeats until all slots are
  filled.
- A new request adds its present size at every step.

F is concave. At its peak the weights d^t of the margins up to S exceed alpha / beta of the total.
That is often above the lowest margin: the release's subsets are not quite those of highest F.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from router.core.forecast.forecast import Floats, Ints
from router.core.policies.baselines import PerRequest, fcfs
from router.core.policies.bfio.subsets import Shelf
from router.core.policies.policy_protocol import NOTHING, Known, Policy
from router.core.policies.room import Room
from router.core.types import Assignment, Request, WorkerView

# Total of free slots up to which subsets are chosen; above it, single requests.
SUBSET_SLOTS = 7

# As in the authors' release: gain per admitted token, loss per token above a margin, and the weight
# of a look-ahead step relative to the one before.
_ALPHA, _BETA, _DISCOUNT = 1.0, 43.0, 0.86


class BalanceRoute(Policy):
    """Assigns by F."""

    def assign(
        self,
        waiting: Sequence[Request],
        workers: Sequence[WorkerView],
        known: Known = NOTHING,
    ) -> Sequence[Assignment]:
        # A single worker has nothing to balance, and serves by age.
        if len(workers) < 2:
            return PerRequest(fcfs).assign(waiting, workers)
        room, outlook = Room(workers, known), known.outlook
        waiting = room.fitting(waiting)
        if outlook is None:
            work = np.array([[float(load)] for load in room.load_tokens])
            sizes = [request.load_tokens for request in waiting]
        else:
            work = outlook.work.copy()
            sizes = [round(size) for size in outlook.request_work(waiting)[:, 0]]
        loads = _Loads(work, _ALPHA, _BETA, _DISCOUNT)
        _place_wide(room, loads, waiting, sizes)
        narrow = [index for index, request in enumerate(waiting) if request.slots == 1]
        requests = [waiting[index] for index in narrow]
        filling = _Filling(loads, room, requests, [sizes[i] for i in narrow])
        for worker, candidates in filling.choices():
            for candidate in candidates:
                room.place(worker, requests[candidate])
        return room.assignments


def _place_wide(
    room: Room, loads: _Loads, waiting: Sequence[Request], sizes: Sequence[int]
) -> None:
    """Place requests of several slots first, in order of arrival, each where its F is highest."""
    size_of = {one.id: size for one, size in zip(waiting, sizes, strict=True) if one.slots > 1}
    for request, open_ in room.takers([one for one in waiting if one.slots > 1]):
        size = size_of[request.id]
        values = [loads.value(loads.margins(index), size) for index in open_]
        worker = open_[values.index(max(values))]
        loads.add(worker, size)
        room.place(worker, request)


class _Loads:
    """Loads over the look-ahead, shape (G, K), updated in place, and F of additions."""

    def __init__(self, work: Floats, alpha: float, beta: float, discount: float) -> None:
        self._work = work
        self._highest = work.max(axis=0)
        weights = discount ** np.arange(work.shape[1])
        self._gain = alpha * float(weights.sum())
        self._losses = beta * weights

    def now(self, worker: int) -> float:
        return float(self._work[worker, 0])

    def last(self, worker: int) -> float:
        return float(self._work[worker, -1])

    def margins(self, worker: int) -> Floats:
        margins: Floats = self._highest - self._work[worker]
        return margins

    def value(self, margins: Floats, added: int) -> float:
        return self._gain * added - float(self._losses @ np.maximum(0.0, added - margins))

    def peak(self, margins: Floats) -> float:
        order = margins.argsort()
        at = int(self._losses[order].cumsum().searchsorted(self._gain, side="right"))
        return float(margins[order[min(at, len(order) - 1)]])

    def add(self, worker: int, added: int) -> None:
        row = self._work[worker]
        row += added
        np.maximum(self._highest, row, out=self._highest)


class _Filling:
    """Fills the free slots with one-slot requests; a candidate is an index of them.

    ``room`` holds the choices made so far. A subset that exceeds a worker's memory gives way to the
    single request of highest F that does not.
    """

    def __init__(
        self,
        loads: _Loads,
        room: Room,
        requests: Sequence[Request],
        sizes: Sequence[int],
    ) -> None:
        self._loads = loads
        self._room = room
        self._requests = requests
        self._free = [max(0, slots) for slots in room.capacity]
        self._shelf = Shelf(sizes)
        self._needs: Sequence[Ints] = ()

    def choices(self) -> Iterator[tuple[int, list[int]]]:
        singles = max(0, sum(self._free) - SUBSET_SLOTS)
        freest = self._by_turns(lambda one: (-self._free[one], self._loads.now(one)), self._single)
        yield from islice(freest, singles)
        yield from self._by_turns(self._loads.last, self._subset)

    def _by_turns(
        self, key: Callable[[int], Any], choose: Callable[[int], list[int]]
    ) -> Iterator[tuple[int, list[int]]]:
        """Let the worker of the lowest key choose, again and again while it has slots."""
        line = [(key(worker), worker) for worker, slots in enumerate(self._free) if slots]
        heapq.heapify(line)
        while line and self._shelf:
            worker = line[0][1]
            candidates = choose(worker)
            if not candidates:  # none of those left fits
                self._free[worker] = 0
                heapq.heappop(line)
                continue
            self._loads.add(worker, self._shelf.total(candidates))
            self._shelf.take(candidates)
            self._free[worker] -= len(candidates)
            yield worker, candidates
            if self._free[worker]:
                heapq.heapreplace(line, (key(worker), worker))
            else:
                heapq.heappop(line)

    def _single(self, worker: int) -> list[int]:
        margins = self._loads.margins(worker)
        peak = self._loads.peak(margins)
        found = self._shelf.nearest(peak)
        if not all(self._room.fits(worker, self._requests[one]) for one in found):
            self._needs = self._needs or self._room.needs(self._requests)
            found = self._shelf.nearest_of(self._room.fit_on(worker, self._needs), peak)
        key = lambda one: self._loads.value(margins, self._shelf.total([one]))  # noqa: E731
        return [max(found, key=key)] if found else []

    def _subset(self, worker: int) -> list[int]:
        margins = self._loads.margins(worker)
        limit = float(margins.min())
        best: list[int] = []
        highest = 0.0
        for count in range(min(self._free[worker], len(self._shelf)), 0, -1):
            chosen = self._shelf.subset(count, limit)
            total = self._shelf.total(chosen)
            value = self._loads.value(margins, total)
            if value > highest:
                best, highest = chosen, value
                if total <= limit:
                    break
        if best and self._room.takes(worker, [self._requests[one] for one in best]):
            return best
        return self._single(worker)
