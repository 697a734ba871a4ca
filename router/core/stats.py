"""Plain counters of the hot path; ``metrics.render`` renders them at a scrape."""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from router.core.targets import Verdict
from router.core.types import Outcome

LATENCY_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
DECISION_BOUNDS_S = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 0.1)
REQUEST_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
MOVES_BOUNDS = (0, 10, 100, 300, 1e3, 3e3, 1e4, 3e4, 1e5, 3e5, 1e6)
OBJECTIVE_BOUNDS = (1e2, 3e2, 1e3, 3e3, 1e4, 3e4, 1e5, 3e5, 1e6, 3e6, 1e7, 1e8, 1e9)


class Histogram:
    """Counts per bucket, upper bounds inclusive; the last bucket is unbounded."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(slots=True)
class TokenStats:
    """Times at which tokens of streamed answers were passed on.

    Attributes:
        itl_s: time between two chunks of one stream; tokens that come together are one chunk.
        tpot_s: time per token from a stream's first token to its last, observed at its end.
    """

    itl_s: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS_S))
    tpot_s: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS_S))


@dataclass(slots=True)
class GroupStats:
    """Counters of one group since the start.

    Attributes:
        outcomes: requests by outcome, including those that never left the pool.
        unserved: requests rejected because no worker was live.
        returned: dispatches that came back before their first byte.
        unreturned: failures passed on to the client, since the retry budget was spent.
        held_rounds: rounds whose requests wait for more, since their prompts make all workers wait.
        estimated: assignments of requests whose prompt no engine had counted yet.
        passed: prompts that decode workers computed, since that was sooner.
        fallbacks: requests served whole, since prefill workers were missing or failed.
        repeated_prefills: prompts computed again, since their KV was gone.
        lost_prefills: prompts computed twice, since the address of their KV was missing.
        expired_kv_tokens: KV tokens that prefill workers kept in vain.
        verdicts: requests with targets, by whether they met them.
        service_s: time from dispatch to the answer's first byte, or to the end of the prefill.
        decision_s: duration of a round, look-ahead included.
    """

    outcomes: defaultdict[Outcome, int] = field(default_factory=lambda: defaultdict(int))
    rejected: int = 0
    unserved: int = 0
    assigned: int = 0
    returned: int = 0
    unreturned: int = 0
    beside: int = 0
    rounds: int = 0
    held_rounds: int = 0
    policy_errors: int = 0
    estimated: int = 0
    passed: int = 0
    fallbacks: int = 0
    repeated_prefills: int = 0
    lost_prefills: int = 0
    expired_kv_tokens: int = 0
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    pool_wait_s: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS_S))
    service_s: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS_S))
    ttft_s: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS_S))
    decision_s: Histogram = field(default_factory=lambda: Histogram(DECISION_BOUNDS_S))
    decision_candidates: Histogram = field(default_factory=lambda: Histogram(REQUEST_BOUNDS))
    decision_admitted: Histogram = field(default_factory=lambda: Histogram(REQUEST_BOUNDS))
    decision_objective: Histogram = field(default_factory=lambda: Histogram(OBJECTIVE_BOUNDS))
    decision_moves: Histogram = field(default_factory=lambda: Histogram(MOVES_BOUNDS))
    tokens: TokenStats = field(default_factory=TokenStats)


_SLICES = 10


class Recent:
    """Count over a sliding window, which moves by a tenth of its length.

    An event counts for nine to ten tenths of the window. The clock is monotonic.
    """

    def __init__(self, window_s: float) -> None:
        self._slice_s = window_s / _SLICES
        self._counts = [0] * _SLICES
        self._newest = 0

    def add(self, now_s: float) -> None:
        self._forget(now_s)
        self._counts[self._newest % _SLICES] += 1

    def count(self, now_s: float) -> int:
        self._forget(now_s)
        return sum(self._counts)

    def clear(self) -> None:
        self._counts = [0] * _SLICES

    def _forget(self, now_s: float) -> None:
        newest = int(now_s / self._slice_s)
        if newest <= self._newest:
            return
        for number in range(max(self._newest, newest - _SLICES) + 1, newest + 1):
            self._counts[number % _SLICES] = 0
        self._newest = newest
