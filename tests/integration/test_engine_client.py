"""What OpenAI's client learns of a real vLLM, directly and through the router: the same.

Each case is asked of both, one after the other. Names and times aside (``engine_clients``) the
answers are equal in every field.
"""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.support.engine import MODEL, Installation
from tests.support.engine_clients import content, failure, joined
from tests.support.server import Server

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(400)]

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "anthropic_client.py"
PROMPT = "even steps"
MESSAGES: Any = [{"role": "system", "content": "be even"}, {"role": "user", "content": PROMPT}]
PARTS: Any = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
ODD: Any = [{"role": 1}]
SURE: dict[str, Any] = {"model": MODEL, "temperature": 0}
SCHEMA = {
    "type": "object",
    "properties": {"step": {"enum": ["even", "odd"]}, "ends": {"type": "boolean"}},
    "required": ["step", "ends"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("measure", "guess")
]
NAMED: Any = {"type": "function", "function": {"name": "guess"}}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "step", "schema": SCHEMA}}

COMPLETIONS: dict[str, dict[str, Any]] = {
    "text": {"prompt": PROMPT},
    "token ids": {"prompt": [9, 70, 71, 72, 9, 200]},
    "lists of token ids": {"prompt": [[9, 70, 71, 72], [73, 74]]},
    "several prompts": {"prompt": ["one", "two", "three"]},
    "logprobs": {"prompt": PROMPT, "logprobs": 2},
    "echo and stop": {"prompt": PROMPT, "echo": True, "stop": ["e"]},
    "stop in the answer": {
        "prompt": PROMPT,
        "extra_body": {"stop": ["e"], "include_stop_str_in_output": True},
    },
    "seed": {"prompt": PROMPT, "temperature": 1, "seed": 7},
    "several answers": {"prompt": PROMPT, "temperature": 1, "seed": 7, "n": 3},
    "returned ids": {"prompt": PROMPT, "extra_body": {"return_token_ids": True}},
    "ids as tokens": {
        "prompt": PROMPT,
        "logprobs": 1,
        "extra_body": {"return_tokens_as_token_ids": True},
    },
    "chosen tokens": {"prompt": PROMPT, "extra_body": {"allowed_token_ids": [70, 71]}},
    "choice": {"prompt": PROMPT, "extra_body": {"structured_outputs": {"choice": ["a", "bc"]}}},
}
CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "parts": {"messages": PARTS},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "stop": {"stop": ["e", "a"]},
    "several answers": {"n": 2, "temperature": 1, "seed": 3},
    "cap by its newer name": {"max_completion_tokens": 5, "max_tokens": None},
    "returned ids": {"extra_body": {"return_token_ids": True}},
    "JSON mode": {"response_format": {"type": "json_object"}},
    "JSON schema": {"response_format": FORMAT, "max_tokens": 60},
    "regular expression": {"extra_body": {"structured_outputs": {"regex": "[ab]{3}"}}},
    "tools": {"tools": TOOLS},
    "no tool": {"tools": TOOLS, "tool_choice": "none"},
    "named tool": {"tools": TOOLS, "tool_choice": NAMED, "max_tokens": 60},
    "some tool": {"tools": TOOLS, "tool_choice": "required", "max_tokens": 160},
    "a tool's answer": {
        "messages": [
            *MESSAGES,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "guess", "arguments": "{}"},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "odd"},
        ]
    },
}
RESPONSES: dict[str, dict[str, Any]] = {
    "text": {"input": PROMPT},
    "items": {"input": [{"role": "user", "content": PROMPT}], "instructions": "be even"},
    "JSON schema": {
        "input": PROMPT,
        "max_output_tokens": 60,
        "text": {"format": {"type": "json_schema", "name": "step", "schema": SCHEMA}},
    },
    "own name": {"input": PROMPT, "extra_body": {"request_id": "resp_mine"}},
}
MESSAGE_CASES: dict[str, dict[str, Any]] = {
    "text": {"messages": MESSAGES[1:]},
    "system": {"messages": PARTS, "system": "be even"},
    "stop": {"messages": MESSAGES[1:], "stop_sequences": ["e", "a"], "max_tokens": 40},
}

