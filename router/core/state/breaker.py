"""Circuit breaker per worker: closed, open, half-open trials, slow start.

Times are on the caller's clock. An engine that fails at once looks idle and would attract every
request (a black hole). So failures in a row, or a large share of failures, eject it. Only a limited
share of a group's workers may be out, and the last one stays.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from router.core.stats import Recent

# Requests in the window below which the share of failures has no meaning.
LEAST_JUDGED = 10
MOST_OPEN_S = 60.0


class BreakerState(Enum):
    """Requests that a worker receives: all, trials, or none."""

    CLOSED = "closed"
    HALF_OPEN = "half_open"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """Limits for ejection and return of a worker, as ``router.config`` declares them.

    ``breaker_window_s`` also counts from an ejection: after as long without another the duration
    starts over.
    """

    breaker_failures: int = 5
    breaker_share: float = 0.5
    breaker_window_s: float = 30.0
    breaker_open_s: float = 5.0
    breaker_trials: int = 2
    slow_start_s: float = 10.0
    max_ejected: float = 0.5


DEFAULTS = BreakerSettings()


class Breaker:
    """Breaker of one worker; it identifies requests by the ids of their attempts.

    ``waived``: it holds nothing back, since no other worker is left. ``calm``: it holds nothing
    back, now or later without a new failure.
    """

    def __init__(self, settings: BreakerSettings = DEFAULTS) -> None:
        self.state = BreakerState.CLOSED
        self.waived = False
        self.calm = True
        self._settings = settings
        self._good = Recent(settings.breaker_window_s)
        self._bad = Recent(settings.breaker_window_s)
        self._bad_in_a_row = 0
        self._openings = 0
        self._out_until_s = self._closed_s = -math.inf
        self._trials: set[str] = set()
        self._passed = 0
        self._fullness = 1.0
        self._resting_s = 0.0
        self._rests_until_s = -math.inf
        self._was_up = self._fell = False

    @property
    def starting(self) -> bool:
        return self.state is BreakerState.CLOSED and self._fullness < 1

    @property
    def ejected(self) -> bool:
        return self.state is BreakerState.OPEN and not self.waived

    def look(self, now_s: float) -> None:
        self._resting_s = max(0.0, self._rests_until_s - now_s)
        if self.state is BreakerState.OPEN and now_s >= self._out_until_s:
            self.state = BreakerState.HALF_OPEN
            self._passed = 0
        back_s, slow_s = now_s - self._closed_s, self._settings.slow_start_s
        self._fullness = 1.0 if back_s >= slow_s else max(0.0, back_s / slow_s)
        closed = self.state is BreakerState.CLOSED
        self.calm = closed and self._fullness >= 1 and not self._resting_s

    def capacity(self, free: int, slots: int, requests: int) -> int:
        if self._resting_s:
            return 0
        if self.waived or self.calm:
            return free
        match self.state:
            case BreakerState.OPEN:
                return 0
            case BreakerState.HALF_OPEN:
                let_in = self._settings.breaker_trials - self._passed - len(self._trials)
            case _:
                let_in = math.ceil(self._fullness * slots or 1) - requests
        return min(free, max(0, let_in))

    # Results of requests.

    def sent(self, attempt: str) -> None:
        if self.state is BreakerState.HALF_OPEN:
            self._trials.add(attempt)

    def gone(self, attempt: str) -> None:
        self._trials.discard(attempt)

    def succeeded(self, attempt: str, now_s: float) -> None:
        match self.state:
            case BreakerState.CLOSED:
                self._good.add(now_s)
                self._bad_in_a_row = 0
            case BreakerState.HALF_OPEN if attempt in self._trials:
                self._trials.discard(attempt)
                self._passed += 1
                if self._passed >= self._settings.breaker_trials:
                    self._close(now_s)
            case _:  # sent before the ejection
                pass

    def failed(self, attempt: str, now_s: float, *, suspect: bool, may_open: bool) -> bool:
        """Record a failed request; true if that ejects the worker.

        ``suspect``: another worker failed it before, so this one may be innocent. ``may_open``:
        enough others are left.
        """
        trial = attempt in self._trials
        self._trials.discard(attempt)
        if self.state is BreakerState.OPEN or (suspect and not trial):
            return False
        if self.state is BreakerState.HALF_OPEN:
            if not may_open:
                self._close(now_s)
                return False
        else:
            self._bad.add(now_s)
            self._bad_in_a_row += 1
            bad, share = self._bad.count(now_s), self._settings.breaker_share
            judged = bad + self._good.count(now_s)
            often = judged >= LEAST_JUDGED and bad >= share * judged
            in_a_row = self._bad_in_a_row >= self._settings.breaker_failures
            if not (may_open and (often or in_a_row)):
                return False
        self._open(now_s)
        return True

    def rest(self, now_s: float, seconds: float) -> None:
        self._rests_until_s = max(self._rests_until_s, now_s + seconds)
        self.look(now_s)

    # Health of the worker.

    def fell(self) -> None:
        """Its engine failed its health checks: the statistics are outdated."""
        self._fell = self._was_up

    def rose(self, now_s: float) -> None:
        """Record that it may be used; an engine that was gone starts slowly."""
        self._was_up = True
        if self._fell:
            self._fell = False
            self._trials.clear()
            self._close(now_s)

    def _open(self, now_s: float) -> None:
        closed, closed_s = self.state is BreakerState.CLOSED, now_s - self._closed_s
        if closed and closed_s > self._settings.breaker_window_s:
            self._openings = 0
        open_s = min(MOST_OPEN_S, self._settings.breaker_open_s * 2.0 ** min(self._openings, 60))
        self._openings += 1
        self._out_until_s = now_s + open_s
        self.state = BreakerState.OPEN
        self.calm = False
        self._trials.clear()

    def _close(self, now_s: float) -> None:
        self.state = BreakerState.CLOSED
        self._closed_s = now_s
        self._bad_in_a_row = 0
        self._good.clear()
        self._bad.clear()
        self.look(now_s)


def may_open(others: Collection[Breaker], max_ejected: float) -> bool:
    """True if a worker may be ejected beside the other live ones of its group."""
    out = 1 + sum(other.state is not BreakerState.CLOSED for other in others)
    live = 1 + len(others)
    return out < live and out <= max_ejected * live


def review(breakers: Collection[Breaker], now_s: float) -> None:
    """Update the breakers of a group's live workers.

    A group is never closed as a whole: neither by ejections of all that are left, nor by a slow
    start of all.
    """
    for breaker in breakers:
        breaker.look(now_s)
    none_left = all(breaker.state is BreakerState.OPEN for breaker in breakers)
    settled = [each for each in breakers if each.state is BreakerState.CLOSED and not each.starting]
    for breaker in breakers:
        breaker.waived = none_left or (breaker.starting and not settled)
