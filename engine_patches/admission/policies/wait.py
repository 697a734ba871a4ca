"""WAIT, live: per step, no more requests of a type enter than arrive (arXiv 2504.11320).

Algorithm 1's thresholds without its pauses. At most n_j requests of a type enter in a step. n_j
satisfies (11), d0 + d1 M <= n_j / lambda_j: a step's arrivals. So the stages of the decode fill
evenly, and no wave of requests grows together. Running requests always go on: paused as printed,
until n_j new ones wait, each token would take a request's 1 / lambda_j.

Rates and step times are measured as they change, as in (15). Memory is kept free as in
``headroom``.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from engine_patches.admission.ledger import Ledger, Lengths, Memory, engine_order
from engine_patches.admission.policies.headroom import Reserve, admit_below
from engine_patches.admission.protocol import Verdict

RATE_MEMORY_S = 10.0
STEP_MEMORY = 32


class MeanStepTime:
    """Mean over about ``STEP_MEMORY`` steps, in seconds; 0 before the first."""

    def __init__(self) -> None:
        self.mean_s = 0.0
        self._measured = 0
        self._steps = 0
        self._at_s = 0.0

    def see(self, ledger: Ledger, now_s: float) -> None:
        """Update before a step is scheduled; time without running requests does not count."""
        steps = ledger.steps - self._steps
        if steps and ledger.running:
            self._measured = min(self._measured + steps, STEP_MEMORY)
            weight = min(1.0, steps / self._measured)
            self.mean_s += weight * ((now_s - self._at_s) / steps - self.mean_s)
        self._steps, self._at_s = ledger.steps, now_s


class Rates:
    """Events per second of each type, mainly in the last ``RATE_MEMORY_S``."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._at_s = 0.0
        self._counted: dict[int, int] = {}
        self._faded: dict[int, float] = {}

    def see(self, totals: Mapping[int, int], now_s: float) -> None:
        """``totals``: events so far, by type."""
        if self._since_s is None:
            self._since_s = self._at_s = now_s
        fade = math.exp((self._at_s - now_s) / RATE_MEMORY_S)
        self._at_s = now_s
        for kind, count in totals.items():
            new = count - self._counted.get(kind, 0)
            self._counted[kind] = count
            self._faded[kind] = self._faded.get(kind, 0.0) * fade + new

    def per_s(self, kinds: Iterable[int]) -> float:
        """Rate of some types; the rest of the first second counts as empty."""
        seen_s = max(1.0, self._at_s - (self._since_s or 0.0))
        faded = math.fsum(self._faded.get(kind, 0.0) for kind in kinds)
        return faded / -math.expm1(-seen_s / RATE_MEMORY_S) / RATE_MEMORY_S


class Pace:
    """Number of requests to admit in a step so that it absorbs arrivals and a backlog drains.

    The least integer above rate * seconds of a step. The rate is that of ends if it is higher than
    that of arrivals, so that a backlog drains no slower once arrivals cease.
    """

    def __init__(self) -> None:
        self._step_time = MeanStepTime()
        self._arrivals = Rates()
        self._ends = Rates()

    def see(self, ledger: Ledger, now_s: float) -> None:
        self._step_time.see(ledger, now_s)
        self._arrivals.see(ledger.arrivals, now_s)
        self._ends.see(ledger.ended, now_s)

    def entries(self, kinds: Iterable[int]) -> int:
        arrivals, ends = self._arrivals.per_s(kinds), self._ends.per_s(kinds)
        return 1 + int(max(arrivals, ends) * self._step_time.mean_s)


class Wait:
    """At most n_j entries of each type in a step, below (1 - w) C.

    Args:
        reserve: w.
        thresholds: n_j by type; the last also holds for all further types; empty: measured.
        hold_s: longest time to hold a request of a type until n_j of it wait; 0: never.
        lengths: determines the types; None: tickets carry their types.
    """

    name = "wait"
    follower = None
    key = staticmethod(engine_order)

    def __init__(
        self,
        reserve: Reserve,
        thresholds: Sequence[int] = (),
        hold_s: float = 0.0,
        lengths: Lengths | None = None,
    ) -> None:
        self.lengths = lengths
        self._reserve = reserve
        self._thresholds = tuple(thresholds)
        self._hold_s = hold_s
        self._pace = Pace()

    def threshold(self, kind: int) -> int:
        if self._thresholds:
            return self._thresholds[min(kind, len(self._thresholds) - 1)]
        return self._pace.entries((kind,))

    def admit(self, ledger: Ledger, memory: Memory, now_s: float) -> Verdict:
        self._pace.see(ledger, now_s)
        quota, wake_s = {}, math.inf
        for kind, waiting in ledger.waiting_kinds.items():
            threshold = self.threshold(kind)
            until_s = -math.inf
            if waiting < threshold and self._hold_s:
                first_s = min(one.arrived_s for one in ledger.waiting if one.kind == kind)
                until_s = first_s + self._hold_s
            if until_s > now_s:
                wake_s = min(wake_s, until_s)
            else:
                quota[kind] = min(threshold, waiting)
        limit = self._reserve.limit_blocks(ledger, memory)
        admitted = admit_below(limit, ledger, memory, quota)
        return Verdict(admitted, wake_s=wake_s if wake_s < math.inf else None)

    def admissible_blocks(self, ledger: Ledger, memory: Memory) -> int:
        return self._reserve.room(ledger, memory)
