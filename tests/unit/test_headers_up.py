"""What of a client's header fields an engine is told."""

from __future__ import annotations

from router.proxy.answers import headers_up


def test_what_is_not_the_clients_to_say_is_not_passed_on() -> None:
    sent = [
        (b"Connection", b"close, X-Mine"),
        (b"connection", b"x-yours"),
        (b"X-Mine", b"1"),
        (b"x-yours", b"1"),
        (b"Transfer-Encoding", b"chunked"),
        (b"X-Data-Parallel-Rank", b"7"),
        (b"X-Request-Id", b"mine"),
        (b"Forwarded", b"for=10.0.0.1"),
        (b"X-Forwarded-For", b"10.0.0.1"),
        (b"x-forwarded-proto", b"https"),
        (b"X-Real-IP", b"10.0.0.1"),
        (b"X-Evenstep-Energy", b"1"),
        (b"traceparent", b"00-1-2-03"),
        (b"Content-Type", b"application/json"),
    ]

    assert headers_up(sent, "es-1", 3) == [
        (b"traceparent", b"00-1-2-03"),
        (b"Content-Type", b"application/json"),
        (b"x-request-id", b"es-1"),
        (b"x-data-parallel-rank", b"3"),
    ]
