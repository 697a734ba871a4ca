"""The waiting pool of a group: bounded, ordered by priority, fair to those who wait long.

Times are on the caller's clock (seconds live, steps in a simulator) and come in as arguments.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, takewhile

from router.types import Request

_Key = tuple[int, float, int]

# Fraction of the patience from which on a request takes a gap that it fits into.
_WILLING = 0.25


class Pool:
    """Requests that wait for a slot, lowest priority number first, then in order of arrival.

    Args:
        limit: requests that may wait.
        patience: time after which a request goes before all others of its priority; a policy that
            chooses freely would otherwise never take an awkward one. Infinite: never. While nobody
            is that late, the oldest one that has waited a quarter of it goes first if it fits into
            the gap between the loads of the workers; the longer it waits, the less it must fit.
        timeout: time after which a request is given up. Infinite: never.
    """

    def __init__(self, limit: int, patience: float = math.inf, timeout: float = math.inf) -> None:
        self._limit = limit
        self._patience = patience
        self._timeout = timeout
        self._keys: dict[str, _Key] = {}
        self._order: list[_Key] = []
        self._requests: dict[_Key, Request] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._keys

    def __iter__(self) -> Iterator[Request]:
        return (self._requests[key] for key in self._order)

    @property
    def full(self) -> bool:
        """No newcomer may enter; one that was assigned before may still come back."""
        return len(self._order) >= self._limit

    def add(self, request: Request) -> None:
        """Let a request wait; one that comes back takes its old place by its arrival."""
        self._serial += 1
        key = (request.priority, request.arrival_s, self._serial)
        self._keys[request.id] = key
        self._requests[key] = request
        insort(self._order, key)

    def remove(self, request_id: str) -> Request | None:
        """Take a request out, None if it does not wait here."""
        key = self._keys.pop(request_id, None)
        if key is None:
            return None
        del self._order[bisect_left(self._order, key)]
        return self._requests.pop(key)

    def expired(self, now: float) -> list[Request]:
        """Requests that have waited for the timeout or longer."""
        return [request for request in self if now - request.arrival_s >= self._timeout]

    def tiers(self, now: float, capacity: int, gap_tokens: int) -> list[Sequence[Request]]:
        """Requests in groups that are to be served strictly one after the other.

        Per priority: first those that have lost patience, as many of the oldest as surely get in
        and one at least, or else one that fits; then the rest, among whom a policy chooses freely.

        Args:
            now: the time.
            capacity: engine requests that can be placed in all.
            gap_tokens: by how much the least loaded worker with a free slot is below the fullest.
        """
        tiers: list[Sequence[Request]] = []
        for _, peers in groupby(self, key=lambda request: request.priority):
            waiting = list(peers)
            urgent = self._urgent(waiting, now, capacity, gap_tokens)
            first = {request.id for request in urgent}
            rest = [request for request in waiting if request.id not in first]
            tiers += [tier for tier in (urgent, rest) if tier]
            capacity -= sum(request.slots for request in waiting)
        return tiers

    def _urgent(
        self, waiting: Sequence[Request], now: float, capacity: int, gap_tokens: int
    ) -> Sequence[Request]:
        late = list(takewhile(lambda request: self._waited(request, now) >= 1, waiting))
        if late:
            slots = list(accumulate(request.slots for request in late))
            return late[: max(1, bisect_right(slots, capacity))]
        old = takewhile(lambda request: self._waited(request, now) >= _WILLING, waiting)
        return [request for request in old if self._fits(request, now, gap_tokens)][:1]

    def _waited(self, request: Request, now: float) -> float:
        """Fraction of the patience that has passed."""
        return (now - request.arrival_s) / self._patience

    def _fits(self, request: Request, now: float, gap_tokens: int) -> bool:
        """The gap is large enough: for all of a request at first, at last for nothing of it."""
        needed = request.load_tokens * (1 - self._waited(request, now))
        return needed <= gap_tokens * (1 - _WILLING)
