"""The waiting pool of a group: bounded, ordered by priority, fair to those who wait long.

Tenants, told apart by their keys, have their turns and their places in it (``access.shares``).

Times are on the caller's clock (seconds live, steps in a simulator) and come in as arguments.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain, takewhile
from operator import itemgetter

import numpy as np

from router.access.shares import Offer, Weight
from router.tier import Tier
from router.types import Request

_Key = tuple[int, float, int]
# Places in the order; a range of them costs nothing.
_Places = Sequence[int]

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
        self.configure(limit, patience, timeout)
        self._keys: dict[str, _Key] = {}
        self._by_id: dict[str, Request] = {}
        # In order of the keys:
        self._order: list[_Key] = []
        self._waiting: list[Request] = []
        self._prompt_tokens = array("q")
        self._slots = array("q")
        self._serial = 0
        self._requests_of: Counter[str] = Counter()
        self._slots_of: Counter[str] = Counter()
        self._failed: dict[str, tuple[_Key, Request]] = {}
        self._choosy = 0  # requests that not every worker can serve

    def configure(self, limit: int, patience: float, timeout: float) -> None:
        """Go by other bounds from now on, see the arguments of the class; who waits waits on."""
        self._limit = limit
        self._patience = patience
        self._timeout = timeout

    def __len__(self) -> int:
        return len(self._order) + len(self._failed)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._keys or request_id in self._failed

    def __iter__(self) -> Iterator[Request]:
        failed = (request for _, request in self._failed.values())
        return chain(failed, self._waiting)

    @property
    def limit(self) -> int:
        """Requests that may wait."""
        return self._limit

    @property
    def full(self) -> bool:
        """No newcomer may enter; one that was assigned before may still come back."""
        return len(self) >= self._limit

    @property
    def requests_of(self) -> Mapping[str, int]:
        """Requests that wait, by tenant."""
        return self._requests_of

    @property
    def slots_of(self) -> Mapping[str, int]:
        """Slots that are waited for, by tenant."""
        return self._slots_of

    def add(self, request: Request) -> None:
        """Let a request wait; one that comes back takes its old place by its arrival.

        One that a worker has failed has had its turn, and goes before all others.
        """
        self._serial += 1
        key = (request.priority, request.arrival_s, self._serial)
        self._requests_of[request.tenant] += 1
        self._slots_of[request.tenant] += request.slots
        self._choosy += bool(request.lacks)
        if request.avoid:
            self._failed[request.id] = key, request
            return
        self._keys[request.id] = key
        self._by_id[request.id] = request
        place = bisect_left(self._order, key)
        self._order.insert(place, key)
        self._waiting.insert(place, request)
        self._prompt_tokens.insert(place, request.prompt_tokens)
        self._slots.insert(place, request.slots)

    def remove(self, request_id: str) -> Request | None:
        """Take a request out, None if it does not wait here."""
        if request_id not in self:
            return None
        request = self._taken_out(request_id)
        self._requests_of[request.tenant] -= 1
        self._slots_of[request.tenant] -= request.slots
        self._choosy -= bool(request.lacks)
        if not self._requests_of[request.tenant]:
            del self._requests_of[request.tenant], self._slots_of[request.tenant]
        return request

    def _taken_out(self, request_id: str) -> Request:
        if request_id in self._failed:
            return self._failed.pop(request_id)[1]
        place = bisect_left(self._order, self._keys.pop(request_id))
        del self._order[place], self._waiting[place]
        del self._prompt_tokens[place], self._slots[place]
        return self._by_id.pop(request_id)

    def displaced_by(self, newcomer: str, weight: Weight) -> Request | None:
        """Who has to leave a full pool for a newcomer of a tenant with fewer waiting.

        Args:
            newcomer: its tenant.
            weight: of a tenant; so many times as many of its requests may wait.

        Returns:
            The last in order of the tenant with the most, None if the newcomer's would then have
            more than that one.
        """
        if not self._requests_of.keys() - {newcomer}:
            return None
        most = max(self._requests_of, key=lambda each: self._requests_of[each] / weight(each))
        left, grown = self._requests_of[most] - 1, self._requests_of.get(newcomer, 0) + 1
        if most == newcomer or grown / weight(newcomer) > left / weight(most):
            return None
        return next((each for each in reversed(self._waiting) if each.tenant == most), None)

    def expired(self, now: float) -> list[Request]:
        """Requests that have waited for the timeout, or their own, or longer."""
        return [each for each in self if now - each.arrival_s >= self.timeout_of(each)]

    def timeout_of(self, request: Request) -> float:
        """How long a request may wait."""
        own = request.queue_timeout_s
        return self._timeout if own is None else min(own, self._timeout)

    def tiers(
        self,
        now: float,
        capacity: int,
        gap_tokens: int,
        turns: Sequence[Offer] = (),
    ) -> list[Tier]:
        """Requests in groups that are to be served strictly one after the other.

        First those that workers have failed, together if they avoid the same workers. Then the
        tenants in their turns; within each, per priority: first those that have lost patience, as
        many of the oldest as surely get in and one at least, or else one that fits; then the rest,
        among whom a policy chooses freely. They are the pool as it stands, and hold until a request
        enters or leaves. Of each of these, those that only some workers can serve go first.

        Args:
            now: the time.
            capacity: engine requests that can be placed in all.
            gap_tokens: by how much the least loaded worker with a free slot is below the fullest.
            turns: whose first requests go before others, in slots by tenant; none: all are alike.
        """
        tiers = self._failed_tiers()
        capacity -= sum(request.slots for tier in tiers for request in tier)
        for peers in self._peers(turns):
            urgent = self._urgent(peers, now, capacity, gap_tokens)
            if urgent:
                tiers.append(Tier.of(list(self._at(urgent))))
            if len(urgent) < len(peers):
                tiers.append(self._rest(peers, urgent))
            if len(peers) < len(self._order):
                capacity -= sum(map(self._slots.__getitem__, peers))
        return [part for tier in tiers for part in tier.parts] if self._choosy else tiers

    def overdue(self, now: float, tiers: Sequence[Tier]) -> Request | None:
        """The first in order, if it has lost patience."""
        first = tiers[0][0] if tiers else None
        return first if first is not None and self._waited(first, now) >= 1 else None

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

    def _failed_tiers(self) -> list[Tier]:
        avoiding: dict[frozenset[str], list[Request]] = {}
        for _, request in sorted(self._failed.values(), key=itemgetter(0)):
            avoiding.setdefault(request.avoid, []).append(request)
        return [Tier.of(requests, avoid) for avoid, requests in avoiding.items()]

    def _peers(self, turns: Sequence[Offer] = ()) -> Iterator[_Places]:
        """Places of those of one turn and equal priority; usually that is all of them."""
        for line in self._lines(turns) if turns else (range(len(self._order)),):
            start = 0
            while start < len(line):
                priority = self._priority(line[start])
                stop = bisect_right(line, priority, start, key=self._priority)
                yield line[start:stop]
                start = stop

    def _lines(self, turns: Sequence[Offer]) -> Iterator[_Places]:
        """Places of those of each turn, and of all who are left over; none is empty."""
        lines: list[list[int]] = [[] for _ in range(len(turns) + 1)]
        line_of = {
            tenant: line for line, offer in zip(lines, turns, strict=False) for tenant in offer
        }
        left = {tenant: slots for offer in turns for tenant, slots in offer.items()}
        for place, request in enumerate(self._waiting):
            if left.get(request.tenant, 0) > 0:
                left[request.tenant] -= request.slots
                line_of[request.tenant].append(place)
            else:
                lines[-1].append(place)
        return filter(None, lines)

    def _priority(self, place: int) -> int:
        return self._order[place][0]

    def _at(self, places: _Places) -> Iterator[Request]:
        return map(self._waiting.__getitem__, places)

    def _urgent(self, peers: _Places, now: float, capacity: int, gap_tokens: int) -> _Places:
        """Places of those that go before their peers."""
        late = sum(1 for _ in takewhile(lambda r: self._waited(r, now) >= 1, self._at(peers)))
        if late:
            slots = list(accumulate(map(self._slots.__getitem__, peers[:late])))
            return peers[: max(1, bisect_right(slots, capacity))]
        for index, request in enumerate(self._at(peers)):
            if self._waited(request, now) < _WILLING:
                break
            if self._fits(request, now, gap_tokens):
                return peers[index : index + 1]
        return peers[:0]

    def _rest(self, peers: _Places, urgent: _Places) -> Tier:
        """Peers that are not urgent; usually all that wait, and then nothing is copied of them."""
        if len(peers) < len(self._order):
            first = set(urgent)
            return Tier.of([self._waiting[place] for place in peers if place not in first])
        if not urgent:
            columns = np.array(self._prompt_tokens), np.array(self._slots)
            return Tier(self._waiting, *columns, self._by_id)
        before, after = slice(urgent[0]), slice(urgent[-1] + 1, None)
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
