"""What a client may send and how long it may take, before anything is done for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of one port; sizes in bytes as they come over the wire, times in seconds.

    Attributes:
        max_connections: open at a time; one more is told 503 and closed.
        max_uri_bytes: of a request's path and query; 414.
        max_header_bytes: of a request line and its header fields; 431.
        max_headers: header fields; 431.
        max_body_bytes: of a body, announced or chunked; 413.
        max_bodies_bytes: of all bodies that are held at a time; 503.
        header_timeout_s: from a request's first byte to the end of its header fields, and from
            a connection's begin to there; 408.
        body_timeout_s: from there to the end of its body; 408.
        keep_alive_timeout_s: between an answer and the next request.
        write_timeout_s: for a client to read on once the router waits for it.
    """

    max_connections: int = 16_384
    max_uri_bytes: int = 8_192
    max_header_bytes: int = 32_768
    max_headers: int = 100
    max_body_bytes: int = 32 * 1024 * 1024
    max_bodies_bytes: int = 512 * 1024 * 1024
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    keep_alive_timeout_s: float = 75.0
    write_timeout_s: float = 30.0
