import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from router.access.key_ring import Key, Rate
from router.core.errors import KeyLimitError

NAMED = 64
OTHERS = "other"

_ROUNDING = 1e-9


@dataclass(slots=True)
class KeyCounts:
    """Requests of a key since the start; ``limited``: rejected, by the limit reached."""

    requests: int = 0
    under_way: int = 0
    limited: dict[str, int] = field(default_factory=lambda: {"concurrency": 0, "rate": 0})


@dataclass(slots=True)
class _Allowance:
    """Token bucket: requests left at time ``at_s``."""

    requests: float
    at_s: float


class KeyLimits:
    """Counts and limits the requests of all keys; ``unauthorized``: those without a valid key."""

    def __init__(self) -> None:
        self.unauthorized = 0
        self._under_way: dict[str, int] = {}
        self._allowances: dict[str, _Allowance] = {}
        # By key name; names beyond the first 64 share one entry.
        self.counts: dict[str, KeyCounts] = {}

    def name(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.counts.setdefault(self.label(key), KeyCounts())

    def label(self, key: str) -> str:
        known = key in self.counts or len(self.counts.keys() - {OTHERS}) < NAMED
        return key if known else OTHERS

    def enter(self, key: Key, now_s: float) -> None:
        """Count a new request, or raise KeyLimitError; ``leave`` must follow."""
        counts = self.counts.setdefault(self.label(key.name), KeyCounts())
        under_way = self._under_way.get(key.name, 0)
        if key.concurrency is not None and under_way >= key.concurrency:
            counts.limited["concurrency"] += 1
            raise KeyLimitError(f"{key.concurrency} requests of key {key.name!r} are under way", 1)
        if key.rate is not None and (wait_s := self._wait_s(key.name, key.rate, now_s)) > 0:
            counts.limited["rate"] += 1
            every = f"{key.rate.requests} requests in {key.rate.seconds:g} s"
            raise KeyLimitError(f"key {key.name!r} has made its {every}", math.ceil(wait_s))
        counts.requests += 1
        counts.under_way += 1
        self._under_way[key.name] = under_way + 1

    def leave(self, key: Key) -> None:
        self.counts[self.label(key.name)].under_way -= 1
        self._under_way[key.name] -= 1
        if not self._under_way[key.name]:
            del self._under_way[key.name]

    def _wait_s(self, name: str, rate: Rate, now_s: float) -> float:
        """Take a request from the bucket: 0, or seconds until the next one."""
        each_s = rate.seconds / rate.requests
        allowed = self._allowances.setdefault(name, _Allowance(rate.requests, now_s))
        grown = allowed.requests + (now_s - allowed.at_s) / each_s
        allowed.requests, allowed.at_s = min(float(rate.requests), grown), now_s
        if allowed.requests < 1 - _ROUNDING:
            return (1 - allowed.requests) * each_s
        allowed.requests -= 1
        return 0.0
