"""What fails between a prompt's computing and the first byte of its answer, and is made anew."""

import asyncio
import json
from typing import Any

import pytest

from router.core.events import EngineFailed, WorkerUp
from router.core.state.breaker import BreakerSettings
from router.proxy import kv_transfer
from tests.support.relaying import routed
from tests.support.scripted import (
    DONE,
    Exchange,
    ScriptedServer,
    event,
    scripted,
    soon,
    until,
)
from tests.support.serving import serving
from tests.support.splitting import ANSWER, TOKENS, Pair, computed, kept, stats, streaming


@pytest.mark.parametrize("failure", ["reset", "nonsense"])
async def test_a_failed_prefill_is_made_elsewhere(failure: str) -> None:
    async with routed(3, prefills=2, kept_s=30.0) as (router, (one, other, decode)):
        asked = router.post()
        exchange = await one.next()
        if failure == "reset":
            exchange.reset()
        else:
            await exchange.answer(b'{"usage": 7}')
        await computed(await other.next())
        await (await decode.next()).answer(ANSWER)
        assert (await soon(asked)).content == ANSWER
        assert router.troubles == ["a"]
        assert stats(router).returned == 1
        await router.settled()


async def test_a_prefill_worker_with_too_much_to_do_leaves_the_prompt_to_another() -> None:
    async with routed(3, prefills=2, kept_s=30.0) as (router, (one, other, decode)):
        asked = router.post()
        await (await one.next()).answer(b'{"error": "busy"}', 429)
        await computed(await other.next())
        await (await decode.next()).answer(ANSWER)
        assert (await soon(asked)).content == ANSWER
        assert (router.troubles, stats(router).returned, one.idle) == ([], 1, True)
        await router.settled()


async def test_a_client_learns_that_all_prefill_workers_have_too_much_to_do() -> None:
    async with routed(3, prefills=2, kept_s=30.0) as (router, (one, other, decode)):
        asked = router.post()
        for prefill in (one, other):
            await (await prefill.next()).answer(b'{"error": "busy"}', 429)
        assert (await soon(asked)).status_code == 429
        assert decode.idle
        await router.settled()


async def test_who_waits_for_a_prefill_worker_that_was_busy_gets_it() -> None:
    """Its refusal is forgotten after a moment, without anything else that happens."""
    async with routed(3, prefills=2, kept_s=30.0) as (router, (one, other, decode)):
        router.down("a")
        filling = router.post(prompt=list(range(5000)))
        filled = await other.next()
        router.dispatcher.apply(WorkerUp("a"))
        asked = router.post()
        await (await one.next()).answer(b'{"error": "busy"}', 429)
        await computed(await one.next())
        await (await decode.next()).answer(ANSWER)
        assert (await soon(asked)).content == ANSWER
        await computed(filled)
        await (await decode.next()).answer(ANSWER)
        assert (await soon(filling)).content == ANSWER
        await router.settled()


async def test_prompts_that_are_computed_for_nothing_are_counted(pair: Pair) -> None:
    router, prefill, decode = pair
    asked = router.post()
    await computed(await prefill.next(), params=None)
    await (await decode.next()).answer(ANSWER)
    assert (await soon(asked)).status_code == 200
    assert (stats(router).lost_prefills, kept(router)) == (1, 0)
    await router.settled()


async def test_prefills_that_fail_everywhere_end_whole() -> None:
    async with routed(4, prefills=3, kept_s=30.0) as (router, (one, other, third, decode)):
        asked = router.post()
        for prefill in (one, other):  # of three attempts one is left to decode
            await (await prefill.next()).answer(b"no engine")
        exchange = await decode.next()
        assert "kv_transfer_params" not in exchange.json
        await exchange.answer(ANSWER)
        assert (await soon(asked)).content == ANSWER
        assert (stats(router).fallbacks, third.idle) == (1, True)
        await router.settled()


async def test_without_prefill_workers_requests_go_whole(pair: Pair) -> None:
    router, prefill, decode = pair
    router.down("a")
    asked = [router.post(), router.post()]
    for _ in asked:
        exchange = await decode.next()
        assert "kv_transfer_params" not in exchange.json
        await exchange.answer(ANSWER)
    assert [(await soon(answer)).status_code for answer in asked] == [200, 200]
    assert (stats(router).fallbacks, prefill.idle) == (2, True)
    await router.settled()


async def test_who_waits_for_prefill_workers_that_fail_goes_whole(pair: Pair) -> None:
    router, prefill, decode = pair
    asked = [router.post(prompt=list(range(5000))), router.post()]
    exchange = await prefill.next()
    await until(lambda: router.waiting == 1)
    exchange.reset()
    for _ in asked:
        whole = await decode.next()
        assert "kv_transfer_params" not in whole.json
        await whole.answer(ANSWER)
    assert [(await soon(answer)).status_code for answer in asked] == [200, 200]
    assert stats(router).fallbacks == 2
    await router.settled()


