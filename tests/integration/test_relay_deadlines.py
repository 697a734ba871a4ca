"""Requests that take too long: as a whole, to their first byte, or by a silence in their midst."""

import asyncio
import json

import pytest

from router.core.queue.retry import Deadlines
from router.core.state.breaker import BreakerSettings, BreakerState
from router.core.types import Outcome
from tests.support.clock import put_forward
from tests.support.relaying import RawClient, routed
from tests.support.scripted import DONE, soon, token_events, until
from tests.support.serving import Router
from tests.support.splitting import computed

TOKENS = token_events(5)
SHORT_S = 0.2
# It never passes by itself: a test puts the clock forward. A reader may take longer than that.
LONG_S = 20.0


async def test_a_request_that_is_not_answered_in_its_time() -> None:
    async with routed(2, deadlines=Deadlines(request_timeout_s=LONG_S)) as (router, engines):
        asked = router.post()
        exchange = await engines[0].next()
        put_forward(LONG_S)
        answer = await soon(asked)
        assert answer.status_code == 504
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("GatewayTimeoutError", 504)
        await exchange.left()
        assert engines[1].idle
        assert router.outcomes == {Outcome.EXPIRED: 1}
        await router.settled()


async def test_a_request_whose_time_ends_in_the_pool() -> None:
    async with routed(slots=1) as (router, (engine,)):
        running = router.post()
        exchange = await engine.next()
        asked = router.post(headers={"X-Request-Timeout-S": str(SHORT_S)})
        assert (await soon(asked)).status_code == 504
        await exchange.answer(b"{}")
        assert (await soon(running)).status_code == 200
        assert router.outcomes == {Outcome.EXPIRED: 1, Outcome.COMPLETED: 1}
        await router.settled()


async def test_a_stream_whose_time_ends_has_one_error_event() -> None:
    async with routed(deadlines=Deadlines(request_timeout_s=LONG_S)) as (router, (engine,)):
        async with RawClient(router) as client:
            await client.post(stream=True)
            exchange = await engine.next()
            await exchange.start_stream()
            await exchange.chunks(*TOKENS[:2], TOKENS[2][:9])
            await client.read_until(TOKENS[1])
            put_forward(LONG_S)
            body = await client.read_to_end()
        whole = b"".join(TOKENS[:2])
        assert body.startswith(whole)
        error = json.loads(body.removeprefix(whole).removeprefix(b"data: "))["error"]
        assert (error["type"], error["code"]) == ("GatewayTimeoutError", 504)
        await exchange.left()
        assert router.outcomes == {Outcome.EXPIRED: 1}
        await router.settled()


async def test_a_stream_that_has_had_its_end_is_complete_whatever_its_engine_does() -> None:
    async with routed(deadlines=Deadlines(request_timeout_s=LONG_S)) as (router, (engine,)):
        async with RawClient(router) as client:
            await client.post(stream=True)
            exchange = await engine.next()
            await exchange.start_stream()
            await exchange.chunks(*TOKENS, DONE)  # and leaves the connection open
            await client.read_until(DONE)
            put_forward(LONG_S)
            assert await client.read_to_end() == b"".join(TOKENS) + DONE
        assert router.outcomes == {Outcome.COMPLETED: 1}
        await router.settled()


async def test_an_answer_that_is_there_may_be_read_slowly() -> None:
    big = token_events(1)[0].replace(b" 0", b"x" * 2**24)
    async with routed(deadlines=Deadlines(request_timeout_s=LONG_S)) as (router, (engine,)):
        async with RawClient(router) as client:
            await client.post(stream=True)
            await (await engine.next()).stream(big)
            await until(lambda: router.outcomes == {Outcome.COMPLETED: 1})
            put_forward(LONG_S)
            assert await client.read_to_end() == big
        await router.settled()


@pytest.mark.parametrize("begun", [False, True], ids=["nothing", "a head"])
async def test_a_worker_that_does_not_begin_is_given_up_for_another(begun: bool) -> None:
    deadlines = Deadlines(first_byte_timeout_s=LONG_S)
    async with routed(2, deadlines=deadlines, max_attempts=2) as (router, engines):
        asked = router.post(stream=True)
        exchange = await engines[0].next()
        if begun:
            await exchange.start_stream()
        put_forward(LONG_S)
        again = await engines[1].next()
        await exchange.left()  # it is there once at a time
        await again.stream(*TOKENS, DONE)
        assert (await soon(asked)).content == b"".join(TOKENS) + DONE
        assert not router.troubles
        await router.settled()


