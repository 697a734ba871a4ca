"""The waiting pool of a group: bounded, ordered by priority, fair to those who wait long.

Times are on the caller's clock (seconds live, steps in a simulator) and come in as arguments.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import accumulate, takewhile
from operator import itemgetter

import numpy as np

from router.tier import Tier
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
        self._by_id: dict[str, Request] = {}
        # In order of the keys:
        self._order: list[_Key] = []
        self._waiting: list[Request] = []
        self._prompt_tokens = array("q")
        self._slots = array("q")
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
        self._by_id[request.id] = request
        place = bisect_left(self._order, key)
        self._order.insert(place, key)
        self._waiting.insert(place, request)
        self._prompt_tokens.insert(place, request.prompt_tokens)
        self._slots.insert(place, request.slots)

    def remove(self, request_id: str) -> Request | None:
        """Take a request out, None if it does not wait here."""
        key = self._keys.pop(request_id, None)
        if key is None:
            return None
        place = bisect_left(self._order, key)
        del self._order[place], self._waiting[place]
        del self._prompt_tokens[place], self._slots[place]
        return self._by_id.pop(request_id)

    def expired(self, now: float) -> list[Request]:
        """Requests that have waited for the timeout or longer."""
        return [request for request in self if now - request.arrival_s >= self._timeout]

    def tiers(self, now: float, capacity: int, gap_tokens: int) -> list[Tier]:
        """Requests in groups that are to be served strictly one after the other.

        Per priority: first those that have lost patience, as many of the oldest as surely get in
        and one at least, or else one that fits; then the rest, among whom a policy chooses freely.
        They are the pool as it stands, and hold until a request enters or leaves.

        Args:
            now: the time.
            capacity: engine requests that can be placed in all.
            gap_tokens: by how much the least loaded worker with a free slot is below the fullest.
        """
        tiers: list[Tier] = []
        for peers in self._peers():
            urgent = self._urgent(peers, now, capacity, gap_tokens)
            if urgent:
                tiers.append(Tier.of(self._waiting[urgent.start : urgent.stop]))
            if len(urgent) < len(peers):
                tiers.append(self._rest(peers, urgent))
            if peers.stop < len(self._order):
                capacity -= sum(self._slots[peers.start : peers.stop])
        return tiers

    def overdue(self, now: float) -> Request | None:
        """The first in order, if it has lost patience."""
        if self._waiting and self._waited(self._waiting[0], now) >= 1:
            return self._waiting[0]
        return None

    def room_wanted(self, now: float, gap_tokens: int) -> list[tuple[str, float]]:
        """Requests that room is to be made for, and how many tokens of it there should be by now.

        None for those that fit; see ``tiers`` and ``Reservations``.
        """
        wanted = []
        for peers in self._peers():
            for request in takewhile(lambda r: self._waited(r, now) >= _ROOM_FROM, self._at(peers)):
                fits = self._fits(request, now, gap_tokens)
                share = (self._waited(request, now) - _ROOM_FROM) / (_ROOM_MADE - _ROOM_FROM)
                wanted.append((request.id, 0.0 if fits else request.load_tokens * min(1.0, share)))
        return wanted

    def _peers(self) -> Iterator[range]:
        """Places of those of equal priority; usually that is all of them."""
        start, priority = 0, itemgetter(0)
        while start < len(self._order):
            stop = bisect_right(self._order, self._order[start][0], start, key=priority)
            yield range(start, stop)
            start = stop

    def _at(self, places: range) -> Iterator[Request]:
        return map(self._waiting.__getitem__, places)

    def _urgent(self, peers: range, now: float, capacity: int, gap_tokens: int) -> range:
        """Places of those that go before their peers."""
        late = sum(1 for _ in takewhile(lambda r: self._waited(r, now) >= 1, self._at(peers)))
        if late:
            slots = list(accumulate(self._slots[peers.start : peers.start + late]))
            return peers[: max(1, bisect_right(slots, capacity))]
        for place in peers:
            request = self._waiting[place]
            if self._waited(request, now) < _WILLING:
                break
            if self._fits(request, now, gap_tokens):
                return range(place, place + 1)
        return peers[:0]

    def _rest(self, peers: range, urgent: range) -> Tier:
        """Peers that are not urgent; usually all that wait, and then nothing is copied of them."""
        before, after = slice(peers.start, urgent.start), slice(urgent.stop, peers.stop)
        if len(peers) < len(self._order):
            return Tier.of(self._waiting[before] + self._waiting[after])
        if not urgent:
            columns = np.array(self._prompt_tokens), np.array(self._slots)
            return Tier(self._waiting, *columns, self._by_id)
        return Tier(
            self._waiting[before] + self._waiting[after],
            np.array(self._prompt_tokens[before] + self._prompt_tokens[after]),
            np.array(self._slots[before] + self._slots[after]),
            self._by_id,
            {request.id for request in self._at(urgent)},
        )

    def _waited(self, request: Request, now: float) -> float:
        """Fraction of the patience that has passed."""
        return (now - request.arrival_s) / self._patience

    def _fits(self, request: Request, now: float, gap_tokens: int) -> bool:
        """The gap is large enough: for all of a request at first, at last for nothing of it."""
        needed = request.load_tokens * (1 - self._waited(request, now) ** _RELUCTANCE)
        return needed <= gap_tokens
