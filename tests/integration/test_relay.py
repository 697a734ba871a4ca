"""One request's way through the router, between real clients and scripted engines."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from router.engines.upstream import _Connection
from router.types import Outcome
from tests.support.scripted import (
    DONE,
    SSE,
    TIMEOUT_S,
    Exchange,
    ScriptedServer,
    event,
    head,
    scripted,
    soon,
    token_events,
    until,
)
from tests.support.serving import Router, serving

TOKENS = token_events(5)
JSON = "application/json"


class RawClient:
    """A client that sees the framing of an answer.

    Attributes:
        body: what has come of it.
    """

    def __init__(self, router: Router) -> None:
        self._port = router.port
        self.body = b""

    async def __aenter__(self) -> RawClient:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.transport.abort()

    async def post(self, length: int | None = None) -> None:
        """Send a request, or only so many bytes of its body."""
        body = json.dumps({"model": "tiny", "prompt": [1, 2, 3]}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body[:length])
        await self.writer.drain()

    async def read_until(self, text: bytes) -> None:
        """Read chunks until the body has this in it."""
        while text not in self.body:
            assert await self._chunk(), self.body

    async def read_to_end(self) -> bytes:
        """Read up to the terminating chunk; the body, and nothing comes behind it."""
        while await self._chunk():
            pass
        assert not self.reader._buffer  # type: ignore[attr-defined]
        return self.body

    async def _chunk(self) -> bytes:
        async with asyncio.timeout(TIMEOUT_S):
            if not self.body:
                head = await self.reader.readuntil(b"\r\n\r\n")
                assert b"transfer-encoding: chunked" in head.lower(), head
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            chunk = (await self.reader.readexactly(size + 2))[:-2]
        self.body += chunk
        return chunk


@asynccontextmanager
async def routed(
    engines: int = 1, **settings: Any
) -> AsyncIterator[tuple[Router, list[ScriptedServer]]]:
    async with scripted(engines) as servers, serving(servers, **settings) as router:
        yield router, servers


@pytest.fixture
async def one() -> AsyncIterator[tuple[Router, ScriptedServer]]:
    """A router before one engine."""
    async with routed() as (router, (engine,)):
        yield router, engine


One = tuple[Router, ScriptedServer]


# answers pass unchanged


@pytest.mark.parametrize("status", [200, 201, 400, 401, 404, 408, 422, 429, 500, 503])
async def test_whole_answers_pass_unchanged(one: One, status: int) -> None:
    router, engine = one
    body = b'{"odd":  "sp\xc3\xa4cing", "n": 1.0}\n'

    async def ask(url: str) -> httpx.Response:
        asked = asyncio.create_task(
            router.http.post(f"{url}/v1/completions", content=b'{"model": "tiny"}')
        )
        await (await engine.next()).answer(body, status, Retry_After="7", X_Thing="a, b")
        return await soon(asked)

    direct, relayed = await ask(engine.url), await ask(router.url)

    assert (relayed.status_code, relayed.content) == (direct.status_code, direct.content)
    assert dict(relayed.headers) == dict(direct.headers)
    assert router.outcomes == {Outcome.FAILED if status >= 500 else Outcome.COMPLETED: 1}
    assert not router.troubles
    await router.settled()


async def test_streams_pass_unchanged_however_they_are_cut(one: One) -> None:
    router, engine = one
    answer = b"".join(TOKENS) + b": a comment\n\nevent: x\r\ndata: 1\r\n\r\n" + DONE
    for size in (1, 7, 40, len(answer)):
        asked = router.post(stream=True)
        exchange = await engine.next()
        await exchange.stream(*(answer[i : i + size] for i in range(0, len(answer), size)))
        relayed = await soon(asked)
        assert relayed.content == answer
        assert relayed.headers["content-type"] == SSE
    assert router.outcomes == {Outcome.COMPLETED: 4}
    await router.settled()


async def test_events_pass_when_they_come(one: One) -> None:
    router, engine = one
    async with RawClient(router) as client:
        await client.post()
        exchange = await engine.next()
        await exchange.start_stream()
        for token in TOKENS:
            await exchange.chunks(token)
            await client.read_until(token)
        await exchange.end_stream()
        assert await client.read_to_end() == b"".join(TOKENS)


@pytest.mark.parametrize("end", [b"data: no empty line", b"data: [DONE]\n", b""])
async def test_a_stream_that_ends_in_its_own_way_passes_too(one: One, end: bytes) -> None:
    router, engine = one
    asked = router.post(stream=True)
    await (await engine.next()).stream(*TOKENS, *([end] if end else []))

    assert (await soon(asked)).content == b"".join(TOKENS) + end
    assert router.outcomes == {Outcome.COMPLETED: 1}


async def test_hop_by_hop_headers_go_no_further(one: One) -> None:
    router, engine = one
    asked = router.post(
        headers={
            "Connection": "keep-alive, X-Mine",
            "Keep-Alive": "timeout=9",
            "Proxy-Authorization": "Basic x",
            "TE": "trailers",
            "X-Mine": "1",
            "X-Yours": "1",
        }
    )
    exchange = await engine.next()
    for name in ("connection", "keep-alive", "proxy-authorization", "te", "x-mine"):
        assert name not in exchange.headers
    assert exchange.headers["x-yours"] == "1"
    await exchange.answer(
        b"{}", Connection="keep-alive, X-Mine", Keep_Alive="timeout=9", X_Mine="1", X_Yours="1"
    )

    headers = (await soon(asked)).headers

    assert not {"connection", "keep-alive", "x-mine"} & set(headers)
    assert headers["x-yours"] == "1"


async def test_what_the_engine_is_told(one: One) -> None:
    router, engine = one
    body = b'{ "model":"tiny", "prompt":"h\xc3\xa9", "vllm_xargs": {"a": 1} }'
    asked = asyncio.create_task(
        router.http.post(
            "/v1/completions?debug=1&x=%20",
            content=body,
            headers={
                "Authorization": "Bearer k",
                "X-Session-ID": "s",
                "X-Data-Parallel-Rank": "7",
                "X-Request-Id": "client-1",
                "Accept-Encoding": "gzip",
                "Expect": "100-continue",
            },
        )
    )
    exchange = await engine.next()

    assert (exchange.method, exchange.body) == ("POST", body)
    assert exchange.target == "/v1/completions?debug=1&x=%20"
    assert re.fullmatch(r"es-[0-9a-f]{20}", exchange.headers["x-request-id"])
    assert exchange.headers["host"] == f"127.0.0.1:{engine.port}"
    assert exchange.headers["authorization"] == "Bearer k"
    assert exchange.headers["x-session-id"] == "s"
    assert not {"x-data-parallel-rank", "accept-encoding", "expect"} & set(exchange.headers)
    await exchange.answer(b"{}")
    await soon(asked)


async def test_ranks_behind_one_url_are_told_apart_by_the_router() -> None:
    async with scripted() as (engine,), serving([engine, engine], slots=1) as router:
        asked = [router.post(headers={"X-data-parallel-rank": "7"}) for _ in range(2)]
        exchanges = [await engine.next(), await engine.next()]

        assert {exchange.headers["x-data-parallel-rank"] for exchange in exchanges} == {"0", "1"}
        for exchange in exchanges:
            await exchange.answer(b"{}")
        await soon(asyncio.gather(*asked))


@pytest.mark.parametrize(
    ("fields", "slots"),
    [
        ({"n": 3}, 3),
        ({"prompt": ["a", "b"]}, 2),
        ({"prompt": [[1], [2]], "n": 2}, 4),
        ({"prompt": None, "messages": [{"role": "user", "content": "hi"}], "n": 2}, 2),
    ],
)
async def test_a_request_takes_as_many_slots_as_it_becomes_requests(
    fields: dict[str, Any], slots: int
) -> None:
    async with routed(slots=4) as (router, (engine,)):
        asked = router.post(**fields)
        exchange = await engine.next()
        assert router.free_slots() == 4 - slots
        await exchange.answer(b"{}")
        await soon(asked)
        await router.settled()


@pytest.mark.parametrize("together", [1, 3, 5, 40])
async def test_progress_is_told_however_events_come_together(one: One, together: int) -> None:
    router, engine = one
    tokens = token_events(80)
    async with RawClient(router) as client:
        await client.post()
        exchange = await engine.next()
        await exchange.start_stream()
        for i in range(0, 80, together):
            await exchange.chunks(b"".join(tokens[i : i + together]))
            await client.read_until(tokens[i])

        assert router.dispatcher.cluster.worker("a").load_tokens >= 3 + 32

        await exchange.end_stream()
        await client.read_to_end()
        await router.settled()


async def test_the_length_of_a_short_answer_is_told_at_its_end(
    one: One, monkeypatch: pytest.MonkeyPatch
) -> None:
    router, engine = one
    told = []
    monkeypatch.setattr(router.dispatcher, "progress", lambda _, tokens: told.append(tokens))
    asked = router.post(stream=True)
    await (await engine.next()).stream(*token_events(5), DONE)
    await soon(asked)
    await router.settled()
    assert told == [5]


# clients that leave


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


# back-pressure


async def test_a_slow_client_slows_the_engine_down(one: One) -> None:
    router, engine = one
    big = event({"text": "x" * 65_536})
    count = 512
    async with RawClient(router) as client:
        await client.post()
        exchange = await engine.next()
        sending = asyncio.create_task(exchange.stream(*[big] * count))
        await until(lambda: bool(router.upstream.answers))
        connection = router.upstream.answers[0]._connection
        assert connection is not None
        transport = connection._transport
        assert transport is not None
        await until(lambda: not transport.is_reading())
        assert exchange.writer.transport.get_write_buffer_size() > len(big) * count // 2

        assert await client.read_to_end() == big * count
        await soon(sending)
    await router.settled()


async def test_many_at_once_leave_nothing_behind() -> None:
    async with routed(2, slots=4) as (router, engines):
        asked = [router.post(stream=True) for _ in range(40)]

        async def answer(engine: ScriptedServer) -> None:
            while True:
                await (await engine.next()).stream(*TOKENS, DONE)

        answering = [asyncio.create_task(answer(engine)) for engine in engines]
        answers = await soon(asyncio.gather(*asked))
        for task in answering:
            task.cancel()

        assert {answer.content for answer in answers} == {b"".join(TOKENS) + DONE}
        assert router.outcomes == {Outcome.COMPLETED: 40}
        await router.settled()


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
    """Recall what is at the first worker in the very turn that hands the next bytes on."""
    wake = _Connection._wake

    def wake_and_recall(connection: _Connection) -> None:
        wake(connection)
        monkeypatch.setattr(_Connection, "_wake", wake)
        router.attempts.recall("a", "silent")

    monkeypatch.setattr(_Connection, "_wake", wake_and_recall)


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


@pytest.mark.parametrize(
    ("prompt", "body", "learned"),
    [
        ("x" * 4000, {"usage": {"completion_tokens": 1, "prompt_tokens": 4000}}, True),
        ([7] * 4000, {"usage": {"prompt_tokens": 4000}}, False),
        (["x" * 4000, "y"], {"usage": {"prompt_tokens": 4001}}, False),
        ("x" * 4000, {"text": '"usage": {"prompt_tokens": 4000}'}, False),
        ("x" * 4000, {"error": "no"}, False),
    ],
    ids=["text", "token ids", "several", "as text", "no usage"],
)
async def test_what_an_engine_counts_in_a_prompt_is_learned(
    one: One, prompt: Any, body: Any, learned: bool
) -> None:
    router, engine = one
    asked = router.post(prompt=prompt)
    await (await engine.next()).answer(json.dumps(body).encode())
    await soon(asked)
    rate = router.dispatcher.cluster.groups["default"].token_rate
    assert (rate.bytes_per_token < 2) is learned
