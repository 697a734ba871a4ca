"""The waiting pool of a group: bounded, ordered by urgency, fair to old requests and tenants.

Times are on the caller's clock: seconds live, steps in a simulator.
"""

import math
from array import array
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from heapq import merge
from itertools import accumulate, chain, islice, takewhile
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from router.core.queue.fair_share import Offer, Weight
from router.core.queue.tier import Tier
from router.core.types import Request

_Key = tuple[int, float, int]
# Places in the order; a range of them costs nothing.
_Places = Sequence[int]

# Longest wait over the mean wait that arrival order would give at this pool: room for choice.
_STRETCH = 2.0
# Shares of the bound: from _WILLING on a request takes a gap that it fits into. Room for it is made
# from _ROOM_FROM on, in full at _ROOM_MADE. In a pool so long that a large part of it has waited so
# long, both begin at _LAST. With more reluctance the gap that it needs shrinks later. Found by
# simulation, at 16 workers with and without look-ahead.
_WILLING = 0.2
_ROOM_FROM, _ROOM_MADE = 0.5, 0.9
_LAST, _LONG = 0.93, 4.0
_RELUCTANCE = 64
# One entry in so many is for requests that wait past the bound behind a more urgent band.
_HELD_BACK = 11
# Most that fall behind in a round: each costs some hundredths of a millisecond.
_FALL = 32
# Entries of late that tell of a rate.
_FEW = 8
_ALL = 1 << 62


