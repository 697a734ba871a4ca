"""Endpoints of vLLM beside completions and chats, emulated: the shapes that clients know."""

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from loadgen.emulator.emulated_fleet import EmulatedFleet
from router.proxy.answers import tokens_of
from router.proxy.dialects import MESSAGES, RESPONSES, Dialect
from tests.support.emulated import client, emulated, openai_client

XARGS = {"vllm_xargs": {"evenstep_output_tokens": 20}}
MESSAGE = {"messages": [{"role": "user", "content": "hello"}], "system": "be even", **XARGS}


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[EmulatedFleet]:
    async with emulated(tmp_path, workers=1, kv_tokens=100_000) as fleet:
        yield fleet


@pytest.fixture
async def http(fleet: EmulatedFleet) -> AsyncIterator[httpx.AsyncClient]:
    async with client(fleet) as http:
        yield http


@pytest.fixture
async def api(fleet: EmulatedFleet) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai_client(fleet) as api:
        yield api


async def test_a_response_streamed_says_what_a_whole_one_says(api: openai.AsyncOpenAI) -> None:
    ask: dict[str, Any] = {"model": "emulated", "input": "hello", "extra_body": XARGS}

    whole = await api.responses.create(**ask)
    events = [event async for event in await api.responses.create(stream=True, **ask)]

    assert (whole.status, whole.usage and whole.usage.output_tokens) == ("completed", 20)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage == whole.usage
    assert [event.sequence_number for event in events] == [*range(len(events))]


async def test_a_response_that_is_cut_says_so(api: openai.AsyncOpenAI) -> None:
    whole = await api.responses.create(
        model="emulated",
        input=[{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}],
        instructions="be even",
        max_output_tokens=5,
        extra_body={**XARGS, "request_id": "resp_mine"},
    )

    assert (whole.id, whole.status) == ("resp_mine", "incomplete")
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"


async def test_a_message_streamed_says_what_a_whole_one_says(http: httpx.AsyncClient) -> None:
    whole = (await http.post("/v1/messages", json={**MESSAGE, "max_tokens": 50})).json()
    streamed = await http.post("/v1/messages", json={**MESSAGE, "max_tokens": 50, "stream": True})
    events = [event.split("\n") for event in streamed.text.removesuffix("\n\n").split("\n\n")]

    assert (whole["type"], whole["role"], whole["stop_reason"]) == (
        *("message", "assistant"),
        "end_turn",
    )
    told = [json.loads(data.removeprefix("data: ")) for _, data in events]
    assert [name.removeprefix("event: ") for name, _ in events] == [one["type"] for one in told]
    deltas = [one["delta"]["text"] for one in told if one["type"] == "content_block_delta"]
    assert "".join(deltas) == whole["content"][0]["text"]
    assert told[-2]["usage"] == whole["usage"]
    assert [told[0]["type"], told[-1]["type"]] == ["message_start", "message_stop"]


@pytest.mark.parametrize(
    ("ask", "reason", "stop"),
    [({"max_tokens": 5}, "max_tokens", None), ({"stop_sequences": ["e"]}, "stop_sequence", "e")],
)
async def test_why_a_message_ends(
    http: httpx.AsyncClient, ask: dict[str, Any], reason: str, stop: str | None
) -> None:
    answer = (await http.post("/v1/messages", json={**MESSAGE, "max_tokens": 50, **ask})).json()

    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, stop)


@pytest.mark.parametrize(
    ("dialect", "path", "ask"),
    [
        (MESSAGES, "/v1/messages", {**MESSAGE, "max_tokens": 50}),
        (RESPONSES, "/v1/responses", {"input": "hello", **XARGS}),
    ],
)
async def test_the_router_counts_their_tokens(
    http: httpx.AsyncClient, dialect: Dialect, path: str, ask: dict[str, Any]
) -> None:
    stream = dialect.stream()
    streamed = await http.post(path, json={**ask, "stream": True})
    assert stream.feed(streamed.content) == streamed.content
    # Steps merge when a client is slow.
    assert 1 <= stream.tokens <= 20
    assert stream.done

    counted = tokens_of((await http.post(path, json=ask)).content)
    assert counted is not None
    assert (counted[0] > 0, counted[1]) == (True, 20)


@pytest.mark.parametrize(
    ("asked", "number", "tokens"),
    [("hello", 1, 2), (["a", "bcdef"], 2, 3), ([1, 2, 3], 1, 3), ([[1, 2], [3]], 2, 3)],
)
async def test_embeddings(
    api: openai.AsyncOpenAI, asked: str | Sequence[Any], number: int, tokens: int
) -> None:
    answers = [
        await api.embeddings.create(
            model="emulated",
            input=list(asked) if isinstance(asked, list) else asked,
            encoding_format="float",
        )
        for _ in range(2)
    ]

    assert answers[0] == answers[1]
    assert [len(one.embedding) for one in answers[0].data] == [8] * number
    assert answers[0].usage.prompt_tokens == tokens


async def test_tokens_and_back(http: httpx.AsyncClient) -> None:
    told = (await http.post("/tokenize", json={"prompt": "hé"})).json()
    back = await http.post("/detokenize", json={"model": "emulated", "tokens": told["tokens"]})

    assert (told["count"], back.json()) == (2, {"prompt": "hé"})


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/messages", {"messages": []}, 400),
        ("/v1/messages", {"messages": [], "max_tokens": 1}, 400),
        ("/v1/responses", {"model": "emulated"}, 400),
        ("/v1/responses", {"input": "a", "model": "huge"}, 404),
        ("/v1/embeddings", {"input": "a", "model": "huge"}, 404),
        ("/tokenize", {"prompt": 1}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
    ],
)
async def test_refused(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], status: int
) -> None:
    answer = await http.post(path, json=body)

    assert (answer.status_code, answer.json()["error"]["code"]) == (status, status)
