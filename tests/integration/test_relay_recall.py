"""Attempts that the router itself takes back from a worker."""

import json

import pytest

from router.core.types import Outcome
from router.engines.engine_connection import Connection
from tests.support.relaying import One, routed
from tests.support.scripted import DONE, head, soon, token_events, until
from tests.support.serving import Router

TOKENS = token_events(5)
JSON = "application/json"


async def test_attempts_at_a_worker_that_is_out_of_use_are_ended() -> None:
    async with routed() as (router, (engine,)):
        started, unstarted = router.post(stream=True), router.post()
        streaming, silent = await engine.next(), await engine.next()
        if streaming.json.get("stream") is None:
            streaming, silent = silent, streaming
        await streaming.start_stream()
        await streaming.chunks(*TOKENS[:2])
        await until(lambda: router.stats.ttft_s.counts != [0] * len(router.stats.ttft_s.counts))

        router.attempts.break_off("a", "in lockstep with b: gone")
        again = await engine.next()
        await again.answer(b"{}")

        assert again.headers["x-request-id"] == silent.headers["x-request-id"] + "r1"
        assert (await soon(unstarted)).content == b"{}"
        body = (await soon(started)).content
        assert body.startswith(b"".join(TOKENS[:2]))
        (last,) = [json.loads(line[6:]) for line in body.splitlines() if b"error" in line]
        assert "in lockstep with b: gone" in last["error"]["message"]
        assert router.troubles == []
        await silent.left()
        await streaming.left()
        await router.settled()


def recall_at_once(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recall what is at the first worker in the very turn in which the next bytes come."""
    receive = Connection.data_received

    def recall_and_receive(connection: Connection, data: bytes) -> None:
        monkeypatch.setattr(Connection, "data_received", receive)
        router.attempts.recall("a", "silent")
        receive(connection, data)

    monkeypatch.setattr(Connection, "data_received", recall_and_receive)


@pytest.mark.parametrize("events", [TOKENS[:2], [DONE], []], ids=["tokens", "the end", "nothing"])
async def test_a_stream_that_is_recalled_as_it_begins_is_made_once(
    one: One, events: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    router, engine = one
    asked = router.post(stream=True)
    exchange = await engine.next()
    await exchange.start_stream()
    await until(lambda: bool(router.upstream.answers))

    recall_at_once(router, monkeypatch)
    await exchange.chunks(*events)
    if events != TOKENS[:2]:
        await exchange.end_stream()
    await (await engine.next()).stream(*TOKENS, DONE)

    assert (await soon(asked)).content == b"".join(TOKENS) + DONE
    assert router.outcomes == {Outcome.COMPLETED: 1}
    await router.settled()


async def test_a_whole_answer_that_is_recalled_as_it_comes_is_made_once(
    one: One, monkeypatch: pytest.MonkeyPatch
) -> None:
    router, engine = one
    asked = router.post()
    exchange = await engine.next()
    await exchange.send(head(200, JSON, content_length="2"))
    await until(lambda: bool(router.upstream.answers))

    recall_at_once(router, monkeypatch)
    await exchange.send(b"{}")
    exchange.ended.set()
    await (await engine.next()).answer(b'{"again": 1}')

    assert (await soon(asked)).content == b'{"again": 1}'
    assert router.outcomes == {Outcome.COMPLETED: 1}
    await router.settled()


async def test_a_request_that_has_begun_is_not_recalled(one: One) -> None:
    router, engine = one
    asked = router.post(stream=True)
    exchange = await engine.next()
    await exchange.start_stream()
    await exchange.chunks(TOKENS[0])
    await until(lambda: sum(router.stats.ttft_s.counts) == 1)
    router.attempts.recall("a", "silent")
    await exchange.chunks(*TOKENS[1:], DONE)
    await exchange.end_stream()

    assert (await soon(asked)).content == b"".join(TOKENS) + DONE
    await router.settled()
