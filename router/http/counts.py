"""What a port's connections have been, for who operates it."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.http.refusal import STATUSES


@dataclass(slots=True)
class HttpCounts:
    """Of one port.

    Attributes:
        connections: open now.
        body_bytes: of requests that have not been answered.
        refused: requests and connections, by the status that they were answered.
    """

    connections: int = 0
    body_bytes: int = 0
    refused: dict[int, int] = field(default_factory=lambda: dict.fromkeys(STATUSES, 0))
