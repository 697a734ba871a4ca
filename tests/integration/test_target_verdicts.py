"""Requests with targets are counted by whether they met them, or why not."""

import asyncio
import contextlib
import logging
import time

import pytest
from msgspec import structs

from router.core.events import SnapshotReceived
from router.core.queue.retry import Deadlines
from router.core.state.prefill_worker import PrefillWorker
from router.core.step_time import StepTime
from tests.support.clock import put_forward
from tests.support.core import snapshot
from tests.support.relaying import routed
from tests.support.scripted import DONE, ScriptedServer, scripted, soon, token_events, until
from tests.support.serving import Router, serving

PATH = "/v1/completions"
TOKENS = token_events(5)
NEVER, EVER = "0.001", "99999999"  # milliseconds: nobody is so quick, everybody is in time
LONG_S = 20.0
WHOLE = b'{"usage": {"prompt_tokens": 3, "completion_tokens": 2}}'


def wants(ttft_ms: str | None = None, tpot_ms: str | None = None) -> dict[str, str]:
    wished = {"X-SLO-TTFT-Ms": ttft_ms, "X-SLO-TPOT-Ms": tpot_ms}
    return {name: value for name, value in wished.items() if value is not None}


async def streamed(
    router: Router, engine: ScriptedServer, headers: dict[str, str], count: int = len(TOKENS)
) -> None:
    """A client of a stream reads so many tokens, each before the next one is sent."""
    body = {"model": "tiny", "prompt": [1], "stream": True}
    async with contextlib.AsyncExitStack() as stack:
        opened = router.http.stream("POST", PATH, json=body, headers=headers)
        asking = asyncio.create_task(stack.enter_async_context(opened))
        exchange = await engine.next()
        await exchange.start_stream()
        await exchange.chunks(TOKENS[0])
        chunks = (await soon(asking)).aiter_raw()
        assert await anext(chunks) == TOKENS[0]
        for token in TOKENS[1:count]:
            await exchange.chunks(token)
            assert await anext(chunks) == token
        if count == len(TOKENS):
            await exchange.chunks(DONE)
            await exchange.end_stream()
            assert [chunk async for chunk in chunks] == [DONE]
    if count < len(TOKENS):
        await exchange.left()
    await router.settled()


@pytest.mark.parametrize(
    ("headers", "verdict"),
    [
        (wants(), None),
        (wants(EVER, EVER), "met"),
        (wants(NEVER, EVER), "prompt"),
        (wants(EVER, NEVER), "tokens"),
    ],
    ids=str,
)
async def test_a_stream(
    headers: dict[str, str], verdict: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "router.proxy.request_log")
    async with routed() as (router, (engine,)):
        await streamed(router, engine, headers)
        await until(lambda: bool(caplog.records))
        assert dict(router.stats.verdicts) == ({verdict: 1} if verdict else {})
    (record,) = caplog.records
    fields = vars(record)["evenstep_fields"]
    assert fields.get("targets") == verdict
    assert fields.get("target_ttft_s") == (
        float(headers["X-SLO-TTFT-Ms"]) / 1000 if headers else None
    )


@pytest.mark.parametrize(
    ("headers", "status", "expected"),
    [
        (wants(EVER, EVER), 200, {"met": 1}),
        (wants(NEVER, NEVER), 200, {"tokens": 1}),
        (wants(NEVER), 200, {}),  # nobody sees its first token
        (wants(EVER, EVER), 400, {}),
        (wants(EVER, EVER), 500, {"failed": 1}),
    ],
    ids=str,
)
async def test_an_answer_that_comes_whole(
    headers: dict[str, str], status: int, expected: dict[str, int]
) -> None:
    async with routed(max_attempts=1) as (router, (engine,)):
        asked = router.post(headers=headers)
        await (await engine.next()).answer(WHOLE, status=status)
        assert (await soon(asked)).status_code == status
        await router.settled()
        assert dict(router.stats.verdicts) == expected


async def test_it_counts_at_the_group_that_served_it() -> None:
    async with scripted(2) as engines, serving(engines, slots=1, groups="xy") as router:
        asked = [router.post(headers=wants(EVER, EVER)) for _ in engines]
        for engine in engines:
            await (await engine.next()).answer(WHOLE)
        assert [(await soon(one)).status_code for one in asked] == [200, 200]
        deciders = router.dispatcher.deciders.items()
        verdicts = {name: dict(decider.stats.verdicts) for name, decider in deciders}
        assert verdicts == {"x": {"met": 1}, "y": {"met": 1}}


