"""What others have running on a worker that tells no snapshots, by its engine's own gauges.

Gauges are late, by seconds in data parallel. Read as the worker's state they would erase what has
been sent meanwhile, so they are used for one thing only: what they show beyond the largest count
that this router itself had there in the last ``LATE_S`` is surely somebody else's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

LATE_S = 20.0


@dataclass(frozen=True, slots=True)
class Gauges:
    """A worker as its engine's own gauges show it, which may be many seconds late.

    Attributes:
        running: engine requests that run, anybody's.
        waiting: those that are queued.
        kv_usage: fraction of the KV memory in use.
        kv_tokens: tokens that fit into it, 0 where that is not told.
    """

    running: int
    waiting: int = 0
    kv_usage: float = 0.0
    kv_tokens: int = 0

    @property
    def load_tokens(self) -> int:
        """KV tokens in use."""
        return round(self.kv_usage * self.kv_tokens)


class ForeignLoad:
    """Somebody else's requests and KV tokens on one worker, rather too few than too many.

    Attributes:
        gauges: what was read last, None while they are not read.
        requests: engine requests that run or wait.
        load_tokens: their KV tokens; 0 where the engine does not tell the size of its KV cache.
    """

    def __init__(self) -> None:
        self.gauges: Gauges | None = None
        self.requests = 0
        self.load_tokens = 0
        self._own = (0, 0)
        self._peaks: deque[tuple[float, int, int]] = deque()

    def note_own(self, requests: int, load_tokens: int) -> None:
        """So many requests and tokens are, or just were, there by this router's own counts."""
        most_requests, most_tokens = self._own
        self._own = max(most_requests, requests), max(most_tokens, load_tokens)

    def receive(self, gauges: Gauges, now_s: float) -> None:
        """Gauges have been read."""
        self._keep_peak(now_s)
        requests = max(peak[1] for peak in self._peaks)
        tokens = max(peak[2] for peak in self._peaks)
        self.gauges = gauges
        self.requests = max(0, gauges.running + gauges.waiting - requests)
        self.load_tokens = max(0, gauges.load_tokens - tokens) if self.requests else 0

    def suspend(self, now_s: float) -> None:
        """Gauges are not read for a while, in which nothing is noted either."""
        self._keep_peak(now_s)
        self.clear()

    def _keep_peak(self, now_s: float) -> None:
        self._peaks.append((now_s, *self._own))
        self._own = (0, 0)
        while self._peaks[0][0] < now_s - LATE_S:
            self._peaks.popleft()

    def clear(self) -> None:
        """The gauges no longer count."""
        self.gauges = None
        self.requests = self.load_tokens = 0
