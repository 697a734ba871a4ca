"""One request's way through the router, between real clients and scripted engines."""

import asyncio
import json
import re
import time
from typing import Any

import httpx
import pytest

from router.core.events import Event, Progressed, WorkerDown
from router.core.types import Outcome
from router.recording.lines import read
from router.recording.recorder import Recorder, Setting
from tests.support.relaying import One, RawClient, routed
from tests.support.scripted import (
    DONE,
    SSE,
    ScriptedServer,
    event,
    scripted,
    soon,
    token_events,
    until,
)
from tests.support.serving import serving

TOKENS = token_events(5)
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


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
    own = {"x-request-id": relayed.headers["x-request-id"]}
    assert dict(relayed.headers) == {**direct.headers, **own}
    assert router.outcomes == {Outcome.FAILED if status >= 500 else Outcome.COMPLETED: 1}
    assert not router.troubles
    await router.settled()


@pytest.mark.parametrize("answers", [1, 2])
async def test_the_times_of_a_streams_tokens_are_counted(one: One, answers: int) -> None:
    router, engine = one
    role = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
    usage = b'data: {"choices":[],"usage":{"completion_tokens":6}}\n\n'
    tokens = token_events(6)
    async with RawClient(router) as client:
        await client.post(n=answers)
        exchange = await engine.next()
        await exchange.start_stream()
        for event_ in (role, *tokens[:-1], tokens[-1] + usage, DONE):
            await exchange.chunks(event_)
            await client.read_until(event_)
        await exchange.end_stream()
        await client.read_to_end()
    await router.settled()

    found = router.dispatcher.deciders["default"].stats.tokens
    assert sum(found.itl_s.counts) == (5 if answers == 1 else 0)
    assert sum(found.tpot_s.counts) == 1
    if answers == 1:
        assert found.tpot_s.total * 5 == pytest.approx(found.itl_s.total)


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
                "Traceparent": TRACE,
                "Tracestate": "vendor=1",
                "Accept-Encoding": "gzip",
                "Expect": "100-continue",
            },
        )
    )
    exchange = await engine.next()

    assert (exchange.method, exchange.body) == ("POST", body)
    assert exchange.target == "/v1/completions?debug=1&x=%20"
    assert re.fullmatch(r"es-[0-9a-f]{20}\.client-1", exchange.headers["x-request-id"])
    assert exchange.headers["host"] == f"127.0.0.1:{engine.port}"
    assert exchange.headers["authorization"] == "Bearer k"
    assert exchange.headers["x-session-id"] == "s"
    assert exchange.headers["traceparent"] == TRACE
    assert exchange.headers["tracestate"] == "vendor=1"
    assert not {"x-data-parallel-rank", "accept-encoding", "expect"} & set(exchange.headers)
    await exchange.answer(b"{}", X_Request_Id="engine's")
    answer = await soon(asked)
    assert answer.headers.get_list("x-request-id") == ["client-1"]


async def test_ranks_behind_one_url_are_told_apart_by_the_router() -> None:
    async with scripted() as (engine,), serving([engine, engine], slots=1) as router:
        asked = [router.post(headers={"X-data-parallel-rank": "7"}) for _ in range(2)]
        exchanges = [await engine.next(), await engine.next()]

        assert {exchange.headers["x-data-parallel-rank"] for exchange in exchanges} == {"0", "1"}
        for exchange in exchanges:
            await exchange.answer(b"{}")
        await soon(asyncio.gather(*asked))


async def test_a_clients_rank_pins_its_request_where_the_operator_allows_it() -> None:
    async with scripted() as (engine,), serving([engine, engine], client_ranks=True) as router:
        asked = [router.post(headers={"X-data-parallel-rank": "1"}) for _ in range(2)]
        pinned = [await engine.next(), await engine.next()]
        assert [exchange.headers["x-data-parallel-rank"] for exchange in pinned] == ["1", "1"]
        free = router.post()
        third = await engine.next()
        assert third.headers["x-data-parallel-rank"] == "0"
        for exchange in (*pinned, third):
            await exchange.answer(b"{}")
        await soon(asyncio.gather(*asked, free))

        for rank, problem in (("7", "no worker has data-parallel rank 7"), ("x", "whole number")):
            refused = await soon(router.post(headers={"X-data-parallel-rank": rank}))
            assert refused.status_code == 400
            assert problem in refused.text
        (group,) = router.dispatcher.cluster.answering
        router.dispatcher.apply(WorkerDown(group.live_workers()[1].spec.id, "gone"))
        gone = await soon(router.post(headers={"X-data-parallel-rank": "1"}))
        assert gone.status_code == 503
        assert "no worker of data-parallel rank 1 is up" in gone.text


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
    events: list[Event] = []
    monkeypatch.setattr(router.dispatcher, "apply", events.append)
    asked = router.post(stream=True)
    await (await engine.next()).stream(*token_events(5), DONE)
    await soon(asked)
    await router.settled()
    assert [event.generated_tokens for event in events if isinstance(event, Progressed)] == [5]


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


@pytest.mark.parametrize("answers", [1, 2])
async def test_a_whole_answer_says_how_long_its_output_is(one: One, answers: int) -> None:
    router, engine = one
    recorder = Recorder(router.dispatcher.cluster, Setting("serve"), time.monotonic, 0.0)
    listener = recorder.listen()
    asked = router.post(prompt=[1] * 9, n=answers)
    usage = {"prompt_tokens": 9, "total_tokens": 16, "completion_tokens": 7, "details": None}
    await (await engine.next()).answer(json.dumps({"text": "y", "usage": usage}).encode())
    await soon(asked)
    (line,) = read(listener.take().splitlines(keepends=True), "lines").requests
    assert (line.prompt_tokens, line.output_tokens) == (9, 7)


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
