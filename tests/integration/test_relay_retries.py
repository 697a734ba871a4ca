"""Answers that are asked for anew elsewhere, and workers that are ejected for theirs."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx
import pytest

from router.core.events import WorkerUp
from router.core.state.breaker import BreakerSettings, BreakerState
from router.core.types import Outcome
from tests.support.relaying import routed
from tests.support.scripted import DONE, ScriptedServer, event, soon, token_events, until
from tests.support.serving import Router

TOKENS = token_events(5)
ERROR = b'{"error": {"message": "m", "type": "t", "param": null, "code": 1}}'


def breaker(router: Router, worker: str = "a") -> BreakerState:
    return router.dispatcher.cluster.worker(worker).breaker.state


@asynccontextmanager
async def answering(engines: Sequence[ScriptedServer], status: int = 200) -> AsyncIterator[None]:
    """These engines answer whatever comes at once."""

    async def answer(engine: ScriptedServer) -> None:
        while True:
            await (await engine.next()).answer(ERROR, status)

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(answer(engine)) for engine in engines]
        yield
        for task in running:
            task.cancel()


# what is asked for anew


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
async def test_another_worker_is_asked_when_one_answers_so(status: int) -> None:
    async with routed(2) as (router, engines):
        asked = router.post()
        first = await engines[0].next()
        await first.answer(ERROR, status)
        again = await engines[1].next()
        assert again.body == first.body
        assert again.headers["x-request-id"] == first.headers["x-request-id"] + "r1"
        await again.answer(b"{}")

        assert (await soon(asked)).content == b"{}"
        assert (router.stats.returned, router.outcomes) == (1, {Outcome.COMPLETED: 1})
        assert not router.troubles
        await router.settled()


@pytest.mark.parametrize("status", [400, 401, 404, 409, 413, 422, 501])
async def test_what_the_client_has_to_mend_is_asked_of_nobody_else(status: int) -> None:
    async with routed(2) as (router, engines):
        for _ in range(12):
            asked = router.post()
            await (await engines[0].next()).answer(ERROR, status)
            answer = await soon(asked)
            assert (answer.status_code, answer.content) == (status, ERROR)
        assert engines[1].idle
        assert breaker(router) is BreakerState.CLOSED
        assert router.workers[0].service.completions == 0
        await router.settled()


async def test_the_last_of_the_answers_passes_unchanged() -> None:
    async with routed(3, max_attempts=2) as (router, engines):
        asked = router.post()
        await (await engines[0].next()).answer(b"one", 503)
        await (await engines[1].next()).answer(b"two", 429, Retry_After="7", X_Thing="a")
        answer = await soon(asked)
        assert (answer.status_code, answer.content) == (429, b"two")
        assert (answer.headers["retry-after"], answer.headers["x-thing"]) == ("7", "a")
        assert engines[2].idle
        await router.settled()


async def test_no_worker_is_asked_twice_for_an_answer_that_it_has_given() -> None:
    async with routed(2) as (router, engines):
        asked = router.post()
        for number, engine in enumerate(engines):
            await (await engine.next()).answer(b"%d" % number, 500)
        assert (await soon(asked)).content == b"1"
        assert engines[0].idle
        await router.settled()


async def test_without_budget_answers_pass_as_they_are() -> None:
    async with routed(2, retry_budget=0.0, retry_min_per_s=0.1) as (router, engines):
        statuses: list[int] = []
        for _ in range(3):
            asked = router.post()
            await (await engines[0].next()).answer(ERROR, 500)
            if not statuses:
                await (await engines[1].next()).answer(b"{}")
            statuses.append((await soon(asked)).status_code)
        assert statuses == [200, 500, 500]
        assert (router.stats.returned, router.stats.unreturned) == (1, 2)
        await router.settled()


async def test_a_request_that_is_asked_for_anew_goes_before_those_that_wait() -> None:
    async with routed(2, slots=1) as (router, engines):
        first = router.post(prompt=[1])
        failing = await engines[0].next()
        second = router.post(prompt=[2])
        running = await engines[1].next()
        third = router.post(prompt=[3])
        await until(lambda: router.waiting == 1)
        await failing.answer(ERROR, 500)
        assert (await engines[0].next()).json["prompt"] == [3]  # the first avoids this one
        await running.answer(b"{}")
        again = await engines[1].next()
        assert again.json["prompt"] == [1]
        await again.answer(b"{}")
        assert (await soon(first)).status_code == (await soon(second)).status_code == 200
        third.cancel()
        await router.settled()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
async def test_a_stream_that_begins_with_an_error_is_asked_for_elsewhere(path: str) -> None:
    error: bytes = event({"error": {"message": "m", "type": "t", "code": 503}})
    if path == "/v1/messages":
        error = b"event: error\n" + error
    async with routed(2) as (router, engines):
        asked = router.post(path, stream=True, messages=[], max_tokens=1)
        await (await engines[0].next()).stream(error, DONE)
        await (await engines[1].next()).stream(*TOKENS, DONE)
        assert (await soon(asked)).content == b"".join(TOKENS) + DONE
        await router.settled()


@pytest.mark.parametrize("code", [b'"code":400', b'"param":null'])
async def test_an_error_that_is_the_clients_begins_its_stream(code: bytes) -> None:
    events = b'data: {"error":{"message":"m",' + code + b"}}\n\n" + DONE
    async with routed(2) as (router, engines):
        asked = router.post(stream=True)
        await (await engines[0].next()).stream(events)
        assert (await soon(asked)).content == events
        assert engines[1].idle
        assert router.workers[0].service.completions == 0
        await router.settled()


# workers that ask for a rest


async def test_a_worker_that_names_a_time_is_given_nothing_for_that_long() -> None:
    async with routed(2) as (router, engines):
        asked = router.post()
        await (await engines[0].next()).answer(ERROR, 429, Retry_After="3600")
        await (await engines[1].next()).answer(b"{}")
        await soon(asked)
        for _ in range(3):
            asked = router.post()
            await (await engines[1].next()).answer(b"{}")
            await soon(asked)
        assert engines[0].idle
        await router.settled()


async def test_who_waits_for_a_worker_that_rests_has_it_then() -> None:
    async with routed(slots=1) as (router, (engine,)):
        asked = router.post()
        exchange = await engine.next()
        waiting = router.post()
        await until(lambda: router.waiting == 1)
        answered_s = time.monotonic()
        await exchange.answer(ERROR, 503, Retry_After="1")
        assert (await soon(asked)).status_code == 503
        await (await engine.next()).answer(b"{}")
        assert time.monotonic() - answered_s >= 1.0
        assert (await soon(waiting)).status_code == 200
        await router.settled()


# workers that fail


FAST = BreakerSettings(breaker_failures=3, breaker_open_s=0.2, breaker_trials=1, slow_start_s=0)


async def test_an_engine_that_fails_at_once_does_not_attract_all_requests() -> None:
    """It looks idle: without a breaker the first free worker would be this one every time."""
    async with routed(3, breakers=BreakerSettings(breaker_failures=3)) as (router, engines):
        async with answering(engines[:1], 500), answering(engines[1:]):
            for _ in range(30):
                assert (await soon(router.post())).status_code == 200
        assert router.stats.returned == 3
        assert breaker(router) is BreakerState.OPEN
        assert not router.troubles  # its health is another matter
        await router.settled()


async def test_an_ejected_worker_comes_back_by_a_trial() -> None:
    async with routed(2, breakers=FAST) as (router, engines):
        async with answering(engines[:1], 500), answering(engines[1:]):
            for _ in range(3):
                await soon(router.post())
            assert breaker(router) is BreakerState.OPEN
            router.down("b")
            router.dispatcher.apply(WorkerUp("b"))
        async with answering(engines[1:]):
            asked: list[asyncio.Task[httpx.Response]] = []
            while engines[0].idle:
                asked.append(router.post())
                await soon(asyncio.sleep(0.01))
            await (await engines[0].next()).answer(b"{}")
            # Those that had not been sent by then may come to the first engine, too.
            async with answering(engines[:1]):
                await soon(asyncio.gather(*asked))
        assert breaker(router) is BreakerState.CLOSED
        await router.settled()


async def test_a_worker_that_others_fail_with_is_not_blamed() -> None:
    """Requests that every engine fails count against the first of them alone."""
    async with routed(3, breakers=BreakerSettings(breaker_failures=4), slots=1) as (
        router,
        engines,
    ):
        async with answering(engines, 500):
            for _ in range(3):
                assert (await soon(router.post())).status_code == 500
        assert [breaker(router, worker) for worker in "abc"] == [BreakerState.CLOSED] * 3
        await router.settled()


async def test_a_broken_stream_counts_against_its_worker() -> None:
    async with routed(2, breakers=BreakerSettings(breaker_failures=1)) as (router, engines):
        asked = router.post(stream=True)
        exchange = await engines[0].next()
        await exchange.start_stream()
        await exchange.chunks(TOKENS[0])
        await until(lambda: sum(router.stats.ttft_s.counts) == 1)
        exchange.reset()
        assert b"BadGatewayError" in (await soon(asked)).content
        assert breaker(router) is BreakerState.OPEN
        await router.settled()


async def test_a_client_that_leaves_counts_against_nobody() -> None:
    async with routed(2, breakers=BreakerSettings(breaker_failures=1)) as (router, engines):
        asked = router.post()
        exchange = await engines[0].next()
        asked.cancel()
        await exchange.left()
        await router.settled()
        assert breaker(router) is BreakerState.CLOSED
