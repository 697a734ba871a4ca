"""Both data planes: the same answers, headers and log lines, in whatever order is asked."""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator

import pytest

from router.core.types import Outcome
from router.http.port import DataPlane
from tests.support.relaying import One, RawClient, routed
from tests.support.scripted import DONE, ScriptedServer, soon, token_events, until

TOKENS = token_events(3)
BODY = json.dumps({"model": "tiny", "prompt": [1, 2, 3]}).encode()
STREAMED = json.dumps({"model": "tiny", "prompt": [1], "stream": True}).encode()
GET = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
LAST = b"connection: close"


@pytest.fixture(params=list(DataPlane), ids=str)
async def routed_one(request: pytest.FixtureRequest) -> AsyncIterator[One]:
    async with routed(plane=request.param, slots=8) as (router, (engine,)):
        yield router, engine


def post(body: bytes, *fields: bytes, path: bytes = b"/v1/completions") -> bytes:
    lines = [b"POST %b HTTP/1.1" % path, b"host: x", *fields, b"content-length: %d" % len(body)]
    return b"\r\n".join((*lines, b"", body))


def chunked(body: bytes, *fields: bytes) -> bytes:
    half = len(body) // 2
    chunks = [b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:half], body[half:])]
    lines = [b"POST /v1/completions HTTP/1.1", b"host: x", *fields, b"transfer-encoding: chunked"]
    return b"\r\n".join((*lines, b"", b"".join(chunks))) + b"0\r\n\r\n"


async def answer_all(engine: ScriptedServer) -> None:
    """Each in its way: streams as streams, others with the length of their prompt."""
    while True:
        exchange = await engine.next()
        if exchange.json.get("stream"):
            await exchange.stream(*TOKENS, DONE)
        else:
            await exchange.answer(json.dumps({"bytes": len(exchange.body)}).encode())


ORDERS = {
    "hot behind hot": [post(BODY), post(STREAMED), post(BODY, LAST)],
    "hot behind the application": [GET, post(STREAMED), GET, post(BODY, LAST)],
    "refused ones between": [
        post(b"{"),
        post(BODY),
        post(b"", path=b"/none"),
        post(STREAMED, LAST),
    ],
    "in chunks": [chunked(BODY), chunked(STREAMED), chunked(BODY, LAST)],
    "ends before the others": [post(BODY, LAST), post(BODY), GET],
    "a great body": [post(BODY), post(BODY[:-1] + b" " * 60_000 + b"}"), post(BODY, LAST)],
    "expects": [post(BODY, b"expect: 100-continue"), post(STREAMED, LAST)],
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("step", [None, 7, 1], ids=["at once", "in sevens", "byte by byte"])
async def test_requests_sent_ahead_are_answered_in_their_order(
    routed_one: One, order: str, step: int | None
) -> None:
    router, engine = routed_one
    answering = asyncio.create_task(answer_all(engine))
    sent = b"".join(ORDERS[order])
    if order == "ends before the others":
        step = None  # what comes after the end would reset the connection
    elif order == "a great body" and step:
        step *= 1_111
    async with RawClient(router) as client:
        for start in range(0, len(sent), step or len(sent)):
            client.writer.write(sent[start : start + (step or len(sent))])
            await asyncio.sleep(0)
        received = await soon(client.reader.read())
    answering.cancel()
    statuses = [int(each) for each in re.findall(rb"HTTP/1.1 (\d{3}) ", received)]
    assert [status for status in statuses if status != 100] == EXPECTED[order]
    assert received.count(b"[DONE]") == received.count(b"\r\n0\r\n\r\n")
    await router.settled()
    await until(lambda: not router.tasks and not router.connections)
    completed = sum(b"bytes" in part for part in received.split(b"\r\n\r\n"))
    assert router.outcomes == {Outcome.COMPLETED: completed + received.count(b"[DONE]")}


EXPECTED = {order: [200] * len(sent) for order, sent in ORDERS.items()} | {
    "refused ones between": [400, 200, 404, 200],
    "ends before the others": [200],
}


async def test_of_many_sent_ahead_nothing_is_left_of_who_leaves(routed_one: One) -> None:
    router, engine = routed_one
    async with RawClient(router) as client:
        client.writer.write(post(STREAMED) + post(BODY) + GET + post(BODY))
        exchange = await engine.next()
        await exchange.start_stream()
        await exchange.chunks(TOKENS[0])
        await soon(client.read_until(TOKENS[0]))
    await exchange.left()
    await until(lambda: not router.tasks and not router.connections)
    assert router.outcomes == {Outcome.ABORTED: 1}
    assert engine.idle
    await router.settled()


def shown(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    """Lines of the log, without times and without the router's own names."""
    found = [vars(one)["evenstep_fields"] for one in caplog.records if one.msg == "request"]
    return [{k: v for k, v in line.items() if not k.endswith("_s")} for line in found]


ASKED = {
    "whole": post(BODY, b"x-request-id: mine"),
    "streamed": post(STREAMED, b"x-request-id: mine"),
    "not JSON": post(b"{", b"x-request-id: mine"),
    "unknown model": post(BODY.replace(b"tiny", b"other"), b"x-request-id: mine"),
    "a message": post(b"{}", b"x-request-id: mine", path=b"/v1/messages"),
    "in HTTP/1.0": post(BODY, b"x-request-id: mine").replace(b"HTTP/1.1", b"HTTP/1.0"),
}


@pytest.mark.parametrize("asked", ASKED)
async def test_both_planes_say_the_same(asked: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "router.proxy.request_log")
    answers = []
    for plane in DataPlane:
        async with routed(plane=plane) as (router, (engine,)), RawClient(router) as client:
            answering = asyncio.create_task(answer_all(engine))
            client.writer.write(ASKED[asked].replace(b"host: x", b"host: x\r\nconnection: close"))
            head, _, body = (await soon(client.reader.read())).partition(b"\r\n\r\n")
            answering.cancel()
            await until(lambda: not router.tasks)
        status, *fields = head.lower().split(b"\r\n")
        answers.append((status[:12], sorted(fields), b"".join(body.split(b"\r\n"))[-40:]))
    one, other = answers
    assert one == other
    assert b"x-request-id: mine" in one[1]
    first, second = shown(caplog)
    assert first == second


async def test_who_leaves_while_it_sends_is_in_the_log_by_its_name(
    routed_one: One, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "router.proxy.request_log")
    router, _ = routed_one
    async with RawClient(router) as client:
        client.writer.write(post(BODY, b"x-request-id: mine")[:-1])
        await until(lambda: bool(router.tasks))
    await until(lambda: not router.tasks)
    (line,) = shown(caplog)
    assert line["request_id"] == "mine"
    assert "outcome" not in line
