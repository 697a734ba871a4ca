"""Clients that do not read: who sends to them is paused, also at once, and goes on in order."""

import asyncio
import json

import pytest

from router.core.types import Outcome
from router.http.port import DataPlane
from tests.support.relaying import RawClient, routed
from tests.support.scripted import DONE, Exchange, event, soon, until
from tests.support.serving import Router

# More than all buffers on the way to a client hold.
GREAT = b'{"text": "' + b"x" * (16 << 20) + b'"}'
BIG = event({"choices": [{"index": 0, "text": "y" * 65_536}]})
COUNT = 64


def post(*, stream: bool, close: bool = False) -> bytes:
    body = json.dumps({"model": "tiny", "prompt": [1], "stream": stream}).encode()
    fields = b"connection: close\r\n" if close else b""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n%b"
    return head % (fields, len(body), body)


def paused(router: Router) -> bool:
    """The second request's engine is not read."""
    if len(router.upstream.answers) < 2:
        return False
    connection = router.upstream.answers[1]._connection
    assert connection is not None
    assert connection._transport is not None
    return not connection._transport.is_reading()


async def text_of(client: RawClient) -> bytes:
    """The text of a streamed answer, which is the last one on its connection."""
    head = await soon(client.reader.readuntil(b"\r\n\r\n"))
    assert b"transfer-encoding: chunked" in head
    text = b""
    while size := int(await soon(client.reader.readuntil(b"\r\n")), 16):
        text += (await soon(client.reader.readexactly(size + 2)))[:-2]
    assert await soon(client.reader.read()) == b"\r\n"
    return text


async def great_answer(client: RawClient) -> bytes:
    head = await soon(client.reader.readuntil(b"\r\n\r\n"))
    assert b"content-length: %d" % len(GREAT) in head
    return await soon(client.reader.readexactly(len(GREAT)))


async def send_rest(exchange: Exchange) -> None:
    await exchange.chunks(*[BIG] * COUNT, DONE)
    await exchange.end_stream()


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "broken off"])
async def test_a_stream_behind_an_answer_that_is_not_read_is_paused_as_it_begins(
    cut: bool,
) -> None:
    async with (
        routed(plane=DataPlane.SPLICE) as (router, (engine,)),
        RawClient(router) as client,
    ):
        client.writer.write(post(stream=False) + post(stream=True, close=True))
        await (await engine.next()).answer(GREAT)
        exchange = await engine.next()
        await exchange.start_stream()
        await exchange.chunks(BIG)
        await until(lambda: paused(router))
        if cut:
            router.attempts.break_off("a", "broken off")
        else:
            sending = asyncio.create_task(send_rest(exchange))

        assert await great_answer(client) == GREAT
        text = await text_of(client)
        if cut:
            assert text.startswith(BIG)
            assert b"broken off" in text.removeprefix(BIG)
            exchange.ended.set()
        else:
            assert text == BIG * (COUNT + 1) + DONE
            await soon(sending)
        await until(lambda: not router.tasks)
        await router.settled()
    assert router.outcomes[Outcome.COMPLETED] == 2 - cut


async def test_a_connection_that_was_paused_is_used_again() -> None:
    async with routed(plane=DataPlane.SPLICE) as (router, (engine,)):
        async with RawClient(router) as client:
            client.writer.write(post(stream=False) + post(stream=True, close=True))
            await (await engine.next()).answer(GREAT)
            exchange = await engine.next()
            await exchange.stream(BIG, DONE)  # comes in the read that has it paused
            await great_answer(client)
            assert await text_of(client) == BIG + DONE
        for _ in range(2):
            asked = router.post()
            await (await engine.next()).answer(b"{}")
            assert (await soon(asked)).content == b"{}"
        assert engine.connections == 1
        await router.settled()