Ask = Callable[[openai.OpenAI], Any]


def both(direct: openai.OpenAI, routed: openai.OpenAI, ask: Ask) -> Any:
    """The answer that the engine gives, if the router gives the same."""
    theirs = ask(direct)
    assert ask(routed) == theirs
    return theirs


def of(cases: dict[str, dict[str, Any]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("asked", cases.values(), ids=cases)


# --- completions --------------------------------------------------------------------------------


@of(COMPLETIONS)
def test_completion(direct: openai.OpenAI, routed: openai.OpenAI, asked: dict[str, Any]) -> None:
    given: Any = {**SURE, "max_tokens": 16, **asked}

    answer = both(direct, routed, lambda client: content(client.completions.create(**given)))

    assert answer["usage"]["completion_tokens"] > 0


@of(COMPLETIONS)
def test_streamed_completion(
    direct: openai.OpenAI, routed: openai.OpenAI, asked: dict[str, Any]
) -> None:
    usage = {"include_usage": True, "continuous_usage_stats": False}
    given: Any = {**SURE, "max_tokens": 16, "stream": True, "stream_options": usage, **asked}

    answer = both(direct, routed, lambda client: joined(client.completions.create(**given)))

    assert answer["usage"]["completion_tokens"] > 0
    assert {choice["finish_reason"] for choice in answer["choices"]} <= {"length", "stop"}


# --- chats --------------------------------------------------------------------------------------


@of(CHATS)
def test_chat(direct: openai.OpenAI, routed: openai.OpenAI, asked: dict[str, Any]) -> None:
    given: Any = {**SURE, "messages": MESSAGES, "max_tokens": 16, **asked}

    answer = both(direct, routed, lambda client: content(client.chat.completions.create(**given)))

    assert answer["usage"]["completion_tokens"] > 0


@of(CHATS)
def test_streamed_chat(direct: openai.OpenAI, routed: openai.OpenAI, asked: dict[str, Any]) -> None:
    given: Any = {**SURE, "messages": MESSAGES, "max_tokens": 16, "stream": True, **asked}

    answer = both(direct, routed, lambda client: joined(client.chat.completions.create(**given)))

    assert all(choice["finish_reason"] for choice in answer["choices"])


class Step(BaseModel):
    step: str
    ends: bool


def test_the_clients_own_helpers(direct: openai.OpenAI, routed: openai.OpenAI) -> None:
    def parsed(client: openai.OpenAI) -> Any:
        answer = client.chat.completions.parse(
            model=MODEL, messages=MESSAGES, response_format=Step, temperature=0, max_tokens=200
        )
        return content(answer)

    def streamed(client: openai.OpenAI) -> Any:
        with client.chat.completions.stream(
            model=MODEL, messages=MESSAGES, temperature=0, max_tokens=20
        ) as stream:
            for _ in stream:
                pass
            return content(stream.get_final_completion())

    for helper in (parsed, streamed):

        def ask(client: openai.OpenAI, helper: Ask = helper) -> Any:
            try:
                return helper(client)
            except openai.LengthFinishReasonError as error:  # a random model goes on and on
                return content(error.completion)

        both(direct, routed, ask)


# --- responses and messages ---------------------------------------------------------------------


@of(RESPONSES)
def test_response(direct: openai.OpenAI, routed: openai.OpenAI, asked: dict[str, Any]) -> None:
    given: Any = {**SURE, "max_output_tokens": 16, **asked}

    answer = both(direct, routed, lambda client: content(client.responses.create(**given)))
    streamed = both(
        direct, routed, lambda client: named(client.responses.create(**given, stream=True))
    )

    assert answer["usage"]["output_tokens"] > 0
    assert streamed["response.completed"]["response"]["usage"] == answer["usage"]


def named(events: Iterator[Any]) -> dict[str, Any]:
    """Events of each name as one; they are numbered, and how many there are may vary."""
    by_name: dict[str, list[Any]] = {}
    for event in events:
        told = event.model_dump(warnings=False) if hasattr(event, "model_dump") else event
        by_name.setdefault(told["type"], []).append({**told, "sequence_number": 0})
    return {name: joined(each) for name, each in by_name.items()}


@of(MESSAGE_CASES)
def test_message(direct: openai.OpenAI, routed: openai.OpenAI, asked: dict[str, Any]) -> None:
    given = {**SURE, "max_tokens": 16, **asked}

    def whole(client: openai.OpenAI) -> Any:
        answer = post(client, "/messages", given)
        return answer.status_code, content(answer.json())

    def streamed(client: openai.OpenAI) -> Any:
        return named(events_of(post(client, "/messages", {**given, "stream": True})))

    status, answer = both(direct, routed, whole)
    events = both(direct, routed, streamed)

    assert status == 200
    assert events["message_delta"]["usage"] == answer["usage"]
    assert "message_stop" in events


def test_the_official_client_of_messages(
    engine: Server, router: Server, engine_installation: Installation
) -> None:
    """Which the engine's environment has."""
    learnt = []
    for server in (engine, router):
        command = [str(engine_installation.python), str(SCRIPT), server.url, MODEL]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        learnt.append(content(json.loads(said.stdout)))

    assert learnt[0] == learnt[1]
    whole, streamed, counted, refused = learnt[0]
    assert whole["content"] == streamed["content"]
    assert counted["input_tokens"] == whole["usage"]["input_tokens"]
    assert [one[:2] for one in refused] == [["NotFoundError", 404], ["BadRequestError", 400]]


def post(client: openai.OpenAI, path: str, body: Any) -> httpx.Response:
    return send(client, "POST", path, json.dumps(body).encode())


def events_of(answer: httpx.Response) -> Iterator[Any]:
    for event in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        told = json.loads(data.removeprefix("data: "))
        assert name == f"event: {told['type']}"
        yield told


# --- errors -------------------------------------------------------------------------------------

REFUSED: dict[str, Ask] = {
    "temperature": lambda c: c.completions.create(model=MODEL, prompt="a", temperature=-1),
    "cap": lambda c: c.completions.create(model=MODEL, prompt="a", max_tokens=10**6),
    "n": lambda c: c.completions.create(model=MODEL, prompt="a", n=0),
    "top_p": lambda c: c.completions.create(model=MODEL, prompt="a", top_p=7),
    "streamed": lambda c: c.completions.create(model=MODEL, prompt="a", top_p=7, stream=True),
    "no prompt": lambda c: c.completions.create(model=MODEL, prompt=[]),
    "huge token": lambda c: c.completions.create(model=MODEL, prompt=[10**6]),
    "messages": lambda c: c.chat.completions.create(model=MODEL, messages=[]),
    "role": lambda c: c.chat.completions.create(model=MODEL, messages=ODD),
    "tool": lambda c: c.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=TOOLS[:1], tool_choice=NAMED
    ),
    "schema": lambda c: c.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": "nothing"}},
        },
    ),
    "model": lambda c: c.completions.create(model="huge", prompt="a"),
    "chat's model": lambda c: c.chat.completions.create(model="huge", messages=MESSAGES),
    "response's model": lambda c: c.responses.create(model="huge", input="a"),
    "response's cap": lambda c: c.responses.create(model=MODEL, input="a", max_output_tokens=-1),
    "response before": lambda c: c.responses.create(
        model=MODEL, input="a", previous_response_id="resp_none"
    ),
    "embeddings": lambda c: c.embeddings.create(model=MODEL, input="a", encoding_format="float"),
    "audio": lambda c: c.audio.transcriptions.create(model=MODEL, file=("a.wav", b"RIFF")),
}


