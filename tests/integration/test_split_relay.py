"""A request whose prompt one engine computes and another decodes, between scripted engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from router.types import Outcome, WorkerUp
from tests.support.relaying import routed
from tests.support.scripted import (
    DONE,
    Exchange,
    ScriptedServer,
    scripted,
    soon,
    token_events,
    until,
)
from tests.support.serving import Router, serving

PARAMS = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[3, 1]]}
TOKENS = token_events(5)
ANSWER = b'{"choices": [], "usage": {"prompt_tokens": 77, "total_tokens": 80}}'
Pair = tuple[Router, ScriptedServer, ScriptedServer]


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    """A router before a prefill worker a and a decode worker b."""
    async with routed(2, prefills=1, kept_s=30.0) as (router, (prefill, decode)):
        yield router, prefill, decode


async def computed(exchange: Exchange, prompt_tokens: int = 77, params: Any = PARAMS) -> None:
    """The answer of a prefill worker."""
    answer = {"usage": {"prompt_tokens": prompt_tokens}, "kv_transfer_params": params}
    await exchange.answer(json.dumps(answer).encode())


def kept(router: Router, worker: str = "a") -> int:
    return int(router.dispatcher.cluster.worker(worker).kept_tokens)  # type: ignore[attr-defined]


def stats(router: Router) -> Any:
    return router.dispatcher.deciders["default/prefill"].stats


async def test_a_prompt_is_computed_then_decoded(pair: Pair) -> None:
    router, prefill, decode = pair
    asked = router.post(
        stream=True, max_tokens=50, n=3, min_tokens=9, stream_options={"include_usage": True}
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
        "n": 3,
        "min_tokens": 9,
        "stream_options": {"include_usage": True},
        "kv_transfer_params": PARAMS,
    }
    assert second.headers["x-request-id"] == first.headers["x-request-id"] + "r1"
    assert kept(router) == 77
    assert router.dispatcher.cluster.worker("b").load_tokens == 3 * 77  # as counted, n times
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
        await router.settled()


@pytest.mark.parametrize(
    "fields",
    [
        {"echo": True},
        {"prompt": ["one", "two"]},
        {"prompt": [[1, 2], [3]]},
        {"prompt_logprobs": 2},
        {"kv_transfer_params": {"x": 1}},
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


@pytest.mark.parametrize("failure", ["status", "reset", "nonsense"])
async def test_a_failed_prefill_is_made_elsewhere(failure: str) -> None:
    async with routed(3, prefills=2, kept_s=30.0) as (router, (one, other, decode)):
        asked = router.post()
        exchange = await one.next()
        if failure == "status":
            await exchange.answer(b"{}", 500)
        elif failure == "reset":
            exchange.reset()
        else:
            await exchange.answer(b'{"usage": 7}')
        await computed(await other.next())
        await (await decode.next()).answer(ANSWER)
        assert (await soon(asked)).content == ANSWER
        assert router.troubles == ["a"]
        assert stats(router).returned == 1
        await router.settled()


async def test_prefills_that_fail_everywhere_end_whole(pair: Pair) -> None:
    router, prefill, decode = pair

    async def fail() -> None:
        while True:
            await (await prefill.next()).answer(b"{}", 500)

    failing = asyncio.create_task(fail())
    asked = router.post()
    exchange = await decode.next()
    assert "kv_transfer_params" not in exchange.json
    await exchange.answer(ANSWER)
    assert (await soon(asked)).content == ANSWER
    assert stats(router).fallbacks == 1
    failing.cancel()
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


async def test_kv_that_is_gone_is_computed_again() -> None:
    async with routed(2, slots=1, prefills=1, kept_s=0.01) as (router, (prefill, decode)):
        asked = [router.post(), router.post()]
        for _ in asked:
            await computed(await prefill.next())
        first = await decode.next()
        await until(lambda: kept(router) == 0)  # the other waits too long for a slot
        assert stats(router).expired_kv_tokens == 2 * 77
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
        router.down("a")
        router.down("b")
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
            first = await prefill.next()
            await computed(first, params=None)
            if engine_id is not None:
                query = await bootstrap.next()
                assert (query.method, query.target) == ("GET", "/query")
                await query.answer(json.dumps({"0": {"engine_id": engine_id}}).encode())
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


async def test_a_bootstrap_server_that_says_nothing_of_use() -> None:
    async with (
        scripted(3) as (prefill, decode, bootstrap),
        serving(
            (prefill, decode), max_attempts=1, prefills=1, kept_s=30.0, bootstrap=bootstrap.url
        ) as router,
    ):
        asked = router.post()
        await computed(await prefill.next(), params=None)
        await (await bootstrap.next()).answer(b'{"7": {"engine_id": "x"}}')
        exchange = await decode.next()
        assert "kv_transfer_params" not in exchange.json
        await exchange.answer(ANSWER)
        assert (await soon(asked)).status_code == 200
        assert router.troubles == ["a"]
        await router.settled()


@pytest.mark.parametrize("phase", ["prefill", "ready", "decode"])
async def test_a_client_that_leaves_is_forgotten(phase: str) -> None:
    async with routed(2, slots=1, prefills=1, kept_s=0.5) as (router, (prefill, decode)):
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
        await until(lambda: kept(router) == 0)
        expected = 0 if phase == "prefill" else 77
        assert stats(router).expired_kv_tokens == expected
        await router.settled()


async def test_the_queue_before_prefill_is_bounded() -> None:
    async with routed(2, prefills=1, kept_s=30.0, pool_limit=1) as (router, (prefill, decode)):
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


async def test_ready_requests_hold_back_the_prefill_workers() -> None:
    settings = {"slots": 1, "prefills": 1, "kept_s": 30.0, "pool_limit": 2}
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
