from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of one port: wire sizes in bytes, times in seconds; with the refusal's status.

    Attributes:
        max_connections: open connections; 503.
        max_uri_bytes: path and query; 414.
        max_header_bytes: request line and header fields; 431.
        max_headers: number of header fields; 431.
        max_body_bytes: body, announced or chunked; 413.
        max_bodies_bytes: all bodies held at a time; 503.
        header_timeout_s: time from a request's first byte, or from a connection's start, to the end
            of the head; 408.
        body_timeout_s: time from there to the body's end; 408.
        keep_alive_timeout_s: time between an answer and the next request.
        write_timeout_s: time for a slow client to resume reading.
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