@pytest.mark.parametrize("ask", REFUSED.values(), ids=REFUSED)
def test_refused(direct: openai.OpenAI, routed: openai.OpenAI, ask: Ask) -> None:
    def learn(client: openai.OpenAI) -> Any:
        with pytest.raises(openai.APIStatusError) as caught:
            ask(client)
        return failure(caught.value)

    both(direct, routed, learn)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completions", b'{"model": "tiny", "prompt": '),
        ("/chat/completions", b"[]"),
        ("/messages", b'{"model": "tiny", "messages": []}'),
        ("/messages", b'{"model": "huge", "max_tokens": 1, "messages": []}'),
    ],
)
def test_refused_in_the_same_form(
    direct: openai.OpenAI, routed: openai.OpenAI, path: str, body: bytes
) -> None:
    """The router words what it refuses itself, in the fields that the engine has for it."""

    def learn(client: openai.OpenAI) -> Any:
        answer = send(client, "POST", path, body)
        return answer.status_code, sorted(answer.json()), sorted(answer.json()["error"])

    both(direct, routed, learn)


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/completions"), ("DELETE", "/models"), ("GET", "/nothing"), ("GET", "/models/tiny")],
)
def test_what_is_not_there(
    direct: openai.OpenAI, routed: openai.OpenAI, method: str, path: str
) -> None:
    def learn(client: openai.OpenAI) -> Any:
        answer = send(client, method, path, b"")
        return answer.status_code, answer.headers.get("allow")

    both(direct, routed, learn)
    error = send(routed, method, path, b"").json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}


