"""A request whose prompt one engine computes and another decodes, between scripted engines."""

import asyncio
import time
from typing import Any

import httpx
import pytest
from msgspec import structs

from router.core.events import SnapshotReceived
from router.core.step_time import StepTime
from router.core.types import Outcome
from tests.support.core import snapshot
from tests.support.relaying import routed
from tests.support.scripted import (
    DONE,
    scripted,
    soon,
    until,
)
from tests.support.serving import Router, serving
from tests.support.splitting import ANSWER, PARAMS, TOKENS, Pair, computed, kept, stats, streaming

# It never passes by itself: a test puts the dispatcher's clock forward.
KEPT_S = 600.0


async def test_a_prompt_is_computed_then_decoded(pair: Pair) -> None:
    router, prefill, decode = pair
    asked = router.post(
        stream=True, max_tokens=50, n=1, min_tokens=9, stream_options={"include_usage": True}
    )
    first = await prefill.next()
    sent = first.json
    assert (sent["max_tokens"], sent["n"], sent["stream"]) == (1, 1, False)
    assert sent["prompt"] == [1, 2, 3]
    assert sent["kv_transfer_params"]["do_remote_decode"] is True
    assert not {"min_tokens", "stream_options"} & sent.keys()
    await computed(first)
    second = await decode.next()
    assert second.json == {
        "model": "tiny",
        "prompt": [1, 2, 3],
        "stream": True,
        "max_tokens": 50,
        "n": 1,
        "min_tokens": 9,
        "stream_options": {"include_usage": True},
        "kv_transfer_params": PARAMS,
    }
    assert second.headers["x-request-id"] == first.headers["x-request-id"] + "r1"
    assert kept(router) == 77
    assert router.dispatcher.cluster.worker("b").load_tokens == 77  # as counted
    await second.stream(*TOKENS, DONE)
    answer = await soon(asked)
    assert answer.content == b"".join(TOKENS) + DONE
    assert kept(router) == 0
    assert router.outcomes == stats(router).outcomes == {Outcome.COMPLETED: 1}
    await router.settled()


async def test_without_params_the_clients_body_goes_on_unchanged() -> None:
    async with routed(2, prefills=1) as (router, (prefill, decode)):
        asked = asyncio.create_task(
            router.http.post(
                "/v1/chat/completions", content=b'{"max_completion_tokens":9, "x": 1.0}'
            )
        )
        first = await prefill.next()
        assert first.json == {
            "max_completion_tokens": 1,
            "max_tokens": 1,
            "x": 1.0,
            "n": 1,
            "stream": False,
        }
        await computed(first, params=None)
        second = await decode.next()
        assert second.body == b'{"max_completion_tokens":9, "x": 1.0}'
        assert kept(router) == 0
        await second.answer(ANSWER)
        assert (await soon(asked)).content == ANSWER
        assert stats(router).lost_prefills == 0
        await router.settled()