class Pool:
    """Waiting requests, lowest priority number first, then in order of arrival.

    Of a priority, those whose first tokens can still come in time precede those that are late for
    their target or have none: two bands.

    Args:
        starvation: wait from which on a request precedes all others of its priority, since a policy
            might never choose an awkward one. In a long pool this bound is twice the wait that
            arrival order would give, so that choice remains. Infinite: none.
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
        self._due = array("d")  # times at which first tokens are wanted, of those in time
        self.newest = 0  # number of the request that came last
        self.requests_of: Counter[str] = Counter()
        self.slots_of: Counter[str] = Counter()
        self._failed: dict[str, tuple[_Key, Request]] = {}
        self._choosy = 0  # number of requests that only some workers can serve
        self.adapters: Counter[str] = Counter()  # requests by LoRA adapter, of those with one
        self._keys_of: dict[str, list[_Key]] = {}  # by tenant, in order
        # Entries per time, of late: a sum that decays, over the weight of the time it covers.
        self._entries = self._watched = 0.0
        self._noted = -math.inf
        self._others, self._favoured = 0, ""  # entries since a favoured one

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
        self.newest += 1
        due = due_s(request)
        key = (2 * request.priority + math.isinf(due), request.arrival_s, self.newest)
        self.requests_of[request.tenant] += 1
        self.slots_of[request.tenant] += request.slots
        self._choosy += bool(request.lacks)
        if request.adapter:
            self.adapters[request.adapter] += 1
        if request.avoid:
            self._failed[request.id] = key, request
            return
        self._insert(request, key, due)

    def _insert(self, request: Request, key: _Key, due: float) -> None:
        self._keys[request.id] = key
        insort(self._keys_of.setdefault(request.tenant, []), key)
        self._by_id[request.id] = request
        place = bisect_left(self._order, key)
        self._order.insert(place, key)
        self._waiting.insert(place, request)
        self._prompt_tokens.insert(place, request.prompt_tokens)
        self._slots.insert(place, request.slots)
        self._due.insert(place, due)

    def _take(self, key: _Key) -> Request:
        place = bisect_left(self._order, key)
        request = self._waiting[place]
        del self._order[place], self._waiting[place]
        del self._prompt_tokens[place], self._slots[place], self._due[place]
        del self._keys[request.id], self._by_id[request.id]
        keys = self._keys_of[request.tenant]
        del keys[bisect_left(keys, key)]
        return request

    def remove(self, request_id: str) -> Request | None:
        """None if it does not wait here."""
        if (key := self._keys.get(request_id)) is not None:
            request = self._take(key)
        elif request_id in self._failed:
            request = self._failed.pop(request_id)[1]
        else:
            return None
        self.requests_of[request.tenant] -= 1
        self.slots_of[request.tenant] -= request.slots
        self._choosy -= bool(request.lacks)
        if request.adapter:
            self.adapters -= Counter((request.adapter,))
        if not self.requests_of[request.tenant]:
            del self.requests_of[request.tenant], self.slots_of[request.tenant]
            self._keys_of.pop(request.tenant, None)
        return request

    def entered(self, requests: Sequence[Request], now: float) -> None:
        """Record what a round has sent to workers; the bound on waiting follows the rate of it."""
        if math.isinf(self._starvation):
            return
        kept = math.exp(min(0.0, self._noted - now) / self._starvation)
        self._noted = now
        self._watched = kept * self._watched + 1 - kept
        self._entries = kept * self._entries + len(requests) / self._starvation
        self._others += len(requests)
        if any(request.id == self._favoured for request in requests):
            self._others = 0

    @property
    def bound(self) -> float:
        """Wait from which on a request precedes all others of its priority."""
        return max(self._starvation, _STRETCH * self._mean_wait)

    @property
    def _mean_wait(self) -> float:
        """In order of arrival, in a pool as it is now; 0 while too few have entered to tell."""
        told = self._entries * self._starvation >= _FEW
        return len(self) * self._watched / self._entries if told else 0.0

    def _from(self, share: float) -> float:
        """Wait from which on something is done for a request: this share of the bound, or later."""
        return max(share * self.bound, min(_LAST * self.bound, _LONG * self._mean_wait))

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
        due = due_s(newcomer)
        stop = bisect_left(self._order, (2 * newcomer.priority + math.isinf(due), math.inf, 0))
        sooner = np.array(self._due[:stop]) <= due
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
        choice: int = _ALL,
        by_adapter: bool = False,
    ) -> list[Tier]:
        """Groups of requests to be served strictly one after the other.

        First come failed requests, grouped by the workers they avoid. Then come the tenants by
        turn, and within a turn the priorities, each in two bands. Within a band, requests past the
        bound come first: those far past it, as many of the oldest as surely get in, at least one;
        or else the oldest that fits. One entry in eleven is for requests past the bound of less
        urgent bands. A policy chooses freely from the rest. In each group those that only some
        workers can serve precede. The tiers share the pool's data, and hold until a request enters
        or leaves.

        ``capacity``: engine requests that can be placed in all. ``gap_tokens``: load of the fullest
        worker less the least load with a free slot. ``turns``: slots by tenant; empty: all are
        equal. ``aged``: the policy weighs how long requests have waited. None comes first then, but
        the subgroup with the oldest request past the bound. ``choice``: a policy chooses from so
        many of the oldest, or from all where some workers cannot serve all. ``by_adapter``: each
        group has requests of one LoRA adapter, or of none.
        """
        tiers: list[Tier] = []
        if self._failed:
            avoiding: dict[frozenset[str], list[Request]] = {}
            for _, request in sorted(self._failed.values(), key=itemgetter(0)):
                avoiding.setdefault(request.avoid, []).append(request)
                capacity -= request.slots
            tiers = [Tier.of(requests, avoid) for avoid, requests in avoiding.items()]
        self._fall_behind(now)
        bound = self.bound
        choosy = by_adapter or self._choosy > 0
        bands = list(self._peers(turns, _ALL if choosy else choice))
        if len(bands) > 1 and self._others >= _HELD_BACK - 1:
            tiers += self._favour(bands, now - bound)
        for peers in bands:
            urgent = peers[:0] if aged else self._urgent(peers, now, capacity, gap_tokens)
            if urgent:
                tiers.append(Tier.of(list(self._at(urgent))))
            if len(urgent) < len(peers):
                tiers.append(self._rest(peers, urgent))
            if len(peers) < len(self._order):
                capacity -= sum(map(self._slots.__getitem__, peers))
        if not choosy:
            return tiers
        first = now - bound if aged else -math.inf
        return [part for tier in tiers for part in tier.parts(first, by_adapter=by_adapter)]

    def _fall_behind(self, now: float) -> None:
        """Put those whose target has passed behind those that can be in time, some a round."""
        for place in np.flatnonzero(np.array(self._due) < now)[:_FALL][::-1].tolist():
            band, arrival, serial = key = self._order[place]
            self._insert(self._take(key), (band + 1, arrival, serial), math.inf)

    def _favour(self, bands: list[_Places], late_since: float) -> Iterator[Tier]:
        """Take out the oldest request past the bound of the less urgent bands."""
        first = self._band(bands[0][0])
        lower = [i for i, peers in enumerate(bands) if self._band(peers[0]) > first]
        oldest = [(self._waiting[bands[i][0]].arrival_s, i) for i in lower]
        for _, i in sorted(one for one in oldest if one[0] <= late_since)[:1]:
            request = self._waiting[bands[i][0]]
            bands[i] = bands[i][1:]
            self._favoured = request.id
            yield Tier.of([request])

    def late(self, request: Request, now: float) -> bool:
        """It has waited as long as a short pool lets it, or a worker has failed it."""
        return bool(request.avoid) or now - request.arrival_s >= self._starvation

    def room_wanted(self, now: float, gap_tokens: int, most: int = _ALL) -> list[tuple[str, float]]:
        """Requests to make room for, so many of each priority, with the tokens due by now.

        0 for those that fit.
        """
        bound = self.bound
        wanted, start = [], self._from(_ROOM_FROM)
        made = max(start, self._from(_ROOM_MADE), 1e-9)
        for peers in self._peers((), most):
            for request in takewhile(lambda r: now - r.arrival_s >= start, self._at(peers)):
                fits = _fits(request, (now - request.arrival_s) / bound, gap_tokens)
                share = (now - request.arrival_s - start) / (made - start) if made > start else 1.0
                wanted.append((request.id, 0.0 if fits else request.load_tokens * min(1.0, share)))
        return wanted

    def _peers(self, turns: Sequence[Offer], choice: int) -> Iterator[_Places]:
        """Places by turn and priority, so many of each; usually a single range."""
        everyone = range(len(self._order))
        if not turns and everyone and self._order[0][0] == self._order[-1][0]:
            yield everyone[:choice]
            return
        for line in self._lines(turns, choice) if turns else (everyone,):
            start = 0
            while start < len(line):
                priority = self._band(line[start])
                stop = bisect_right(line, priority, start, key=self._band)
                yield line[start : min(stop, start + choice)]
                start = stop

    def _lines(self, turns: Sequence[Offer], choice: int) -> Iterator[_Places]:
        """Places by turn, so many of each, the others' last."""
        taken: Counter[str] = Counter()
        for offer in turns:
            left = dict(offer)
            keys: Iterable[_Key] = merge(*(self._keys_of.get(tenant, ()) for tenant in offer))
            line = []
            for place in map(partial(bisect_left, self._order), islice(keys, choice)):
                request = self._waiting[place]
                if left[request.tenant] > 0:
                    left[request.tenant] -= request.slots
                    taken[request.tenant] += 1
                    line.append(place)
            yield line
        rest = merge(*(keys[taken[tenant] :] for tenant, keys in self._keys_of.items()))
        yield [bisect_left(self._order, key) for key in islice(rest, choice)]

    def _band(self, place: int) -> int:
        return self._order[place][0]

    def _at(self, places: _Places) -> Iterator[Request]:
        return map(self._waiting.__getitem__, places)

    def _urgent(self, peers: _Places, now: float, capacity: int, gap_tokens: int) -> _Places:
        bound, willing = self.bound, self._from(_WILLING)
        late = sum(1 for _ in takewhile(lambda r: now - r.arrival_s >= bound, self._at(peers)))
        if late:
            slots = list(accumulate(map(self._slots.__getitem__, peers[:late])))
            return peers[: max(1, bisect_right(slots, capacity))]
        for index, request in enumerate(self._at(peers)):
            if now - request.arrival_s < willing:
                break
            if _fits(request, (now - request.arrival_s) / bound, gap_tokens):
                return peers[index : index + 1]
        return peers[:0]

    def _rest(self, peers: _Places, urgent: _Places) -> Tier:
        """Tier of the peers that are not urgent; the pool, without a copy, if that is all."""
        if len(peers) == len(self._order) and not urgent:
            columns = np.array(self._prompt_tokens), np.array(self._slots)
            return Tier(self._waiting, *columns, self._by_id)
        first = set(urgent)
        return Tier.of([self._waiting[place] for place in peers if place not in first])


def _fits(request: Request, waited: float, gap_tokens: int) -> bool:
    """The gap needed falls from a request's size to 0; ``waited``: in bounds."""
    return request.load_tokens * (1 - waited**_RELUCTANCE) <= gap_tokens


def due_s(request: Request) -> float:
    """Time at which its first token is wanted; infinite: at no time."""
    wanted_s = None if request.targets is None else request.targets.ttft_s
    return math.inf if wanted_s is None else request.arrival_s + wanted_s