def send(client: openai.OpenAI, method: str, path: str, body: bytes) -> httpx.Response:
    url = f"{client.base_url}".rstrip("/") + path
    kind = {"content-type": "application/json"}
    return httpx.request(method, url, content=body, headers=kind, timeout=60)


# --- beside generating --------------------------------------------------------------------------


def test_models(direct: openai.OpenAI, routed: openai.OpenAI) -> None:
    models = both(direct, routed, lambda client: [content(one) for one in client.models.list()])

    assert [one["root"] != "" for one in models] == [True]
    assert [one.id for one in routed.models.list()] == [MODEL]


def test_tokens_and_back(engine: Server, router: Server) -> None:
    def ask(server: Server, path: str, body: Any) -> Any:
        return httpx.post(server.url + path, json=body, timeout=60).json()

    for path, body in (
        ("/tokenize", {"model": MODEL, "prompt": PROMPT}),
        ("/tokenize", {"messages": MESSAGES}),
        ("/detokenize", {"model": MODEL, "tokens": [70, 71, 72]}),
        ("/v1/messages/count_tokens", {"model": MODEL, "messages": MESSAGES[1:]}),
    ):
        theirs = ask(engine, path, body)
        assert ask(router, path, body) == theirs
        assert "error" not in theirs
    assert router.get("/load").json() == {"server_load": 0}


def test_stream_has_the_engines_form(engine: Server, router: Server) -> None:
    """Event for event the same keys, separators and end; how tokens share events may vary."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "stream": True}

    ours, theirs = (
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        for server in (router, engine)
    )

    assert ours.headers["content-type"] == theirs.headers["content-type"]
    assert [*map(form, ours.text.split("\n\n")[-3:])] == [
        *map(form, theirs.text.split("\n\n")[-3:])
    ]


def form(event: str) -> list[str] | str:
    data = event.removeprefix("data: ")
    return sorted(json.loads(data)) if data.startswith("{") else data


async def test_the_asynchronous_client(engine: Server, router: Server) -> None:
    texts = []
    for server in (engine, router):
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60
        ) as client:
            stream = await client.completions.create(
                prompt=PROMPT, max_tokens=24, stream=True, **SURE
            )
            texts.append("".join([one.text async for chunk in stream for one in chunk.choices]))

    assert texts[0] == texts[1] != ""


def test_names(routed: openai.OpenAI) -> None:
    """The answer is named by the router; its request as the client calls it, if it does."""
    raw = routed.completions.with_raw_response
    asked: Any = {**SURE, "prompt": PROMPT, "max_tokens": 2}

    plain = raw.create(**asked)
    mine = raw.create(**asked, extra_headers={"X-Request-Id": "mine.1"})

    token = plain.headers["x-request-id"]
    assert plain.parse().id == f"cmpl-{token}"
    assert mine.headers["x-request-id"] == "mine.1"
    answer_id = mine.parse().id
    assert answer_id.startswith("cmpl-es-")
    assert answer_id.endswith(".mine.1")
    assert routed.responses.create(input=PROMPT, max_output_tokens=2, **SURE).id.startswith(
        "resp_es-"
    )
