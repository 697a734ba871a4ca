"""What is not HTTP/1.1, or could be read in two ways: refused, closed, and never passed on."""

from collections.abc import Iterator

import pytest

from tests.support.malformed import LIMIT_FLAGS, MALFORMED, SHORT
from tests.support.raw_http import BODY, LAST, VALID, Front, exchange, fronted, replies_in

CASES = pytest.mark.parametrize(("status", "request_bytes"), MALFORMED.values(), ids=MALFORMED)
SHORT_CASES = pytest.mark.parametrize(("status", "request_bytes"), SHORT.values(), ids=SHORT)
BEFORE = VALID.replace(b" HTTP/1.1", b"?before HTTP/1.1")


@pytest.fixture(scope="module")
def front(data_plane: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with fronted(tmp_path_factory.mktemp("malformed"), *LIMIT_FLAGS) as front:
        yield front


@CASES
def test_it_is_refused_and_so_is_what_follows(
    front: Front, status: int, request_bytes: bytes
) -> None:
    """In the same write, where whoever is in front may have seen one request or two."""
    for sent in (request_bytes, request_bytes + VALID):
        (reply,) = replies_in(exchange(front.port, sent))
        assert reply.status == status
        assert reply.headers["connection"] == "close"
        assert reply.error.keys() == {"message", "type", "param", "code"}
        assert reply.error["code"] == status
    assert front.forwarded() == 0


@CASES
def test_what_was_asked_for_before_it_is_answered(
    front: Front, status: int, request_bytes: bytes
) -> None:
    first, reply = replies_in(exchange(front.port, BEFORE + request_bytes))

    assert (first.status, reply.status) == (200, status)
    assert front.forwarded() == 1


@SHORT_CASES
def test_the_admin_port_refuses_the_same(front: Front, status: int, request_bytes: bytes) -> None:
    (reply,) = replies_in(exchange(front.admin, request_bytes))

    assert reply.status == status


@SHORT_CASES
def test_it_is_refused_byte_by_byte(front: Front, status: int, request_bytes: bytes) -> None:
    replies = replies_in(exchange(front.port, *(bytes([byte]) for byte in request_bytes)))

    assert [reply.status for reply in replies] == [status]
    assert front.forwarded() == 0


@pytest.mark.parametrize("length", [0, 1, 10, 100, 160])
def test_a_request_that_comes_in_two_parts_is_served(front: Front, length: int) -> None:
    (reply,) = replies_in(exchange(front.port, LAST[:length], LAST[length:]))

    assert reply.status == 200
    assert front.forwarded() == 1


def test_requests_sent_ahead_are_served_in_their_order(front: Front) -> None:
    replies = replies_in(exchange(front.port, VALID * 8 + LAST))

    assert [reply.status for reply in replies] == [200] * 9
    assert front.forwarded() == 9


def test_too_many_requests_sent_ahead_are_refused(front: Front) -> None:
    *answered, refused = replies_in(exchange(front.port, VALID * 200))

    assert [reply.status for reply in answered] == [200] * 9
    assert (refused.status, refused.headers["connection"]) == (400, "close")
    assert front.forwarded() == 9


def test_what_follows_the_last_request_is_not_looked_at(front: Front) -> None:
    (reply,) = replies_in(exchange(front.port, LAST + VALID))

    assert reply.status == 200
    assert front.forwarded() == 1


def test_fields_behind_a_body_are_dropped(front: Front) -> None:
    chunks = b"%x\r\n%b\r\n0\r\nX-Data-Parallel-Rank: 7\r\nAuthorization: x\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
    body = chunks % (len(BODY), BODY)
    (reply,) = replies_in(exchange(front.port, head + b"Transfer-Encoding: chunked\r\n\r\n" + body))

    assert reply.status == 200
    assert front.forwarded() == 1