async def test_when_no_worker_begins_in_time_the_client_is_told() -> None:
    deadlines = Deadlines(first_byte_timeout_s=LONG_S)
    breakers = BreakerSettings(breaker_failures=1)
    async with routed(2, deadlines=deadlines, breakers=breakers) as (router, engines):
        asked = router.post()
        for engine in engines:
            exchange = await engine.next()
            put_forward(LONG_S)
            await exchange.left()
        answer = await soon(asked)
        assert (answer.status_code, answer.json()["error"]["type"]) == (504, "GatewayTimeoutError")
        states = [worker.breaker.state for worker in router.workers]
        assert states == [BreakerState.OPEN, BreakerState.CLOSED]  # one has to be left
        assert router.outcomes == {Outcome.FAILED: 1}
        await router.settled()


async def test_once_begun_a_stream_may_last() -> None:
    async with routed(deadlines=Deadlines(first_byte_timeout_s=LONG_S)) as (router, (engine,)):
        async with RawClient(router) as client:
            await client.post(stream=True)
            exchange = await engine.next()
            await exchange.start_stream()
            await exchange.chunks(TOKENS[0])
            await client.read_until(TOKENS[0])
            late = router.post()
            await engine.next()
            put_forward(LONG_S)
            assert (await soon(late)).status_code == 504
            await exchange.chunks(*TOKENS[1:], DONE)
            await exchange.end_stream()
            assert await client.read_to_end() == b"".join(TOKENS) + DONE
        await router.settled()


async def test_a_worker_that_falls_silent_ends_its_stream_with_one_error() -> None:
    async with routed(deadlines=Deadlines(stream_idle_timeout_s=SHORT_S)) as (router, (engine,)):
        async with RawClient(router) as client:
            await client.post(stream=True)
            exchange = await engine.next()
            await exchange.start_stream()
            await exchange.chunks(*TOKENS[:2])
            body = await client.read_to_end()
        whole = b"".join(TOKENS[:2])
        error = json.loads(body.removeprefix(whole).removeprefix(b"data: "))["error"]
        assert (error["type"], error["code"]) == ("GatewayTimeoutError", 504)
        assert "silent" in error["message"]
        await exchange.left()
        assert router.outcomes == {Outcome.FAILED: 1}
        await router.settled()


async def test_a_client_that_does_not_read_is_no_silence_of_the_worker() -> None:
    big = token_events(1)[0].replace(b" 0", b"x" * 65_536)
    async with routed(deadlines=Deadlines(stream_idle_timeout_s=SHORT_S)) as (router, (engine,)):
        async with RawClient(router) as client:
            await client.post(stream=True)
            exchange = await engine.next()
            sending = asyncio.create_task(exchange.stream(*[big] * 512))
            await until(lambda: _paused(router))
            silent = router.post(stream=True)
            other = await engine.next()
            await other.start_stream()
            await other.chunks(TOKENS[0])
            assert b"silent" in (await soon(silent)).content  # so much time has passed
            assert await client.read_to_end() == big * 512
            await soon(sending)
        await router.settled()


def _paused(router: Router) -> bool:
    """The first answer is read no more for now."""
    connection = router.upstream.answers[0]._connection if router.upstream.answers else None
    transport = None if connection is None else connection._transport
    return transport is not None and not transport.is_reading()


async def test_a_request_may_wait_in_the_pool_for_as_long_as_it_says() -> None:
    async with routed(slots=1) as (router, (engine,)):
        running = router.post()
        exchange = await engine.next()
        asked = router.post(headers={"X-Queue-Timeout-S": str(SHORT_S)})
        answer = await soon(asked)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.headers["x-should-retry"] == "false", "it would be as late again"
        assert f"{SHORT_S:g} s" in answer.json()["error"]["message"]
        await exchange.answer(b"{}")
        await soon(running)
        await router.settled()


async def test_prompts_have_their_time_too() -> None:
    deadlines = Deadlines(first_byte_timeout_s=LONG_S)
    async with routed(3, prefills=2, kept_s=30.0, deadlines=deadlines) as (router, engines):
        one, other, decode = engines
        asked = router.post()
        exchange = await one.next()
        put_forward(LONG_S)
        again = await other.next()
        await exchange.left()
        await computed(again)
        await (await decode.next()).answer(b"{}")
        assert (await soon(asked)).status_code == 200
        await router.settled()


async def test_a_time_that_ends_while_the_prompt_is_computed() -> None:
    deadlines = Deadlines(request_timeout_s=LONG_S)
    async with routed(2, prefills=1, kept_s=30.0, deadlines=deadlines) as (router, (prefill, _)):
        asked = router.post()
        exchange = await prefill.next()
        put_forward(LONG_S)
        assert (await soon(asked)).status_code == 504
        await exchange.left()
        await router.settled()
