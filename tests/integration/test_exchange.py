"""Requests that are taken over inside the protocol: what ends them, in whichever turn it comes."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from router.core.types import Outcome
from router.http.client_protocol import LimitedProtocol
from router.http.port import DataPlane, HttpLimits
from tests.support.relaying import One, RawClient, routed
from tests.support.scripted import DONE, SSE, head, soon, token_events, until

TOKENS = token_events(5)
BODY = json.dumps({"model": "tiny", "prompt": [1, 2, 3]}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"


@pytest.fixture
async def hot() -> AsyncIterator[One]:
    async with routed(plane=DataPlane.SPLICE) as (router, (engine,)):
        yield router, engine


def message(body: bytes = BODY, *fields: bytes) -> bytes:
    length = b"content-length: %d" % len(body)
    return HEAD + b"".join(field + b"\r\n" for field in (*fields, length)) + b"\r\n" + body


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """What the log says of requests."""
    records = [one for one in caplog.records if one.name == "router.proxy.request_log"]
    return [vars(record)["evenstep_fields"] for record in records]


async def test_a_request_refused_in_the_read_that_began_it_is_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "router.proxy.request_log")
    limits = HttpLimits(max_body_bytes=10)
    async with (
        routed(plane=DataPlane.SPLICE, limits=limits) as (router, _),
        RawClient(router) as client,
    ):
        chunk = b"%x\r\n%b\r\n" % (len(BODY), BODY)
        client.writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk)

        assert b"HTTP/1.1 413 " in await soon(client.reader.read())
        await until(lambda: not router.tasks)
        assert [line["path"] for line in lines(caplog)] == ["/v1/completions"]


async def test_all_bodies_together_are_bounded_until_they_are_answered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def large(size: int) -> bytes:
        return message(BODY[:-1] + b" " * (size - len(BODY)) + b"}")

    limits = HttpLimits(max_body_bytes=60_000, max_bodies_bytes=60_000)
    async with (
        routed(plane=DataPlane.SPLICE, limits=limits) as (router, (engine,)),
        RawClient(router) as first,
        RawClient(router) as second,
        RawClient(router) as third,
    ):
        first.writer.write(large(50_000))
        asked = await engine.next()
        second.writer.write(large(6_000))  # twice that is not there
        refused = await soon(second.reader.read())
        assert b"HTTP/1.1 503 " in refused
        assert b"retry-after: 1\r\n" in refused
        third.writer.write(message())
        small = await engine.next()
        for each, client in ((asked, first), (small, third)):
            await each.answer(b"{}")
            assert b"HTTP/1.1 200 " in await soon(client.reader.readline())
        async with RawClient(router) as fourth:
            fourth.writer.write(large(60_000))
            await (await engine.next()).answer(b"{}")
            assert b"HTTP/1.1 200 " in await soon(fourth.reader.readline())


def end_with_read(monkeypatch: pytest.MonkeyPatch, text: bytes, *, before: bool) -> None:
    """Have the server cut its answers short in the turn of the event loop that reads a text."""
    receive = LimitedProtocol.data_received

    def receive_and_end(protocol: LimitedProtocol, data: bytes) -> None:
        ends = text in data
        if ends and before:
            cut_short(protocol)
        receive(protocol, data)
        if ends and not before:
            cut_short(protocol)

    monkeypatch.setattr(LimitedProtocol, "data_received", receive_and_end)


def cut_short(protocol: LimitedProtocol) -> None:
    for task in protocol.tasks:
        task.cancel("the router ends")


async def test_who_is_ended_before_it_was_begun_is_told(
    hot: One, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "router.proxy.request_log")
    router, engine = hot
    end_with_read(monkeypatch, b"POST", before=False)
    async with RawClient(router) as client:
        client.writer.write(message())

        answer = await soon(client.reader.readuntil(b"retry"))
    assert answer.startswith(b"HTTP/1.1 503 ")
    await until(lambda: not router.tasks)
    assert [line["status"] for line in lines(caplog)] == [503]
    assert engine.idle


async def test_who_is_ended_as_its_body_comes_is_told(
    hot: One, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    router, engine = hot
    end_with_read(monkeypatch, b"}", before=True)
    async with RawClient(router) as client:
        client.writer.write(message(BODY)[: -len(BODY)] + BODY[:-1])
        await until(lambda: bool(router.tasks))
        await asyncio.sleep(0)
        client.writer.write(BODY[-1:])

        answer = await soon(client.reader.readuntil(b"retry"))
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]
    assert engine.idle


@pytest.mark.parametrize("plane", list(DataPlane), ids=str)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
async def test_who_is_ended_while_it_sends_is_told_in_its_dialect(
    plane: DataPlane, path: str
) -> None:
    async with routed(plane=plane) as (router, _), RawClient(router) as client:
        client.writer.write(message().replace(b"/v1/completions", path.encode())[:-1])
        await until(lambda: bool(router.tasks))
        await asyncio.sleep(0)
        for task in router.tasks:
            task.cancel("the router ends")

        await soon(client.reader.readuntil(b"\r\n\r\n"))
        body = json.loads(await soon(client.reader.readuntil(b"}}")))
    assert body["error"]["type"] == "ServiceUnavailableError"
    assert (body.get("type") == "error") == (path == "/v1/messages")


@pytest.mark.parametrize("plane", list(DataPlane), ids=str)
@pytest.mark.parametrize("status", [204, 304])
async def test_an_answer_that_has_no_body_has_no_framing_either(
    plane: DataPlane, status: int
) -> None:
    async with (
        routed(plane=plane) as (router, (engine,)),
        RawClient(router) as client,
    ):
        client.writer.write(message() + message(BODY, b"connection: close"))
        first = await engine.next()
        await first.send(head(status, SSE))
        first.ended.set()
        await (await engine.next()).answer(b"{}")

        one, both, rest = (await soon(client.reader.read())).split(b"\r\n\r\n")
    assert b"content-length" not in one
    assert b"transfer-encoding" not in one
    assert both.startswith(b"HTTP/1.1 200 ")
    assert rest == b"{}"


async def test_of_a_body_nothing_is_kept_while_its_answer_comes(hot: One) -> None:
    router, engine = hot
    async with RawClient(router) as client:
        await client.post(prompt="long " * 10_000, stream=True)
        exchange = await engine.next()
        (connection,) = router.connections
        assert not connection.cycle.body
        await exchange.stream(*TOKENS, DONE)
        assert await soon(client.read_to_end()) == b"".join(TOKENS) + DONE


async def test_of_who_leaves_all_is_counted_that_it_got(hot: One) -> None:
    router, engine = hot
    async with RawClient(router) as client:
        await client.post(stream=True)
        exchange = await engine.next()
        await exchange.start_stream()
        for number, token in enumerate(TOKENS):
            await exchange.chunks(token)
            await soon(client.read_until(b'" %d"' % number))
    await exchange.left()
    await router.settled()
    assert sum(router.stats.tokens.itl_s.counts) == len(TOKENS) - 1
    assert router.outcomes == {Outcome.ABORTED: 1}


async def test_a_stream_in_http_1_0_has_no_chunks_and_ends_with_the_connection(hot: One) -> None:
    router, engine = hot
    body = json.dumps({"model": "tiny", "prompt": [1], "stream": True}).encode()
    async with RawClient(router) as client:
        client.writer.write(message(body).replace(b"HTTP/1.1", b"HTTP/1.0"))
        exchange = await engine.next()
        await exchange.stream(*TOKENS, DONE)
        head, _, events = (await soon(client.reader.read())).partition(b"\r\n\r\n")
    assert b"\r\nconnection: close" in head
    assert b"transfer-encoding" not in head
    assert events == b"".join((*TOKENS, DONE))
    await until(lambda: not router.tasks)
    assert router.outcomes == {Outcome.COMPLETED: 1}
