"""WAIT and Nested WAIT as printed: running requests pause (arXiv 2504.11320, Algorithms 1 and 2).

For simulated engines, to show the cost: with fewer than one arrival per step, a token takes about
the time between arrivals. The printed conditions hold, with two corrections. Requests that end
before the last segment are released, since engines end requests by themselves; Algorithm 2 releases
only those of the last. A type or segment that has not moved for half a minute goes on until the
next arrival: as printed, the last requests of a day would never end.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from engine_patches.admission.ledger import Ledger, Lengths, Memory, Ticket, engine_order
from engine_patches.admission.protocol import Verdict

WARNING = (
    "strict: requests that run pause until enough new ones wait, which makes them many times "
    "slower at usual loads; leave it out to cap entries without pauses"
)
LONGEST_PAUSE_S = 30.0

_Place = tuple[int, int]


class Pauses:
    """Paused types or segments, each with its start; released until an arrival if too long."""

    def __init__(self) -> None:
        self._since_s: dict[int, float] = {}
        self._released: dict[int, int] = {}

    def see(self, present: Mapping[int, int], now_s: float) -> None:
        """Update the types or segments present, with the arrivals of each so far."""
        self._since_s = {what: self._since_s.get(what, now_s) for what in present}
        self._released = {
            what: arrivals
            for what, arrivals in present.items()
            if self._released.get(what) == arrivals
            or now_s >= self._since_s[what] + LONGEST_PAUSE_S
        }

    def released(self, what: int) -> bool:
        """Whether it goes on although its condition does not hold."""
        return what in self._released

    def moved(self, what: int, now_s: float) -> None:
        self._since_s[what] = now_s

    def wake_s(self) -> float | None:
        since_s = [since for what, since in self._since_s.items() if what not in self._released]
        return min(since_s) + LONGEST_PAUSE_S if since_s else None


class StrictWait:
    """Algorithm 1: requests of a type go on and enter, n_j of each stage, once n_j of it wait.

    Args:
        thresholds: n_j by type; the last also holds for all further types.
        lengths: determines the types; None: tickets carry their types.
    """

    name = "wait"
    follower = None
    key = staticmethod(engine_order)

    def __init__(self, thresholds: Sequence[int], lengths: Lengths | None = None) -> None:
        self.lengths = lengths
        self._thresholds = tuple(thresholds)
        self._pauses = Pauses()

    def threshold(self, kind: int) -> int:
        return self._thresholds[min(kind, len(self._thresholds) - 1)]

    def admit(self, ledger: Ledger, memory: Memory, now_s: float) -> Verdict:
        present = {*ledger.waiting_kinds, *(ticket.kind for ticket in ledger.running.values())}
        self._pauses.see({kind: ledger.arrivals[kind] for kind in sorted(present)}, now_s)
        limits = {
            kind: self.threshold(kind)
            for kind in present
            if ledger.waiting_kinds.get(kind, 0) >= self.threshold(kind)
            or self._pauses.released(kind)
        }
        stages = {
            id_: (ticket.kind, ledger.generated_tokens(ticket))
            for id_, ticket in ledger.running.items()
        }
        run = _batch(stages, {place: limits.get(place[0], 0) for place in stages.values()})
        admitted = list(_entering(ledger.waiting, limits, memory))
        for kind in {ledger.running[id_].kind for id_ in run} | {t.kind for t in admitted}:
            self._pauses.moved(kind, now_s)
        return Verdict(admitted, run, self._pauses.wake_s())

    def admissible_blocks(self, ledger: Ledger, memory: Memory) -> int:
        return memory.room()


class StrictNestedWait:
    """Algorithm 2: segment k goes on, n_k of each stage, if n_k wait there and k-1 goes on.

    Args:
        thresholds: n_k, one for each segment.
        segments: output lengths at which the segments end, except the last, which has no end.
    """

    name = "nested_wait"
    lengths = None
    follower = None
    key = staticmethod(engine_order)

    def __init__(self, thresholds: Sequence[int], segments: Sequence[int]) -> None:
        assert len(thresholds) == len(segments) + 1, "one threshold for each segment"
        self._thresholds = tuple(thresholds)
        self._segments = tuple(segments)
        self._pauses = Pauses()

    def admit(self, ledger: Ledger, memory: Memory, now_s: float) -> Verdict:
        places = {}
        for id_, ticket in ledger.running.items():
            stage = ledger.generated_tokens(ticket)
            places[id_] = (bisect_right(self._segments, stage), stage)
        present = {segment for segment, _ in places.values()} | ({0} if ledger.waiting else set())
        arrivals = sum(ledger.arrivals.values())
        self._pauses.see(dict.fromkeys(sorted(present), arrivals), now_s)
        limits = self._limits(len(ledger.waiting), Counter(places.values()))
        run = _batch(places, {place: limits.get(place[0], 0) for place in places.values()})
        quota = dict.fromkeys(ledger.waiting_kinds, len(ledger.waiting))
        admitted = list(_entering(ledger.waiting, quota, memory))[: limits.get(0, 0)]
        for segment in {places[id_][0] for id_ in run} | ({0} if admitted else set()):
            self._pauses.moved(segment, now_s)
        return Verdict(admitted, run, self._pauses.wake_s())

    def admissible_blocks(self, ledger: Ledger, memory: Memory) -> int:
        return memory.room()

    def _limits(self, waiting: int, counts: Mapping[_Place, int]) -> dict[int, int]:
        """Thresholds of segments up to the first unmet one, and of those released."""
        limits, met = {}, True
        entries = [waiting, *(counts.get((k, s), 0) for k, s in enumerate(self._segments, 1))]
        for k, (entered, threshold) in enumerate(zip(entries, self._thresholds, strict=True)):
            met = met and entered >= threshold
            if met or self._pauses.released(k):
                limits[k] = threshold
        return limits


def _batch(stages: dict[str, _Place], limits: dict[_Place, int]) -> frozenset[str]:
    """From each place as many as its limit, in the order of entering."""
    left = dict(limits)
    chosen = []
    for id_, place in stages.items():
        if left[place]:
            left[place] -= 1
            chosen.append(id_)
    return frozenset(chosen)


def _entering(waiting: Sequence[Ticket], quota: dict[int, int], memory: Memory) -> Iterator[Ticket]:
    """Up to the quota of each kind, in order, while slots and memory are free."""
    left, slots, room = dict(quota), memory.slots_free, memory.room()
    for ticket in waiting:
        if not left.get(ticket.kind):
            continue
        blocks = memory.need(ticket)
        if not slots or blocks > room:
            return
        left[ticket.kind] -= 1
        slots -= 1
        room -= blocks
        yield ticket
