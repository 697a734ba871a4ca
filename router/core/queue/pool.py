"""The waiting pool of a group: bounded, ordered by priority, fair to old requests and tenants.

Times are on the caller's clock: seconds live, steps in a simulator.
"""

import math
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, takewhile
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from router.core.queue.fair_share import Offer, Weight
from router.core.queue.tier import Tier
from router.core.types import Request

_Key = tuple[int, float, int]
# Places in the order; a range of them costs nothing.
_Places = Sequence[int]

# Fractions of ``starvation``: from _WILLING on a request takes a gap that it fits into. Room for it
# is made from _ROOM_FROM on, in full at _ROOM_MADE. With more reluctance its need for a gap
# shrinks more slowly. Found by simulation, at 16 workers with and without look-ahead.
_WILLING = 0.2
_ROOM_FROM, _ROOM_MADE = 0.5, 0.9
_RELUCTANCE = 16


class Pool:
    """Waiting requests, lowest priority number first, then in order of arrival.

    Args:
        starvation: time after which a request precedes all others of its priority, since a policy
            might never choose an awkward one. Past a fifth of it, the oldest request that fits into
            the gap between the workers' loads goes first. Infinite: never.
        queue_timeout: time after which a request expires. Infinite: never.
    """

    def __init__(
        self, pool_size: int, starvation: float = math.inf, queue_timeout: float = math.inf
    ) -> None:
        self.configure(pool_size, starvation, queue_timeout)
        self._keys: dict[str, _Key] = {}
        self._by_id: dict[str, Request] = {}
        # Columns in the order of the keys:
        self._order: list[_Key] = []
        self._waiting: list[Request] = []
        self._prompt_tokens = array("q")
        self._slots = array("q")
        self._due = array("d")  # times at which first tokens are wanted
        self._serial = 0
        self.requests_of: Counter[str] = Counter()
        self.slots_of: Counter[str] = Counter()
        self._failed: dict[str, tuple[_Key, Request]] = {}
        self._choosy = 0  # number of requests that only some workers can serve

    def configure(self, pool_size: int, starvation: float, queue_timeout: float) -> None:
        self.pool_size = pool_size
        self._starvation = starvation
        self._queue_timeout = queue_timeout

    def __len__(self) -> int:
        return len(self._order) + len(self._failed)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._keys or request_id in self._failed

    def __getitem__(self, request_id: str) -> Request:
        failed = self._failed.get(request_id)
        return self._by_id[request_id] if failed is None else failed[1]

    def __iter__(self) -> Iterator[Request]:
        failed = (request for _, request in self._failed.values())
        return chain(failed, self._waiting)

    @property
    def full(self) -> bool:
        """A returning request may still enter."""
        return len(self) >= self.pool_size

    def add(self, request: Request) -> None:
        """Add a request; a returning one regains its place, one that a worker failed goes first."""
        self._serial += 1
        key = (request.priority, request.arrival_s, self._serial)
        self.requests_of[request.tenant] += 1
        self.slots_of[request.tenant] += request.slots
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
        self._due.insert(place, _due(request))

    def remove(self, request_id: str) -> Request | None:
        """None if it does not wait here."""
        if (key := self._keys.pop(request_id, None)) is not None:
            place = bisect_left(self._order, key)
            del self._order[place], self._waiting[place]
            del self._prompt_tokens[place], self._slots[place], self._due[place]
            request = self._by_id.pop(request_id)
        elif request_id in self._failed:
            request = self._failed.pop(request_id)[1]
        else:
            return None
        self.requests_of[request.tenant] -= 1
        self.slots_of[request.tenant] -= request.slots
        self._choosy -= bool(request.lacks)
        if not self.requests_of[request.tenant]:
            del self.requests_of[request.tenant], self.slots_of[request.tenant]
        return request

    def displaced_by(self, newcomer: str, weight: Weight) -> Request | None:
        """The request to evict from a full pool for a newcomer's tenant.

        Places are proportional to weight. It is the last request of the tenant with the most; None
        if the newcomer's would then have more.
        """
        if not self.requests_of.keys() - {newcomer}:
            return None
        most = max(self.requests_of, key=lambda each: self.requests_of[each] / weight(each))
        left, grown = self.requests_of[most] - 1, self.requests_of.get(newcomer, 0) + 1
        if most == newcomer or grown / weight(newcomer) > left / weight(most):
            return None
        return next((each for each in reversed(self._waiting) if each.tenant == most), None)

    def ahead_of(self, newcomer: Request) -> tuple[int, npt.NDArray[np.int64]]:
        """Slots, and each prompt's tokens, of those as urgent whose first tokens are due sooner."""
        stop = bisect_left(self._order, (newcomer.priority, math.inf, 0))
        sooner = np.array(self._due[:stop]) <= _due(newcomer)
        slots = np.array(self._slots[:stop])[sooner].sum()
        return int(slots), np.array(self._prompt_tokens[:stop])[sooner]

    def expired(self, now: float) -> list[Request]:
        return [each for each in self if now - each.arrival_s >= self.timeout_of(each)]

    def timeout_of(self, request: Request) -> float:
        own = request.queue_timeout_s
        return self._queue_timeout if own is None else min(own, self._queue_timeout)

    def tiers(
        self,
        now: float,
        capacity: int,
        gap_tokens: int,
        turns: Sequence[Offer] = (),
        *,
        aged: bool = False,
    ) -> list[Tier]:
        """Groups of requests to be served strictly one after the other.

        First come failed requests, grouped by the workers they avoid. Then come the tenants by
        turn, and within a turn the priorities. Within a priority, requests without patience come
        first: as many of the oldest as surely get in, at least one; or else one that fits. A policy
        chooses freely from the rest. In each group those that only some workers can serve precede.
        The tiers share the pool's data, and hold until a request enters or leaves.

        ``capacity``: engine requests that can be placed in all. ``gap_tokens``: load of the fullest
        worker less the least load with a free slot. ``turns``: slots by tenant; empty: all are
        equal. ``aged``: the policy weighs how long requests have waited. None comes first then, but
        the subgroup with the oldest request without patience.
        """
        tiers: list[Tier] = []
        if self._failed:
            avoiding: dict[frozenset[str], list[Request]] = {}
            for _, request in sorted(self._failed.values(), key=itemgetter(0)):
                avoiding.setdefault(request.avoid, []).append(request)
                capacity -= request.slots
            tiers = [Tier.of(requests, avoid) for avoid, requests in avoiding.items()]
        for peers in self._peers(turns):
            urgent = peers[:0] if aged else self._urgent(peers, now, capacity, gap_tokens)
            if urgent:
                tiers.append(Tier.of(list(self._at(urgent))))
            if len(urgent) < len(peers):
                tiers.append(self._rest(peers, urgent))
            if len(peers) < len(self._order):
                capacity -= sum(map(self._slots.__getitem__, peers))
        if not self._choosy:
            return tiers
        first = self.late_since(now) if aged else -math.inf
        return [part for tier in tiers for part in tier.parts(first)]

    def late_since(self, now: float) -> float:
        """Those that arrived up to then have no patience left."""
        return now - self._starvation

    def overdue(self, now: float, tiers: Sequence[Tier]) -> Request | None:
        first = tiers[0].requests[0] if tiers else None
        return first if first is not None and self._waited(first, now) >= 1 else None

    def late(self, request: Request, now: float) -> bool:
        """It has no patience left, or a worker has failed it."""
        return bool(request.avoid) or self._waited(request, now) >= 1

    def room_wanted(self, now: float, gap_tokens: int) -> list[tuple[str, float]]:
        """Requests to make room for, with the tokens due by now; 0 for those that fit."""
        wanted = []
        for peers in self._peers():
            if self._waited(self._waiting[peers[0]], now) < _ROOM_FROM:
                continue
            for request in takewhile(lambda r: self._waited(r, now) >= _ROOM_FROM, self._at(peers)):
                fits = self._fits(request, now, gap_tokens)
                share = (self._waited(request, now) - _ROOM_FROM) / (_ROOM_MADE - _ROOM_FROM)
                wanted.append((request.id, 0.0 if fits else request.load_tokens * min(1.0, share)))
        return wanted

    def _peers(self, turns: Sequence[Offer] = ()) -> Iterator[_Places]:
        """Places by turn and priority; usually a single range."""
        everyone = range(len(self._order))
        if not turns and everyone and self._order[0][0] == self._order[-1][0]:
            yield everyone
            return
        for line in self._lines(turns) if turns else (everyone,):
            start = 0
            while start < len(line):
                priority = self._priority(line[start])
                stop = bisect_right(line, priority, start, key=self._priority)
                yield line[start:stop]
                start = stop

    def _lines(self, turns: Sequence[Offer]) -> Iterator[_Places]:
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
        if self._waited(self._waiting[peers[0]], now) < _WILLING:
            return peers[:0]
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
        """Tier of the peers that are not urgent; usually the pool, without a copy."""
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
        return (now - request.arrival_s) / self._starvation

    def _fits(self, request: Request, now: float, gap_tokens: int) -> bool:
        """The gap needed falls from a request's size to 0."""
        needed = request.load_tokens * (1 - self._waited(request, now) ** _RELUCTANCE)
        return needed <= gap_tokens


def _due(request: Request) -> float:
    """Time at which its first token is wanted; infinite: at no time."""
    wanted_s = None if request.targets is None else request.targets.ttft_s
    return math.inf if wanted_s is None else request.arrival_s + wanted_s
