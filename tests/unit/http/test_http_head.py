"""Checks of a request's head, one by one; llhttp's own are tested over a socket."""

import json
from dataclasses import replace

import pytest

from router.http.head import (
    Header,
    bodies_too_large,
    body_too_large,
    check_fields,
    check_line,
    check_size,
    head_too_long,
    too_many_headers,
    uri_too_long,
)
from router.http.port import HttpLimits
from router.http.refusal import Refused

LIMITS = HttpLimits(max_header_bytes=1024, max_body_bytes=1000)
HOST = (b"host", b"localhost:8000")
RAW = b"GET /v1/models?a=%20b HTTP/1.1\r\nHost: a\r\n\r\n"


def line_refusal(method: bytes, target: bytes, version: str, raw: bytes, *, ahead: bool) -> int:
    try:
        check_line(method, target, version, raw, ahead=ahead)
    except Refused as refused:
        return refused.status
    return 0


def fields_refusal(headers: list[Header], version: str) -> int:
    try:
        check_fields(headers, version, LIMITS)
    except Refused as refused:
        return refused.status
    return 0


@pytest.mark.parametrize(
    ("method", "target", "version", "raw", "status"),
    [
        (b"GET", b"/v1/models?a=%20b", "1.1", RAW, 0),
        (b"GET", b"/v1/models?a=%20b", "1.1", b"\r\n" + RAW, 0),
        (b"GET", b"/v1/models?a=%20b", "1.1", b"\n" + RAW, 400),
        (b"GET", b"/v1/models?a=%20b", "1.1", RAW.replace(b" HTTP", b"  HTTP"), 400),
        (b"GET", b"/v1/models?a=%20b", "1.1", RAW.replace(b"HTTP", b"RTSP"), 400),
        (b"GET", b"/", "1.0", b"GET / HTTP/1.0\r\n", 0),
        (b"GET", b"/", "2.0", b"GET / HTTP/2.0\r\n", 505),
        (b"TRACE", b"/", "1.1", b"TRACE / HTTP/1.1\r\n", 405),
        (b"GET", b"//a", "1.1", b"GET //a HTTP/1.1\r\n", 400),
        (b"GET", b"http://a/", "1.1", b"GET http://a/ HTTP/1.1\r\n", 400),
        (b"GET", b"/a#b", "1.1", b"GET /a#b HTTP/1.1\r\n", 400),
        (b"GET", b"/a%0A", "1.1", b"GET /a%0A HTTP/1.1\r\n", 400),
        (b"GET", b"/a%7f", "1.1", b"GET /a%7f HTTP/1.1\r\n", 400),
    ],
)
def test_request_lines(method: bytes, target: bytes, version: str, raw: bytes, status: int) -> None:
    assert line_refusal(method, target, version, raw, ahead=False) == status


def test_a_line_behind_another_request_is_looked_for() -> None:
    line = (b"GET", b"/", "1.1")
    assert line_refusal(*line, b"{}GET / HTTP/1.1\r\n", ahead=True) == 0
    assert line_refusal(*line, b"{}GET / HTTP/1.1\r\n", ahead=False) == 400
    assert line_refusal(*line, b"{}GET  / HTTP/1.1\r\n", ahead=True) == 400


@pytest.mark.parametrize(
    ("headers", "version", "status"),
    [
        ([HOST, (b"accept", b"*/*")], "1.1", 0),
        ([], "1.0", 0),
        ([], "1.1", 400),
        ([HOST, HOST], "1.0", 400),
        ([(b"host", b"[::1]:80\t")], "1.1", 0),
        ([(b"host", b"")], "1.1", 0),
        ([(b"host", b"::1")], "1.1", 400),
        ([(b"host", b"a b")], "1.1", 400),
        ([HOST, (b"content-length", b"1000 ")], "1.1", 0),
        ([HOST, (b"content-length", b"1001")], "1.1", 413),
        ([HOST, (b"content-length", b"0" * 5000 + b"7")], "1.1", 0),
        ([HOST, (b"content-length", b"000")], "1.1", 0),
        ([HOST, (b"transfer-encoding", b"Chunked ")], "1.1", 0),
        ([HOST, (b"transfer-encoding", b"chunked")], "1.0", 400),
        ([HOST, (b"transfer-encoding", b"gzip")], "1.1", 400),
        ([HOST, (b"transfer-encoding", b"xchunked")], "1.1", 400),
        ([HOST, (b"transfer-encoding", b"gzip, chunked")], "1.1", 501),
        ([HOST, (b"expect", b"something")], "1.1", 417),
    ],
)
def test_fields(headers: list[Header], version: str, status: int) -> None:
    assert fields_refusal(headers, version) == status


def test_who_waits_to_send_a_body() -> None:
    assert check_fields([(b"expect", b"100-Continue"), HOST], "1.1", LIMITS)
    assert not check_fields([HOST], "1.1", LIMITS)


def test_a_head_has_its_bytes_counted() -> None:
    check_size(b"/", [(b"a", b"b" * 1018)], LIMITS)
    with pytest.raises(Refused, match="1,024 bytes together"):
        check_size(b"/", [(b"a", b"b" * 1019)], LIMITS)


@pytest.mark.parametrize(
    ("refused", "status"),
    [
        (head_too_long(LIMITS), 431),
        (too_many_headers(LIMITS), 431),
        (uri_too_long(LIMITS), 414),
        (body_too_large(replace(LIMITS, max_body_bytes=10)), 413),
        (bodies_too_large(replace(LIMITS, max_bodies_bytes=10)), 503),
        (Refused(503, "full", b"retry-after: 1\r\n"), 503),
    ],
)
def test_an_answer_says_what_is_wrong_and_closes(refused: Refused, status: int) -> None:
    head, _, body = refused.answer().partition(b"\r\n\r\n")
    error = json.loads(body)["error"]

    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"\r\nconnection: close" in head
    assert b"\r\ncontent-length: %d\r\n" % len(body) in head
    assert (error["message"], error["code"]) == (refused.message, status)
    assert refused.answer(body=False) == head + b"\r\n\r\n"
