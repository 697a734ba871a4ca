from __future__ import annotations

from dataclasses import dataclass, field

from router.http.refusal import STATUSES


@dataclass(slots=True)
class HttpCounts:
    """Counts of one port's connections.

    Attributes:
        body_bytes: body bytes of unanswered requests.
        refused: refused requests and connections, by status.
    """

    connections: int = 0
    body_bytes: int = 0
    refused: dict[int, int] = field(default_factory=lambda: dict.fromkeys(STATUSES, 0))
