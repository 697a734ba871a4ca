"""Load of other clients on a worker without snapshots, from its engine's gauges.

Gauges are late, by seconds in data parallel; as the worker's state they would erase recent
dispatches. So only what exceeds this router's own highest count of the last ``LATE_S`` counts as
other clients' load.
"""

from collections import deque
from dataclasses import dataclass, field

LATE_S = 20.0


@dataclass(frozen=True, slots=True)
class Gauges:
    """An engine's own gauges, of all clients; ``kv_tokens``: KV capacity, 0 if unknown."""

    running: int
    waiting: int = 0
    kv_usage: float = 0.0
    kv_tokens: int = 0
    caches_prefixes: bool = True

    @property
    def load_tokens(self) -> int:
        return round(self.kv_usage * self.kv_tokens)


@dataclass(slots=True)
class ForeignLoad:
    """A low estimate; ``own_…``: this router's own highest counts since the last gauges."""

    gauges: Gauges | None = None
    requests: int = 0
    load_tokens: int = 0
    own_requests: int = 0
    own_tokens: int = 0
    _peaks: deque[tuple[float, int, int]] = field(default_factory=deque)

    def receive(self, gauges: Gauges, now_s: float) -> None:
        self._keep_peak(now_s)
        requests = max(peak[1] for peak in self._peaks)
        tokens = max(peak[2] for peak in self._peaks)
        self.gauges = gauges
        self.requests = max(0, gauges.running + gauges.waiting - requests)
        self.load_tokens = max(0, gauges.load_tokens - tokens) if self.requests else 0

    def suspend(self, now_s: float) -> None:
        """Stop while neither gauges are read nor own counts recorded."""
        self._keep_peak(now_s)
        self.clear()

    def _keep_peak(self, now_s: float) -> None:
        self._peaks.append((now_s, self.own_requests, self.own_tokens))
        self.own_requests = self.own_tokens = 0
        while self._peaks[0][0] < now_s - LATE_S:
            self._peaks.popleft()

    def clear(self) -> None:
        self.gauges = None
        self.requests = self.load_tokens = 0