@pytest.mark.parametrize(("ttft_ms", "expected"), [(NEVER, {"queue": 1}), (EVER, {})])
async def test_one_whose_client_leaves_the_pool(ttft_ms: str, expected: dict[str, int]) -> None:
    async with routed(slots=1) as (router, (engine,)):
        running = router.post()
        exchange = await engine.next()
        leaving = router.post(headers=wants(ttft_ms))
        await until(lambda: router.waiting == 1)
        leaving.cancel()
        await until(lambda: router.waiting == 0)
        await exchange.answer(b"{}")
        assert (await soon(running)).status_code == 200
        assert dict(router.stats.verdicts) == expected


async def test_one_that_gets_no_slot_in_its_time_and_one_that_finds_the_pool_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with routed(slots=1, pool_size=1) as (router, (engine,)):
        running = router.post()
        exchange = await engine.next()
        late = router.post(headers={**wants(EVER), "X-Queue-Timeout-S": "600"})
        await until(lambda: router.waiting == 1)
        assert (await soon(router.post(headers=wants(EVER)))).status_code == 429
        # It never passes by itself.
        monkeypatch.setattr(router.dispatcher, "_clock", lambda: time.monotonic() + 600.0)
        assert (await soon(late)).status_code == 503
        await exchange.answer(b"{}")
        assert (await soon(running)).status_code == 200
        assert dict(router.stats.verdicts) == {"queue": 2}


@pytest.mark.parametrize(("tpot_ms", "expected"), [(EVER, {}), (NEVER, {"tokens": 1})])
async def test_a_stream_whose_client_leaves(tpot_ms: str, expected: dict[str, int]) -> None:
    async with routed() as (router, (engine,)):
        await streamed(router, engine, wants(EVER, tpot_ms), count=2)
        assert dict(router.stats.verdicts) == expected


@pytest.mark.parametrize("breaks", [False, True])
async def test_a_stream_that_takes_too_long_or_breaks_has_failed(breaks: bool) -> None:
    deadlines = Deadlines(request_timeout_s=LONG_S)
    async with routed(max_attempts=1, deadlines=deadlines) as (router, (engine,)):
        asked = router.post(headers=wants(EVER), stream=True)
        exchange = await engine.next()
        await exchange.start_stream()
        await exchange.chunks(TOKENS[0])
        await until(lambda: sum(router.stats.ttft_s.counts) == 1)
        if breaks:
            exchange.close()
        else:
            put_forward(LONG_S)
        assert b'"error"' in (await soon(asked)).content
        await router.settled()
        assert dict(router.stats.verdicts) == {"failed": 1}


@pytest.mark.parametrize("prefills", [0, 1])
async def test_one_whose_first_token_cannot_come_in_time(prefills: int) -> None:
    async with routed(2, prefills=prefills) as (router, engines):
        for stage in router.dispatcher.cluster.groups.values():
            for worker in stage.workers.values():
                if isinstance(worker, PrefillWorker):
                    told = snapshot("full", 1)
                    told = structs.replace(told, scheduled_prefill_tokens=3, step_s=9.5)
                    router.dispatcher.apply(SnapshotReceived(worker.spec.id, told, 0.0))
        router.dispatcher.fix_step_time(StepTime(9.5))
        refused = await soon(router.post(headers=wants("1000")))
        assert (refused.status_code, refused.headers["x-should-retry"]) == (429, "false")
        assert "retry-after" not in refused.headers
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("TooManyRequestsError", 429)
        said = "the prompt alone takes about 9.5 s, and the target is 1 s; no retry helps"
        assert error["message"] == said
        assert all(engine.idle for engine in engines)
        assert dict(router.stats.verdicts) == {"refused": 1}
        await router.settled()


async def test_one_that_others_delay_too_long() -> None:
    async with routed() as (router, (engine,)):
        running = router.post()
        exchange = await engine.next()
        router.dispatcher.fix_step_time(StepTime(0.5, per_request_s=9.0))
        refused = await soon(router.post(headers=wants("1000")))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "9")
        assert "x-should-retry" not in refused.headers
        message = refused.json()["error"]["message"]
        assert message == (
            "the first token would come in about 9.5 s, and the target is 1 s; retry later"
        )
        await exchange.answer(WHOLE)
        assert (await soon(running)).status_code == 200


async def test_who_may_wait_long_enough_or_wants_nothing_is_not_refused() -> None:
    async with routed() as (router, (engine,)):
        router.dispatcher.fix_step_time(StepTime(10.0))
        for headers in (wants("8000"), wants(None, NEVER), wants()):
            asked = router.post(headers=headers)
            await (await engine.next()).answer(WHOLE)
            assert (await soon(asked)).status_code == 200
        assert dict(router.stats.verdicts) == {}