@pytest.mark.parametrize("failure", ["reset", "status"])
async def test_a_failed_decode_has_its_prompt_computed_again(pair: Pair, failure: str) -> None:
    router, prefill, decode = pair
    asked = router.post(stream=True)
    await computed(await prefill.next())
    exchange = await decode.next()
    if failure == "reset":
        exchange.reset()
    else:
        await exchange.answer(b'{"error": "KV load failed"}', 500)
    await computed(await prefill.next(), params={"again": True})
    if failure == "reset":
        await until(lambda: router.troubles == ["b"])
        router.dispatcher.apply(WorkerUp("b"))
    exchange = await decode.next()
    assert exchange.json["kv_transfer_params"] == {"again": True}
    await exchange.stream(*TOKENS, DONE)
    assert (await soon(asked)).content == b"".join(TOKENS) + DONE
    assert stats(router).repeated_prefills == 1
    await router.settled()


ROLE = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
FAILED = event({"error": {"message": "KV load failed", "code": 500}})


@pytest.mark.parametrize("before", [b"", ROLE], ids=["completion", "chat"])
async def test_a_stream_that_begins_with_an_error_is_made_anew(pair: Pair, before: bytes) -> None:
    router, prefill, decode = pair
    asked, exchange = await streaming(pair)
    await exchange.chunks(*filter(None, (before, FAILED)))
    await computed(await prefill.next())
    await (await decode.next()).stream(*filter(None, (before, *TOKENS, DONE)))
    assert (await soon(asked)).content == before + b"".join(TOKENS) + DONE
    assert (stats(router).repeated_prefills, router.troubles) == (1, [])
    await router.settled()


async def test_a_chat_that_broke_off_before_its_text_begins_once(pair: Pair) -> None:
    router, prefill, decode = pair
    asked, exchange = await streaming(pair)
    await exchange.chunks(ROLE)
    exchange.close()
    second = await prefill.next()
    router.dispatcher.apply(WorkerUp("b"))
    await computed(second)
    await (await decode.next()).stream(ROLE, *TOKENS, DONE)
    assert (await soon(asked)).content == ROLE + b"".join(TOKENS) + DONE
    await router.settled()


async def test_an_error_that_stays_is_passed_on(pair: Pair) -> None:
    router, prefill, decode = pair
    asked = router.post(stream=True)
    for _ in range(2):
        await computed(await prefill.next())
        await (await decode.next()).stream(FAILED, DONE)
    assert (await soon(asked)).content == FAILED + DONE
    assert kept(router) == 2 * 77  # which nobody has fetched
    await router.settled()


@pytest.mark.parametrize("status", [400, 500])
async def test_kv_that_the_worker_did_not_want_is_counted_until_it_expires(status: int) -> None:
    """Its prefill worker keeps it: else requests that are refused could fill all its memory."""
    async with routed(2, prefills=1, kept_s=30.0) as (router, (prefill, decode)):
        asked = router.post()
        times = 1 if status == 400 else 2
        for _ in range(times):
            await computed(await prefill.next())
            await (await decode.next()).answer(b'{"error": "max_tokens"}', status)
        assert (await soon(asked)).status_code == status
        assert kept(router) == times * 77
        await router.settled()


async def test_a_chat_that_ends_at_once_is_whole(pair: Pair) -> None:
    router, _, _ = pair
    asked, exchange = await streaming(pair)
    await exchange.chunks(ROLE)
    await exchange.end_stream()
    assert (await soon(asked)).content == ROLE
    await router.settled()


async def test_kv_that_is_gone_is_computed_again() -> None:
    async with routed(2, slots=1, prefills=1, kept_s=0.01) as (router, (prefill, decode)):
        asked = [router.post(), router.post()]
        for _ in asked:
            await computed(await prefill.next())
        first = await decode.next()
        await until(lambda: kept(router) == 0)  # the other waits too long for a slot
        assert stats(router).expired_kv_tokens == 77  # but the first has been fetched
        await first.answer(ANSWER)
        await computed(await prefill.next())
        await (await decode.next()).answer(ANSWER)
        assert [(await soon(answer)).status_code for answer in asked] == [200, 200]
        assert stats(router).repeated_prefills == 1
        assert not router.troubles
        await router.settled()


async def test_kv_is_lost_with_its_engine() -> None:
    async with routed(3, slots=1, prefills=2, kept_s=30.0) as (router, (one, other, decode)):
        asked = [router.post(), router.post()]
        await computed(await one.next())
        await computed(await other.next())
        first = await decode.next()
        for worker in ("a", "b"):
            router.down(worker)
            router.dispatcher.apply(EngineFailed(worker))
        assert (kept(router, "a"), kept(router, "b")) == (0, 0)
        await first.answer(ANSWER)
        exchange = await decode.next()
        assert "kv_transfer_params" not in exchange.json  # nobody is there to compute it again
        await exchange.answer(ANSWER)
        assert [(await soon(answer)).status_code for answer in asked] == [200, 200]
        await router.settled()


