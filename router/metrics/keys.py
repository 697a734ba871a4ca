"""Metrics by API key name: at most 64 names, the rest summed as ``other``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from router.access.key_limits import KeyCounts, KeyLimits
from router.core.rounds.decider import Decider
from router.metrics.rows import Row


@dataclass(frozen=True, slots=True)
class KeyReading:
    """A key at the moment of a scrape, over all groups: waiting requests and slots in use."""

    counts: KeyCounts
    waiting: int
    slots: int


KEY_ROWS: Sequence[Row[KeyReading]] = (
    Row(
        "evenstep_key_requests_total",
        "Requests that were let in by an API key.",
        lambda key: key.counts.requests,
    ),
    Row(
        "evenstep_key_requests",
        "Requests of an API key that are under way, waiting ones included.",
        lambda key: key.counts.under_way,
    ),
    Row(
        "evenstep_key_pool_requests",
        "Requests of an API key that wait in the router for a free slot.",
        lambda key: key.waiting,
    ),
    Row(
        "evenstep_key_slots",
        "Slots that requests of an API key hold on the workers.",
        lambda key: key.slots,
    ),
)
KEY_LIMITED = (
    "evenstep_key_limited_total",
    "Requests that were refused since their API key had reached its limit: of requests under way, "
    "or of their rate.",
)
UNAUTHORIZED = (
    "evenstep_unauthorized_requests_total",
    "Requests that were refused since they showed no API key, or one that is not known.",
)


def readings(
    limits: KeyLimits, deciders: Mapping[str, Decider]
) -> list[tuple[tuple[str], KeyReading]]:
    """Return a reading of every key, with its labels."""
    waiting: Counter[str] = Counter()
    slots: Counter[str] = Counter()
    for decider in deciders.values():
        for sums, by_tenant in ((waiting, decider.pool.requests_of), (slots, decider.group.held)):
            for tenant, number in by_tenant.items():
                sums[limits.label(tenant)] += number
    return [
        ((name,), KeyReading(counts, waiting[name], slots[name]))
        for name, counts in limits.counts.items()
    ]


def limited(
    keys: Iterable[tuple[tuple[str], KeyReading]],
) -> Iterator[tuple[tuple[str, str], int]]:
    """Yield the rejected requests by key and limit."""
    for (name,), key in keys:
        for limit, number in key.counts.limited.items():
            yield (name, limit), number