async def test_several_answers_to_a_prompt_that_others_find_by_content() -> None:
    async with routed(2, prefills=1) as (router, (prefill, decode)):
        asked = router.post(n=3)
        first = await prefill.next()
        assert first.json["n"] == 1
        computing = router.dispatcher.cluster.worker("a")
        assert (computing.requests, computing.load_tokens) == (1, 3)
        await computed(first)  # where its KV lies was not asked
        second = await decode.next()
        assert second.json == {"model": "tiny", "prompt": [1, 2, 3], "n": 3}
        assert router.dispatcher.cluster.worker("b").load_tokens == 3 * 77
        await second.answer(ANSWER)
        assert (await soon(asked)).content == ANSWER
        await router.settled()


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"best_of": 2},
        {"echo": True},
        {"prompt": ["one", "two"]},
        {"prompt": [[1, 2], [3]]},
        {"prompt_logprobs": 2},
        {"prompt_logprobs": 0},
        {"kv_transfer_params": {"x": 1}},
        {"kv_transfer_params": None},
        {"prompt_embeds": "abc"},
        {"use_beam_search": True},
        {"messages": [{"content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_what_cannot_be_split_goes_whole(pair: Pair, fields: dict[str, Any]) -> None:
    router, prefill, decode = pair
    asked = router.post(**fields)
    exchange = await decode.next()
    assert exchange.json == {"model": "tiny", "prompt": [1, 2, 3], **fields}
    await exchange.answer(ANSWER)
    await soon(asked)
    assert prefill.idle
    await router.settled()


async def test_one_prompt_in_a_list_is_split(pair: Pair) -> None:
    router, prefill, decode = pair
    asked = router.post(prompt=["one"])
    await computed(await prefill.next())
    await (await decode.next()).answer(ANSWER)
    assert (await soon(asked)).status_code == 200


async def test_what_the_client_must_mend_is_passed_on(pair: Pair) -> None:
    router, prefill, decode = pair
    asked = router.post()
    await (await prefill.next()).answer(b'{"error": "too long"}', 400)
    answer = await soon(asked)
    assert (answer.status_code, answer.content) == (400, b'{"error": "too long"}')
    assert decode.idle
    await router.settled()


@pytest.mark.parametrize("phase", ["prefill", "ready", "decode"])
async def test_a_client_that_leaves_is_forgotten(
    phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with routed(2, slots=1, prefills=1, kept_s=KEPT_S) as (router, (prefill, decode)):
        blocking = router.post() if phase == "ready" else None
        if blocking is not None:
            await computed(await prefill.next())
            blocker = await decode.next()
        asked = router.post(stream=True)
        exchange = await prefill.next()
        if phase != "prefill":
            await computed(exchange)
            if phase == "decode":
                exchange = await decode.next()
            else:
                await until(lambda: router.waiting == 1)
        asked.cancel()
        if phase == "ready":
            await until(lambda: not router.waiting)
            await blocker.answer(ANSWER)
            assert blocking is not None
            await soon(blocking)
        else:
            await exchange.left()
            await until(lambda: not router.in_flight)
        # Not sooner: of what a worker still decodes the KV counts as fetched when its lease ends.
        monkeypatch.setattr(router.dispatcher, "_clock", lambda: time.monotonic() + KEPT_S)
        await until(lambda: kept(router) == 0)
        expected = 0 if phase == "prefill" else 77
        assert stats(router).expired_kv_tokens == expected
        await router.settled()


async def test_a_client_that_leaves_before_its_prompt_is_computed_costs_nothing(pair: Pair) -> None:
    router, prefill, decode = pair
    computing = router.post(prompt=[1] * 5000)
    first = await prefill.next()
    asked = router.post()
    await until(lambda: router.waiting == 1)
    asked.cancel()
    await until(lambda: not router.waiting)
    await computed(first)
    await (await decode.next()).answer(ANSWER)
    assert (await soon(computing)).status_code == 200
    assert prefill.idle
    assert stats(router).outcomes == {Outcome.COMPLETED: 1, Outcome.ABORTED: 1}
    await router.settled()


async def test_a_client_that_leaves_in_mid_answer_leaves_no_kv_behind(pair: Pair) -> None:
    router, _, _ = pair
    asked, exchange = await streaming(pair)
    await exchange.chunks(TOKENS[0])
    await until(lambda: kept(router) == 0)
    asked.cancel()
    await exchange.left()
    await router.settled()
    assert (stats(router).outcomes, router.outcomes, stats(router).expired_kv_tokens) == (
        {Outcome.COMPLETED: 1},
        {Outcome.ABORTED: 1},
        0,
    )


async def test_ranks_behind_one_url_are_told_apart() -> None:
    async with (
        scripted(2) as (prefill, decode),
        serving((prefill, prefill, decode), prefills=2, kept_s=30.0) as router,
    ):
        asked = [router.post(prompt=[1] * 5000) for _ in range(2)]
        for rank in ("0", "1"):
            first = await prefill.next()
            assert first.headers["x-data-parallel-rank"] == rank
            await computed(first)
            second = await decode.next()
            assert "x-data-parallel-rank" not in second.headers
            await second.answer(ANSWER)
        assert [(await soon(answer)).status_code for answer in asked] == [200, 200]
        await router.settled()


async def test_the_queue_before_prefill_is_bounded() -> None:
    async with routed(2, prefills=1, kept_s=30.0, pool_size=1) as (router, (prefill, decode)):
        asked: list[asyncio.Task[httpx.Response]] = [router.post(prompt=list(range(5000)))]
        exchange = await prefill.next()
        asked.append(router.post())
        await until(lambda: router.waiting == 1)
        assert (await soon(router.post())).status_code == 429
        await computed(exchange)
        await (await decode.next()).answer(ANSWER)
        await computed(await prefill.next())
        await (await decode.next()).answer(ANSWER)
        assert [(await soon(answer)).status_code for answer in asked] == [200, 200]
        await router.settled()


async def test_a_prefill_worker_that_has_no_room_in_time() -> None:
    settings = {"prefills": 1, "kept_s": 30.0, "queue_timeout_s": 0.05}
    async with routed(2, **settings) as (router, (prefill, decode)):
        asked = router.post(prompt=list(range(5000)))
        exchange = await prefill.next()
        late = await soon(router.post())
        assert late.status_code == 503
        assert "no prefill worker had room within 0.05 s" in late.text
        await computed(exchange)
        await (await decode.next()).answer(ANSWER)
        assert (await soon(asked)).status_code == 200
        await router.settled()


async def test_ready_requests_hold_back_the_prefill_workers() -> None:
    settings = {"slots": 1, "prefills": 1, "kept_s": 30.0, "pool_size": 2}
    async with routed(2, **settings) as (router, (prefill, decode)):
        asked = [router.post() for _ in range(3)]
        for _ in asked:
            await computed(await prefill.next())
        running = await decode.next()
        asked.append(router.post())
        await until(lambda: router.waiting == 3)  # two are ready, so that the fourth is held back
        assert prefill.idle
        await running.answer(ANSWER)
        await computed(await prefill.next())
        for _ in range(3):
            await (await decode.next()).answer(ANSWER)
        assert [(await soon(answer)).status_code for answer in asked] == [200] * 4
        await router.settled()


def slow(router: Router) -> None:
    """The prefill worker tells that it needs a second for each token, the other one does not."""
    router.dispatcher.fix_step_time(StepTime(1e-3, per_prompt_token_s=1e-6))
    told = structs.replace(snapshot("full", 1, step_s=100.0), scheduled_prefill_tokens=100)
    router.dispatcher.apply(SnapshotReceived("a", told, time.monotonic()))


async def test_a_prompt_that_is_sooner_computed_by_the_decode_worker_goes_there(pair: Pair) -> None:
    router, prefill, decode = pair
    slow(router)
    asked = router.post(stream=True)
    exchange = await decode.next()
    assert exchange.json == {"model": "tiny", "prompt": [1, 2, 3], "stream": True}
    assert prefill.idle
    await exchange.stream(*TOKENS, DONE)
    assert (await soon(asked)).content == b"".join(TOKENS) + DONE
    assert stats(router).passed == 1
    assert router.outcomes == {Outcome.COMPLETED: 1}
    await router.settled()


@pytest.mark.parametrize("breaks", [True, False])
async def test_where_it_fails_a_prefill_worker_computes_it(breaks: bool) -> None:
    async with routed(3, prefills=1, kept_s=30.0) as (router, (prefill, first, other)):
        slow(router)
        asked = router.post()
        exchange = await first.next()
        if breaks:
            exchange.reset()
        else:
            await exchange.answer(b"{}", 500)
        await computed(await prefill.next())
        again = await other.next()
        assert again.json["kv_transfer_params"] == PARAMS
        await again.answer(ANSWER)
        assert (await soon(asked)).content == ANSWER
        assert first.idle
        await router.settled()


async def test_nothing_goes_past_those_who_wait_for_a_slot() -> None:
    async with routed(2, slots=1, prefills=1, kept_s=30.0) as (router, (prefill, decode)):
        slow(router)
        asked = [router.post(), router.post()]
        first = await decode.next()
        await computed(await prefill.next())
        await until(lambda: router.waiting == 1)
        asked.append(router.post())
        await computed(await prefill.next())
        await first.answer(ANSWER)
        for _ in range(2):
            await (await decode.next()).answer(ANSWER)
        assert [(await soon(answer)).status_code for answer in asked] == [200] * 3
        assert stats(router).passed == 1
        await router.settled()
