"""Tables of the metrics of API keys, and of the clients' port."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from router.access.key_limits import KeyCounts, KeyLimits
from router.core.rounds.decider import Decider
from router.http.refusal import HttpCounts
from router.metrics.rows import Row, Table
from router.pick.pick import PickCounts
from router.replicas.leading import Leading

BUILD_ROWS: Table[str] = {
    "evenstep_build_info": Row(
        "Always 1; the label says which version runs.",
        lambda version: {version: 1},
        "version",
    ),
}

HTTP_ROWS: Table[HttpCounts] = {
    "evenstep_http_connections": Row(
        "Open connections of clients (--max-connections).",
        lambda counts: counts.connections,
    ),
    "evenstep_http_refused_total": Row(
        "Requests that were refused as a whole, by status: malformed, too large (413, 414, 431) or "
        "too slow (408), and connections beyond the limit (503).",
        lambda counts: {str(status): number for status, number in counts.refused.items()},
        "status",
    ),
}

PICK_ROWS: Table[PickCounts] = {
    "evenstep_picks": Row(
        "Requests that a gateway was told where to send, and that have not ended (evenstep pick).",
        lambda counts: counts.open,
    ),
    "evenstep_picks_ended_total": Row(
        "Requests at gateways that have ended, by who told it: the gateway's access log, its "
        "answer, the engine's snapshots, the end of the gateway's call, a worker's removal, or "
        "nobody in time (unheard).",
        lambda counts: counts.ends,
        "by",
    ),
    "evenstep_picks_moved_total": Row(
        "Requests that a gateway sent elsewhere than to the first endpoint it was told.",
        lambda counts: counts.moved,
    ),
}

REPLICA_ROWS: Table[Leading] = {
    "evenstep_replica_decides": Row(
        "1 where this replica decides, 0 where another one does (--replica-lock).",
        lambda leading: leading.decides,
    ),
    "evenstep_replica_takeovers_total": Row(
        "Times that this replica began to decide.",
        lambda leading: leading.takeovers,
    ),
    "evenstep_replica_lock_failures_total": Row(
        "Attempts to take or renew the replicas' lock that got no answer.",
        lambda leading: leading.failures,
    ),
}

ACCESS_ROWS: Table[KeyLimits] = {
    "evenstep_unauthorized_requests_total": Row(
        "Requests that were refused since they showed no API key, or one that is not known.",
        lambda limits: limits.unauthorized,
    ),
}


@dataclass(frozen=True, slots=True)
class KeyReading:
    """A key at the moment of a scrape, over all groups: waiting requests and slots in use."""

    counts: KeyCounts
    waiting: int
    slots: int


KEY_ROWS: Table[KeyReading] = {
    "evenstep_key_requests_total": Row(
        "Requests that were let in by an API key.",
        lambda key: key.counts.requests,
    ),
    "evenstep_key_requests": Row(
        "Requests of an API key that are under way, waiting ones included.",
        lambda key: key.counts.under_way,
    ),
    "evenstep_key_pool_requests": Row(
        "Requests of an API key that wait in the router for a free slot.",
        lambda key: key.waiting,
    ),
    "evenstep_key_slots": Row(
        "Slots that requests of an API key hold on the workers.",
        lambda key: key.slots,
    ),
    "evenstep_key_limited_total": Row(
        "Requests that were refused since their API key had reached its limit: of requests under "
        "way, or of their rate.",
        lambda key: key.counts.limited,
        "limit",
    ),
}


def key_readings(
    limits: KeyLimits, deciders: Mapping[str, Decider]
) -> Iterator[tuple[tuple[str], KeyReading]]:
    """Yield each key's reading with its label: 64 names at most, the rest as ``other``."""
    waiting: Counter[str] = Counter()
    slots: Counter[str] = Counter()
    for decider in deciders.values():
        requests_of = decider.pool.requests_of if decider.waiting else {}
        for sums, by_tenant in ((waiting, requests_of), (slots, decider.group.held)):
            for tenant, number in by_tenant.items():
                sums[limits.label(tenant)] += number
    for name, counts in limits.counts.items():
        yield (name,), KeyReading(counts, waiting[name], slots[name])
