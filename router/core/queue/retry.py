"""Limits of a request's attempts: retried answers, their number, and time limits.

Lost connections need no budget: their worker is down at once. Answers do: when all engines are
overloaded, each rejects what another one rejected.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from router.core.stats import Recent

# Cap on an engine's Retry-After: it may have sent the same to all its clients.
MOST_REST_S = 5.0
WINDOW_S = 10.0

_REQUEST_TIMEOUT, _TOO_MANY_REQUESTS = 408, 429
_SERVER_ERROR, _NOT_IMPLEMENTED, _UNAVAILABLE = 500, 501, 503


def faults(status: int) -> bool:
    """True if an answer counts against its worker; 501: no engine of the kind can do it."""
    return status >= _SERVER_ERROR and status != _NOT_IMPLEMENTED


def may_differ_elsewhere(status: int) -> bool:
    """True if another worker may answer better."""
    return faults(status) or status in (_REQUEST_TIMEOUT, _TOO_MANY_REQUESTS)


def rest_s(status: int, retry_after: bytes) -> float:
    """Pause in seconds that an answer requests; 0: none."""
    if status not in (_TOO_MANY_REQUESTS, _UNAVAILABLE) or not retry_after.isdigit():
        return 0.0
    return min(float(retry_after), MOST_REST_S)


class RetryBudget:
    """Retries as a share of requests in ``WINDOW_S``, plus a fixed rate."""

    def __init__(self, retry_budget: float, retry_min_per_s: float) -> None:
        self.configure(retry_budget, retry_min_per_s)
        self._requests = Recent(WINDOW_S)
        self._retries = Recent(WINDOW_S)

    def configure(self, retry_budget: float, retry_min_per_s: float) -> None:
        self._retry_budget = retry_budget
        self._always = retry_min_per_s * WINDOW_S

    def earn(self, now_s: float) -> None:
        self._requests.add(now_s)

    def spend(self, now_s: float) -> bool:
        allowed = self._retry_budget * self._requests.count(now_s) + self._always
        if self._retries.count(now_s) + 1 > allowed:
            return False
        self._retries.add(now_s)
        return True


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Time limits, as ``router.config`` declares them; a whole answer's first byte is its end."""

    request_timeout_s: float | None = None
    first_byte_timeout_s: float | None = None
    stream_idle_timeout_s: float | None = None

    def within(self, timeout_s: float | None) -> Deadlines:
        if timeout_s is None:
            return self
        own_s = self.request_timeout_s
        return replace(
            self, request_timeout_s=min(timeout_s, timeout_s if own_s is None else own_s)
        )
