"""The waiting pool of a group: bounded, ordered by priority, fair to those who wait long.

Times are on the caller's clock (seconds live, steps in a simulator) and come in as arguments.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, takewhile
from operator import attrgetter

from router.types import Request

_Key = tuple[int, float, int]

# Fractions of the patience: from the first on a request takes a gap that it fits into, from the
# second on room is made for it, all that it needs at the third. And how slowly it comes to need
# less of a gap. Found by simulation, at 16 workers with and without look-ahead.
_WILLING = 0.2
_ROOM_FROM, _ROOM_MADE = 0.5, 0.9
_RELUCTANCE = 16


class Pool:
    """Requests that wait for a slot, lowest priority number first, then in order of arrival.

    Args:
        limit: requests that may wait.
        patience: time after which a request goes before all others of its priority; a policy that
            chooses freely would otherwise never take an awkward one. Infinite: never. While nobody
            is that late, the oldest one that has waited a fifth of it goes first if it fits into
            the gap between the loads of the workers; at the end of it, it need not fit.
        timeout: time after which a request is given up. Infinite: never.
    """

    def __init__(self, limit: int, patience: float = math.inf, timeout: float = math.inf) -> None:
        self._limit = limit
        self._patience = patience
        self._timeout = timeout
        self._keys: dict[str, _Key] = {}
        self._order: list[_Key] = []
        self._waiting: list[Request] = []  # in that order
        self._serial = 0

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._keys

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)

    @property
    def full(self) -> bool:
        """No newcomer may enter; one that was assigned before may still come back."""
        return len(self._order) >= self._limit

    def add(self, request: Request) -> None:
        """Let a request wait; one that comes back takes its old place by its arrival."""
        self._serial += 1
        key = (request.priority, request.arrival_s, self._serial)
        self._keys[request.id] = key
        place = bisect_left(self._order, key)
        self._order.insert(place, key)
        self._waiting.insert(place, request)

    def remove(self, request_id: str) -> Request | None:
        """Take a request out, None if it does not wait here."""
        key = self._keys.pop(request_id, None)
        if key is None:
            return None
        place = bisect_left(self._order, key)
        del self._order[place]
        return self._waiting.pop(place)

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
        for waiting in self._peers():
            urgent = self._urgent(waiting, now, capacity, gap_tokens)
            rest = waiting
            if urgent:
                first = {request.id for request in urgent}
                rest = [request for request in waiting if request.id not in first]
            tiers += [tier for tier in (urgent, rest) if tier]
            capacity -= sum(map(attrgetter("slots"), waiting))
        return tiers

    def room_wanted(self, now: float, gap_tokens: int) -> list[tuple[str, float]]:
        """Requests that room is to be made for, and how many tokens of it there should be by now.

        None for those that fit; see ``tiers`` and ``Reservations``.
        """
        wanted = []
        for waiting in self._peers():
            for request in takewhile(lambda r: self._waited(r, now) >= _ROOM_FROM, waiting):
                fits = self._fits(request, now, gap_tokens)
                share = (self._waited(request, now) - _ROOM_FROM) / (_ROOM_MADE - _ROOM_FROM)
                wanted.append((request.id, 0.0 if fits else request.load_tokens * min(1.0, share)))
        return wanted

    def _peers(self) -> Iterator[Sequence[Request]]:
        """Those of equal priority together; usually that is all of them."""
        if self._order and self._order[0][0] == self._order[-1][0]:
            yield self._waiting.copy()
        else:
            for _, peers in groupby(self, key=attrgetter("priority")):
                yield list(peers)

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
        needed = request.load_tokens * (1 - self._waited(request, now) ** _RELUCTANCE)
        return needed <= gap_tokens
