"""Engines that fail, before the first byte of an answer and after it."""

import json

import pytest

from router.core.types import Outcome
from tests.support.relaying import One, RawClient, routed
from tests.support.scripted import DONE, SSE, event, head, soon, token_events, until

TOKENS = token_events(5)
JSON = "application/json"


# engines that fail before the first byte


HEAD = head(200, SSE, transfer_encoding="chunked")
BEGINNINGS = {
    "nothing": b"",
    "half a head": HEAD[:20],
    "head": HEAD,
    "half an event": HEAD + b"%x\r\n%b\r\n" % (len(TOKENS[0]) - 1, TOKENS[0][:-1]),
    "half a body": head(200, JSON, content_length="100") + b'{"half":',
    "garbage": b"\x16\x03\x01 not HTTP",
}


@pytest.mark.parametrize("cut", ["close", "reset"])
@pytest.mark.parametrize("begin", BEGINNINGS.values(), ids=BEGINNINGS.keys())
async def test_another_worker_answers_and_the_client_does_not_notice(
    begin: bytes, cut: str
) -> None:
    async with routed(2) as (router, engines):
        asked = router.post(stream=True)
        failing = await engines[0].next()
        await failing.send(begin)
        getattr(failing, cut)()

        again = await engines[1].next()
        assert again.body == failing.body
        assert again.headers["x-request-id"] == failing.headers["x-request-id"] + "r1"
        await again.stream(*TOKENS, DONE)

        answer = await soon(asked)
        assert (answer.status_code, answer.content) == (200, b"".join(TOKENS) + DONE)
        assert (router.troubles, router.outcomes) == (["a"], {Outcome.COMPLETED: 1})
        assert router.stats.returned == 1
        await router.settled()


async def test_a_worker_that_refuses_connections_is_passed_over() -> None:
    async with routed(2) as (router, engines):
        await engines[0].stop()
        asked = router.post()
        await (await engines[1].next()).answer(b"{}")

        assert (await soon(asked)).status_code == 200
        assert router.troubles == ["a"]


async def test_attempts_are_bounded() -> None:
    async with routed(3, max_attempts=2) as (router, engines):
        asked = router.post()
        for engine in engines[:2]:
            (await engine.next()).close()

        answer = await soon(asked)

        assert answer.status_code == 502
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("BadGatewayError", 502)
        assert (engines[2].connections, router.outcomes) == (0, {Outcome.FAILED: 1})
        await router.settled()


async def test_when_the_last_worker_fails_nobody_is_left(one: One) -> None:
    router, engine = one
    asked = router.post()
    (await engine.next()).close()

    answer = await soon(asked)

    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert router.outcomes == {Outcome.FAILED: 1}
    await router.settled()


# engines that fail after it


@pytest.mark.parametrize("cut", ["close", "reset"])
@pytest.mark.parametrize("half", [b"", TOKENS[4][:1], TOKENS[4][:20], TOKENS[4][:-1], DONE[:-1]])
async def test_a_stream_that_breaks_off_ends_with_one_error(
    one: One, half: bytes, cut: str
) -> None:
    router, engine = one
    async with RawClient(router) as client:
        await client.post()
        exchange = await engine.next()
        await exchange.start_stream()
        await exchange.chunks(*TOKENS[:4], *([half] if half else []))
        await client.read_until(TOKENS[3])
        getattr(exchange, cut)()

        body = await client.read_to_end()

    whole = b"".join(TOKENS[:4])
    assert body.startswith(whole)
    assert body.count(b"\n\n") == 5
    error = json.loads(body.removeprefix(whole).removeprefix(b"data: "))["error"]
    assert (error["type"], error["code"]) == ("BadGatewayError", 502)
    assert "before its answer was complete" in error["message"]
    assert (router.outcomes, router.troubles) == ({Outcome.FAILED: 1}, ["a"])
    await router.settled()


async def test_the_connection_of_a_client_outlives_a_broken_stream() -> None:
    async with routed(2) as (router, engines):
        asked = router.post(stream=True)
        exchange = await engines[0].next()
        await exchange.start_stream()
        await exchange.chunks(TOKENS[0])
        await until(lambda: sum(router.stats.ttft_s.counts) == 1)
        exchange.reset()
        assert (await soon(asked)).content.count(b"error") == 1

        asked = router.post(stream=True)
        await (await engines[1].next()).stream(*TOKENS, DONE)

        assert (await soon(asked)).content == b"".join(TOKENS) + DONE
        await router.settled()


@pytest.mark.parametrize("cut", ["close", "reset"])
async def test_after_done_a_break_is_no_error(one: One, cut: str) -> None:
    router, engine = one
    async with RawClient(router) as client:
        await client.post()
        exchange = await engine.next()
        await exchange.start_stream()
        await exchange.chunks(*TOKENS, DONE)
        await client.read_until(DONE)
        getattr(exchange, cut)()

        assert await client.read_to_end() == b"".join(TOKENS) + DONE
    assert (router.outcomes, router.troubles) == ({Outcome.COMPLETED: 1}, [])
    await router.settled()


async def test_text_that_looks_like_the_end_does_not_hide_a_break(one: One) -> None:
    router, engine = one
    text = event({"text": "data: [DONE]"})
    async with RawClient(router) as client:
        await client.post()
        exchange = await engine.next()
        await exchange.start_stream()
        await exchange.chunks(text)
        await client.read_until(text)
        exchange.reset()

        assert b"BadGatewayError" in await client.read_to_end()
    assert router.outcomes == {Outcome.FAILED: 1}
