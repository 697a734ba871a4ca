"""Clients that leave: what they asked for ends in the pool and at the engine."""

import asyncio

import httpx

from router.core.types import Outcome
from tests.support.relaying import One, routed
from tests.support.scripted import Exchange, head, soon, token_events, until
from tests.support.serving import Router

TOKENS = token_events(5)
JSON = "application/json"


async def test_a_client_that_leaves_while_it_waits(one: One) -> None:
    router, engine = one
    holding = [router.post() for _ in range(2)]
    exchanges = [await engine.next(), await engine.next()]
    leaving = router.post()
    await until(lambda: router.waiting == 1)

    leaving.cancel()

    await until(lambda: router.waiting == 0)
    assert router.outcomes == {Outcome.ABORTED: 1}
    for exchange in exchanges:
        await exchange.answer(b"{}")
    await soon(asyncio.gather(*holding))
    assert engine.idle
    await router.settled()


async def leaves(router: Router, exchange: Exchange, asked: asyncio.Task[httpx.Response]) -> None:
    asked.cancel()
    await exchange.left()
    await router.settled()
    assert router.outcomes == {Outcome.ABORTED: 1}
    assert not router.troubles


async def test_a_client_that_leaves_before_the_first_byte(one: One) -> None:
    router, engine = one
    asked = router.post(stream=True)

    await leaves(router, await engine.next(), asked)


async def test_a_client_that_leaves_between_head_and_first_event(one: One) -> None:
    router, engine = one
    asked = router.post(stream=True)
    exchange = await engine.next()
    await exchange.start_stream()
    await until(lambda: bool(router.upstream.answers))

    await leaves(router, exchange, asked)


async def test_a_client_that_leaves_in_mid_stream(one: One) -> None:
    router, engine = one
    asked = router.post(stream=True)
    exchange = await engine.next()
    await exchange.start_stream()
    await exchange.chunks(*TOKENS[:2])
    await until(lambda: sum(router.stats.ttft_s.counts) == 1)

    await leaves(router, exchange, asked)


async def test_a_client_that_leaves_an_answer_in_one_piece(one: One) -> None:
    router, engine = one
    asked = router.post()
    exchange = await engine.next()
    await exchange.send(head(200, JSON, content_length="100"), b'{"half":')
    await until(lambda: bool(router.upstream.answers))

    await leaves(router, exchange, asked)


async def test_the_slot_of_a_client_that_left_is_given_on() -> None:
    async with routed(slots=1) as (router, (engine,)):
        leaving = router.post()
        first = await engine.next()
        staying = router.post()
        await until(lambda: router.waiting == 1)

        leaving.cancel()

        await first.left()
        await (await engine.next()).answer(b"{}")
        assert (await soon(staying)).status_code == 200
        await router.settled()
