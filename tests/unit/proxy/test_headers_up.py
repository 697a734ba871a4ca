"""What of a client's header fields an engine is told, and what clients are told by the router's."""

import pytest

from router.core.errors import DeadlineError, QueueTimeoutError, RequestTimeoutError
from router.proxy.answers import error_answer, header, headers_up


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


@pytest.mark.parametrize("kind", [QueueTimeoutError, RequestTimeoutError])
def test_who_was_late_by_its_own_word_is_not_to_ask_again(kind: type[DeadlineError]) -> None:
    hint = b"x-should-retry"
    assert header(error_answer(kind("late", own=True)).headers, hint) == b"false"
    assert not header(error_answer(kind("late")).headers, hint)