async def test_mooncakes_engines_are_known_by_their_bootstrap_server() -> None:
    async with (
        scripted(3) as (prefill, decode, bootstrap),
        serving((prefill, decode), prefills=1, kept_s=30.0, bootstrap=bootstrap.url) as router,
    ):

        async def ask(engine_id: str | None) -> tuple[str, Exchange]:
            """The transfer's id, and what the decode worker is sent."""
            if engine_id is not None:
                query = await bootstrap.next()
                assert (query.method, query.target) == ("GET", "/query")
                await query.answer(json.dumps({"0": {"engine_id": engine_id}}).encode())
            first = await prefill.next()
            await computed(first, params=None)
            return first.json["kv_transfer_params"]["transfer_id"], await decode.next()

        def params(engine_id: str, transfer_id: str) -> dict[str, Any]:
            return {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": engine_id,
                "remote_bootstrap_addr": bootstrap.url,
                "transfer_id": transfer_id,
            }

        for engine_id in ("first", None):  # asked once
            asked = router.post()
            transfer_id, exchange = await ask(engine_id)
            assert exchange.json["kv_transfer_params"] == params("first", transfer_id)
            await exchange.answer(ANSWER)
            assert (await soon(asked)).status_code == 200
        asked = router.post()
        _, exchange = await ask(None)
        await exchange.answer(b"{}", 500)  # another engine is there now
        transfer_id, exchange = await ask("second")
        assert exchange.json["kv_transfer_params"] == params("second", transfer_id)
        await exchange.answer(ANSWER)
        assert (await soon(asked)).status_code == 200
        await router.settled()


@pytest.mark.parametrize("told", [b'{"7": {"engine_id": "x"}}', b"{" * 5000, None], ids=str)
async def test_a_bootstrap_server_that_says_nothing_of_use(
    told: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No prompt is computed whose KV could not be found."""
    if told is None:
        monkeypatch.setattr(kv_transfer, "_ANSWER_S", 0.05)
    async with (
        scripted(3) as (prefill, decode, bootstrap),
        serving(
            (prefill, decode), max_attempts=1, prefills=1, kept_s=30.0, bootstrap=bootstrap.url
        ) as router,
    ):
        asked = router.post()
        query = await bootstrap.next()
        if told is not None:
            await query.answer(told)
        exchange = await decode.next()
        assert "kv_transfer_params" not in exchange.json
        await exchange.answer(ANSWER)
        assert (await soon(asked)).status_code == 200
        assert (router.troubles, prefill.idle) == (["a"], True)
        await router.settled()


@pytest.mark.parametrize("status", [408, 500, 503])
async def test_a_prompt_that_is_answered_with_an_error_is_computed_elsewhere(status: int) -> None:
    async with routed(3, prefills=2, kept_s=30.0) as (router, (one, other, decode)):
        asked = router.post()
        await (await one.next()).answer(b'{"error": "m"}', status)
        await computed(await other.next())
        await (await decode.next()).answer(ANSWER)
        assert (await soon(asked)).content == ANSWER
        assert (router.troubles, stats(router).returned) == ([], 1)
        await router.settled()


async def test_a_prompt_that_several_fail_speaks_against_the_first_of_them() -> None:
    breakers = BreakerSettings(breaker_failures=1, max_ejected=1)
    async with routed(4, prefills=3, kept_s=30.0, breakers=breakers) as (router, engines):
        asked = router.post()
        for engine in engines[:2]:
            await (await engine.next()).answer(b'{"error": "m"}', 500)
        await (await engines[3].next()).answer(ANSWER)
        assert (await soon(asked)).content == ANSWER
        assert [w.spec.id for w in router.workers if w.breaker.ejected] == ["a"]
        await router.settled()


@pytest.mark.parametrize("failing", ["prefill", "decode"])
async def test_who_fails_at_once_does_not_draw_what_is_split(failing: str) -> None:
    """It looks idle, and is the first in the order."""
    breakers = BreakerSettings(breaker_failures=2)
    async with routed(4, prefills=2, kept_s=30.0, breakers=breakers) as (router, engines):
        bad = engines[0 if failing == "prefill" else 2]

        async def answer(engine: ScriptedServer) -> None:
            while True:
                exchange = await engine.next()
                if engine is bad:
                    await exchange.answer(b'{"error": "m"}', 500)
                elif engine in engines[:2]:
                    await computed(exchange)
                else:
                    await exchange.answer(ANSWER)

        answering = [asyncio.create_task(answer(engine)) for engine in engines]
        for _ in range(12):
            assert (await soon(router.post())).content == ANSWER
        for task in answering:
            task.cancel()
        ejected = {w.spec.id for w in router.workers if w.breaker.ejected}
        assert ejected == {"a" if failing == "prefill" else "c"}
        assert stats(router).fallbacks == 0
        groups = router.dispatcher.cluster.groups
        failed = stats(router).returned + stats(router).repeated_prefills
        assert (failed, sum(group.ejections for group in groups.values())) == (2, 1)
