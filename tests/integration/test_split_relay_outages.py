"""Workers of one stage that are all down, or only seem to be, while requests are in the other."""

import asyncio

import pytest

from router.core.events import EngineFailed, WorkerUp
from router.core.types import Outcome
from router.serve.router import give_engine_up
from tests.support.relaying import routed
from tests.support.scripted import soon, until
from tests.support.splitting import ANSWER, TOKENS, Pair, computed, kept, stats


async def test_a_status_of_one_request_puts_no_prefill_worker_out_of_use(pair: Pair) -> None:
    """Else a client could put all of them out of use, by what makes engines fail."""
    router, prefill, decode = pair
    waiting = router.post()
    await computed(await prefill.next())
    first = await decode.next()
    poison = router.post()
    await (await prefill.next()).answer(b'{"error": "cannot"}', 500)
    whole = await decode.next()
    assert "kv_transfer_params" not in whole.json
    await whole.answer(b'{"error": "cannot, really"}', 500)
    assert (await soon(poison)).content == b'{"error": "cannot, really"}'
    assert (router.troubles, kept(router), stats(router).fallbacks) == ([], 77, 1)
    await first.answer(ANSWER)
    assert (await soon(waiting)).status_code == 200
    assert prefill.idle
    await router.settled()


async def test_a_broken_connection_loses_no_kv() -> None:
    async with routed(2, slots=1, prefills=1, kept_s=30.0) as (router, (prefill, decode)):
        asked = [router.post(), router.post()]
        for _ in asked:
            await computed(await prefill.next())
        first = await decode.next()
        asked.append(router.post())
        (await prefill.next()).reset()
        await until(lambda: router.troubles == ["a"])
        assert kept(router) == 2 * 77
        router.dispatcher.apply(WorkerUp("a"))
        await computed(await prefill.next())
        await first.answer(ANSWER)
        for _ in range(2):
            exchange = await decode.next()
            assert exchange.json["kv_transfer_params"] is not None
            await exchange.answer(ANSWER)
        assert [(await soon(answer)).status_code for answer in asked] == [200] * 3
        assert (stats(router).repeated_prefills, kept(router)) == (0, 0)
        await router.settled()


async def test_an_engine_that_fails_its_checks_has_lost_what_it_kept() -> None:
    async with routed(3, slots=1, prefills=2, kept_s=30.0) as (router, (one, other, decode)):
        asked = [router.post(), router.post()]
        await computed(await one.next())
        await computed(await other.next())
        running = await decode.next()
        asked.append(router.post())
        exchange = await one.next()
        assert (kept(router, "a"), kept(router, "b")) == (77, 77)
        router.down("a")
        give_engine_up(router.dispatcher, router.attempts, "a")
        await exchange.left()  # it is computed elsewhere
        assert (kept(router, "a"), kept(router, "b")) == (0, 77)
        await computed(await other.next())
        await until(lambda: kept(router, "b") == 2 * 77)
        await running.answer(ANSWER)
        for _ in asked[1:]:
            await (await decode.next()).answer(ANSWER)
        assert [(await soon(answer)).status_code for answer in asked] == [200] * 3
        await router.settled()


async def test_kv_that_is_gone_each_time_is_computed_where_it_is_needed() -> None:
    settings = {"slots": 1, "prefills": 1, "kept_s": 30.0, "max_attempts": 3}
    async with routed(2, **settings) as (router, (prefill, decode)):
        others = [router.post(echo=True)]
        running = await decode.next()
        asked = router.post()
        for last in (False, True):
            await computed(await prefill.next())
            await until(lambda: kept(router) == 77)
            router.dispatcher.apply(EngineFailed("a"))
            if not last:
                others.append(router.post(echo=True))
                await until(lambda: router.waiting == 2)
            await running.answer(ANSWER)
            running = await decode.next()
            assert running.json.get("echo") is (None if last else True)
        assert "kv_transfer_params" not in running.json
        await running.answer(ANSWER)
        assert [(await soon(answer)).status_code for answer in (asked, *others)] == [200] * 3
        assert (stats(router).repeated_prefills, prefill.idle) == (1, True)
        await router.settled()


async def test_no_prompt_is_computed_for_nobody(pair: Pair) -> None:
    router, prefill, _ = pair
    asked = [router.post(prompt=list(range(5000))), router.post()]
    exchange = await prefill.next()
    await until(lambda: router.waiting == 1)
    router.down("b")
    late = await soon(asked[1])
    assert late.status_code == 503
    assert "no worker of group 'default' is up (b: gone)" in late.text
    assert (await soon(router.post())).status_code == 503
    await computed(exchange)
    assert (await soon(asked[0])).status_code == 503
    assert prefill.idle
    assert (stats(router).fallbacks, router.stats.unserved) == (0, 2)
    assert router.outcomes[Outcome.FAILED] == 1
    await router.settled()


async def test_what_waits_for_its_prompt_goes_on_when_somebody_decodes_again(pair: Pair) -> None:
    router, prefill, decode = pair
    router.down("b")
    asked = router.post()
    exchange = await prefill.next()
    router.dispatcher.apply(WorkerUp("b"))
    await computed(exchange)
    await (await decode.next()).answer(ANSWER)
    assert (await soon(asked)).status_code == 200
    await router.settled()


@pytest.mark.parametrize("cause", ["leaves", "lost"])
async def test_kv_of_requests_that_wait_is_counted_once(cause: str) -> None:
    """However often one of them is computed, and whoever of them leaves."""
    async with routed(2, slots=1, prefills=1, kept_s=30.0) as (router, (prefill, decode)):
        asked = [router.post() for _ in range(3)]
        for _ in asked:
            await computed(await prefill.next())
        running = await decode.next()
        assert kept(router) == 3 * 77
        if cause == "leaves":
            asked.pop().cancel()
            await until(lambda: router.waiting == 1)
            assert kept(router) == 3 * 77  # until it expires
        router.dispatcher.apply(EngineFailed("a"))
        assert kept(router) == 0
        await running.answer(ANSWER)
        for _ in asked[1:]:
            await computed(await prefill.next())
            await (await decode.next()).answer(ANSWER)
        assert [(await soon(answer)).status_code for answer in asked] == [200] * len(asked)
        assert kept(router) == 0
        await router.settled()


async def test_a_router_that_ends_says_so_in_every_phase() -> None:
    """After its time for ending in peace a server cancels what is left."""
    async with routed(2, slots=1, prefills=1, kept_s=30.0) as (router, (prefill, decode)):
        streaming = router.post(stream=True)
        await computed(await prefill.next())
        running = await decode.next()
        await running.start_stream()
        await running.chunks(*TOKENS[:2])
        await until(lambda: kept(router) == 0)
        asked = [router.post() for _ in range(2)]
        await computed(await prefill.next())  # ready
        computing = await prefill.next()
        asked += [router.post(prompt=[1] * 5000), router.post()]
        await until(lambda: router.waiting == 2)
        last = await prefill.next()
        for task in router.tasks:
            task.cancel("the server ends")
        for answer in await soon(asyncio.gather(*asked)):
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert "the router is ending" in answer.text
        begun = (await soon(streaming)).content  # what has begun ends with one error event
        assert begun.startswith(b"".join(TOKENS[:2]))
        assert begun.count(b"the router is ending") == begun.count(b"error") == 1
        for exchange in (running, computing, last):
            await exchange.left()
        await router.settled()
