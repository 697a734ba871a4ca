"""Metrics of the clients' port: connections, and requests rejected before processing."""

from __future__ import annotations

from collections.abc import Iterator

from router.http.refusal import HttpCounts

CONNECTIONS = (
    "evenstep_http_connections",
    "Open connections of clients (--max-connections).",
)
REFUSED = (
    "evenstep_http_refused_total",
    "Requests that were refused as a whole, by status: malformed, too large (413, 414, 431) or too "
    "slow (408), and connections beyond the limit (503).",
)


def refused(counts: HttpCounts) -> Iterator[tuple[tuple[str], int]]:
    """Yield the rejected requests by status."""
    for status, requests in counts.refused.items():
        yield (str(status),), requests
