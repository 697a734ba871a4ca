"""Responses and messages on their way through the router, and what their clients are told."""

import asyncio
import json
from typing import Any

import openai
import pytest

from router.core.types import Outcome
from tests.support.relaying import One
from tests.support.scripted import TIMEOUT_S, scripted, soon, until
from tests.support.serving import serving

PATHS = ("/v1/responses", "/v1/messages")
DELTA = {"/v1/responses": "response.output_text.delta", "/v1/messages": "content_block_delta"}
LAST = {"/v1/responses": "response.completed", "/v1/messages": "message_stop"}


def event(name: str, **fields: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields})}\n\n".encode()


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_passes_and_its_tokens_count(one: One, path: str) -> None:
    router, engine = one
    asked = router.post(path, {"X-Request-Id": "mine"}, input="a", stream=True, n=7)
    exchange = await engine.next()
    parts = [event("begin"), *[event(DELTA[path], delta="a")] * 40, event(LAST[path])]
    await exchange.start_stream()
    await exchange.chunks(*parts[:-1])
    worker = router.dispatcher.cluster.worker("a")
    # Known by now from what has passed, since no snapshot tells it.
    await until(lambda: worker.load_tokens >= 32)
    assert (worker.in_flight, worker.free_slots) == (1, worker.slots - 1)
    await exchange.chunks(parts[-1])
    await exchange.end_stream()

    answer = await soon(asked)
    assert answer.content == b"".join(parts)
    assert answer.headers["x-request-id"] == "mine"
    assert router.outcomes == {Outcome.COMPLETED: 1}
    await router.settled()


async def test_the_engine_calls_a_response_by_the_routers_token(one: One) -> None:
    router, engine = one
    asked = router.post("/v1/responses", input="a", request_id="resp_es-" + "0" * 20)
    exchange = await engine.next()

    assert exchange.json["request_id"] == f"resp_{exchange.headers['x-request-id']}"
    assert {**exchange.json, "request_id": ""} == {
        "model": "tiny",
        "prompt": [1, 2, 3],
        "input": "a",
        "request_id": "",
    }
    await exchange.answer(b"{}")
    await soon(asked)


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_that_breaks_ends_with_one_error_event(one: One, path: str) -> None:
    router, engine = one
    asked = router.post(path, stream=True)
    exchange = await engine.next()
    await exchange.start_stream()
    await exchange.chunks(event("begin"), event(DELTA[path])[:-1])
    exchange.close()

    *passed, last = (await soon(asked)).content.removesuffix(b"\n\n").split(b"\n\n")
    assert passed == [event("begin").removesuffix(b"\n\n")]
    name, data = last.decode().split("\n")
    assert name == "event: error"
    told = json.loads(data.removeprefix("data: "))
    assert told["type"] == "error"
    assert "worker" in told["error"]["message"]
    await router.settled()


async def test_openais_client_raises_where_a_response_breaks(one: One) -> None:
    router, engine = one
    async with openai.AsyncOpenAI(
        base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S
    ) as client:
        asking = asyncio.create_task(client.responses.create(model="tiny", input="a", stream=True))
        exchange = await engine.next()
        await exchange.start_stream()
        await exchange.chunks(event(DELTA["/v1/responses"], delta="a", sequence_number=0))
        stream = await soon(asking)
        exchange.close()
        with pytest.raises(openai.APIError, match="the worker failed in mid-answer"):
            [each async for each in stream]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/responses", {"background": True}, "background"),
        ("/v1/messages", {"model": 1}, None),
        ("/v1/completions", {"model": "huge"}, "model"),
    ],
)
async def test_refused_in_the_clients_form(
    one: One, path: str, body: dict[str, Any], param: str | None
) -> None:
    answer = await one[0].http.post(path, json=body)

    assert answer.status_code in (400, 404)
    assert answer.json()["error"].get("param") == param
    assert ("type" in answer.json()) is (path == "/v1/messages")


async def test_what_headers_wish_for() -> None:
    async with scripted() as (engine,), serving([engine], slots=1) as router:
        first = router.post()
        exchange = await engine.next()
        later = router.post(marked="later")
        await until(lambda: router.waiting == 1)
        urgent = router.post(headers={"X-Request-Priority": "-1"}, marked="urgent", priority=5)
        await until(lambda: router.waiting == 2)
        brief = await soon(router.post(headers={"X-Queue-Timeout-S": "0.01"}))
        odd = await soon(router.post(headers={"X-Request-Timeout-S": "soon"}))

        await exchange.answer(b"{}")
        following = await engine.next()
        assert following.json["marked"] == "urgent"
        await following.answer(b"{}")
        await (await engine.next()).answer(b"{}")

        assert [(await soon(each)).status_code for each in (first, later, urgent)] == [200] * 3
        assert (brief.status_code, odd.status_code) == (503, 400)
        assert odd.json()["error"]["param"] == "X-Request-Timeout-S"
