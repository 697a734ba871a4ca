"""The router before a real vLLM, driven by the official client."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from tests.support.engine import MODEL, metric, requests_running
from tests.support.server import Server, running_router, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

GROUP = "tiny-group"
PROMPT = "even steps"
MESSAGES: Any = [{"role": "user", "content": PROMPT}]
# A minute and more: still running whenever a test looks.
LONG: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 30_000}
ENDLESS = {"ignore_eos": True}
# Generous: where cores are few, the engine's worker leaves little time to its HTTP server.
WAIT_S = 30


@pytest.fixture(scope="module")
def router(engine: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    worker = f"{engine.url},group={GROUP},slots=8"
    folder = tmp_path_factory.mktemp("router")
    with running_router(folder, "--worker", worker) as server:
        yield server


@pytest.fixture(scope="module")
def direct(engine: Server) -> Iterator[openai.OpenAI]:
    with client_of(engine) as client:
        yield client


@pytest.fixture(scope="module")
def routed(router: Server) -> Iterator[openai.OpenAI]:
    with client_of(router) as client:
        yield client


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def content(answer: Any) -> dict[str, Any]:
    """Everything but what differs between two answers to one request."""
    fields: dict[str, Any] = answer.model_dump(exclude={"id", "created"})
    return fields


def in_flight(router: Server) -> int:
    (worker,) = router.get("/health").json()["groups"][GROUP]["workers"]
    return int(worker["in_flight"])


def wait_idle(engine: Server, router: Server) -> None:
    wait_until(lambda: requests_running(engine) == 0, WAIT_S, "the engine drops the request")
    wait_until(lambda: in_flight(router) == 0, WAIT_S, "the router drops the request")
    assert metric(router, "evenstep_worker_in_flight") == 0


# --- the same answers as without the router ---------------------------------------------------


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param({"prompt": PROMPT}, id="text"),
        pytest.param({"prompt": [9, 70, 71, 72, 9, 200]}, id="token ids"),
        pytest.param({"prompt": [[9, 70, 71, 72]]}, id="list of token ids"),
        pytest.param({"prompt": PROMPT, "logprobs": 2}, id="logprobs"),
        pytest.param({"prompt": PROMPT, "echo": True, "stop": ["e"]}, id="echo and stop"),
        pytest.param({"prompt": PROMPT, "temperature": 1, "seed": 7}, id="seed"),
    ],
)
def test_completion_equals_the_engines(
    direct: openai.OpenAI, routed: openai.OpenAI, extra: dict[str, Any]
) -> None:
    asked = {"model": MODEL, "max_tokens": 16, "temperature": 0, **extra}

    answer = routed.completions.create(**asked)

    assert content(answer) == content(direct.completions.create(**asked))
    assert re.fullmatch(r"cmpl-es-[0-9a-f]{20}", answer.id)


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param({}, id="plain"),
        pytest.param({"logprobs": True, "top_logprobs": 2}, id="logprobs"),
    ],
)
def test_chat_equals_the_engines(
    direct: openai.OpenAI, routed: openai.OpenAI, extra: dict[str, Any]
) -> None:
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 16, "temperature": 0, **extra}

    answer = routed.chat.completions.create(**asked)

    assert content(answer) == content(direct.chat.completions.create(**asked))
    assert re.fullmatch(r"chatcmpl-es-[0-9a-f]{20}", answer.id)


def test_streamed_completion_equals_the_whole_one(
    direct: openai.OpenAI, routed: openai.OpenAI
) -> None:
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    whole = direct.completions.create(model=MODEL, **asked)

    stream = routed.completions.create(
        model=MODEL, stream=True, stream_options={"include_usage": True}, **asked
    )
    chunks: list[Completion] = list(stream)

    assert "".join(one.text for chunk in chunks for one in chunk.choices) == whole.choices[0].text
    assert chunks[-2].choices[0].finish_reason == "length"
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert usage_of(chunks[-1]) == usage_of(whole) == (len(PROMPT), 24)


def usage_of(answer: Any) -> tuple[int, int]:
    return answer.usage.prompt_tokens, answer.usage.completion_tokens


def test_streamed_chat_equals_the_whole_one(direct: openai.OpenAI, routed: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    whole = direct.chat.completions.create(model=MODEL, **asked)

    stream = routed.chat.completions.create(model=MODEL, stream=True, **asked)
    chunks: list[ChatCompletionChunk] = list(stream)

    parts = (one.delta.content or "" for chunk in chunks for one in chunk.choices)
    assert "".join(parts) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in chunks)


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


@pytest.mark.parametrize(
    ("prompt", "n"),
    [
        pytest.param(PROMPT, 2, id="two of one prompt"),
        pytest.param(["one", "two", "three"], 1, id="three prompts"),
        pytest.param([[70, 71], [72, 73]], 2, id="two of each of two token-id prompts"),
    ],
)
def test_several_choices(routed: openai.OpenAI, router: Server, prompt: Any, n: int) -> None:
    prompts = prompt if isinstance(prompt, list) else [prompt]

    answer = routed.completions.create(model=MODEL, prompt=prompt, n=n, max_tokens=5, seed=1)

    assert [choice.index for choice in answer.choices] == list(range(n * len(prompts)))
    assert usage_of(answer) == (sum(map(len, prompts)), 5 * n * len(prompts))
    assert in_flight(router) == 0


def test_the_pool_holds_what_the_engine_has_no_slot_for(
    routed: openai.OpenAI, engine: Server, router: Server
) -> None:
    def waiting() -> int:
        return int(router.get("/health").json()["groups"][GROUP]["pool_requests"])

    with ExitStack() as stack:
        for _ in range(8):
            stream = routed.completions.create(stream=True, extra_body=ENDLESS, **LONG)
            stack.callback(stream.close)
            next(stream)
        last = ThreadPoolExecutor(1)
        stack.callback(last.shutdown)
        answer = last.submit(routed.completions.create, model=MODEL, prompt=PROMPT, max_tokens=3)
        wait_until(lambda: waiting() == 1, WAIT_S, "the ninth request waits in the pool")
        assert (requests_running(engine), metric(engine, "vllm:num_requests_waiting")) == (8, 0)

        stream.close()

        assert usage_of(answer.result(timeout=WAIT_S)) == (len(PROMPT), 3)
    wait_idle(engine, router)


# --- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"max_tokens": 10**6}, {"n": 0}, {"top_p": 7}], ids=str
)
def test_the_engines_refusal_passes_unchanged(
    direct: openai.OpenAI, routed: openai.OpenAI, wrong: dict[str, Any], stream: bool
) -> None:
    asked = {"model": MODEL, "prompt": PROMPT, "stream": stream, **wrong}

    with pytest.raises(openai.BadRequestError) as theirs:
        direct.completions.create(**asked)
    with pytest.raises(openai.BadRequestError) as ours:
        routed.completions.create(**asked)

    assert ours.value.body == theirs.value.body
    assert ours.value.body is not None


def test_unknown_model(routed: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        routed.completions.create(model=GROUP, prompt=PROMPT)

    assert caught.value.param == "model"


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/completions", '{"model": "tiny", "prompt": ', 400),
        ("POST", "/v1/chat/completions", "[]", 400),
        ("GET", "/v1/completions", "", 405),
        ("GET", "/v1/nothing", "", 404),
    ],
)
def test_errors_have_the_usual_body(
    router: Server, method: str, path: str, body: str, status: int
) -> None:
    answer = httpx.request(method, router.url + path, content=body, timeout=10)

    assert answer.status_code == status
    assert answer.json()["error"].keys() >= {"message", "type", "param", "code"}
    assert answer.json()["error"]["code"] == status


# --- what operators ask for ---------------------------------------------------------------------


def test_models(routed: openai.OpenAI) -> None:
    assert [model.id for model in routed.models.list()] == [MODEL]


def test_health_version_and_metrics(routed: openai.OpenAI, router: Server) -> None:
    routed.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1)

    (worker,) = router.get("/health").json()["groups"][GROUP]["workers"]
    assert (worker["up"], worker["slots"]) == (True, 8)
    assert router.get("/version").json().keys() == {"version"}
    assert metric(router, "evenstep_worker_up") == 1
    assert metric(router, "evenstep_requests_total") >= 1


# --- clients that leave --------------------------------------------------------------------------


def test_leaving_a_stream_ends_the_request(
    routed: openai.OpenAI, engine: Server, router: Server
) -> None:
    stream = routed.completions.create(stream=True, extra_body=ENDLESS, **LONG)
    next(stream)
    wait_until(lambda: requests_running(engine) == 1, WAIT_S, "the engine runs the request")
    assert in_flight(router) == 1

    stream.close()

    wait_idle(engine, router)


def test_leaving_before_the_answer_ends_the_request(engine: Server, router: Server) -> None:
    body = json.dumps({**LONG, **ENDLESS})
    connection = http.client.HTTPConnection("127.0.0.1", router.port, timeout=10)
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    wait_until(lambda: requests_running(engine) == 1, WAIT_S, "the engine runs the request")
    assert in_flight(router) == 1

    connection.close()

    wait_idle(engine, router)


# --- the engine dies: the last test, since its engine is gone afterwards ------------------------


def test_a_killed_engine_ends_streams_once_and_then_means_503(
    routed: openai.OpenAI, engine: Server, router: Server
) -> None:
    watched = routed.completions.create(stream=True, extra_body=ENDLESS, **LONG)
    next(watched)
    body = {**LONG, **ENDLESS, "stream": True}
    with httpx.stream("POST", f"{router.url}/v1/completions", json=body, timeout=60) as raw:
        lines = raw.iter_lines()
        next(lines)

        engine.kill()

        rest = [line for line in lines if line]
    assert [line for line in rest if "error" in events_data(line)] == rest[-1:]
    with pytest.raises(openai.APIError, match="worker"):
        list(watched)

    wait_until(lambda: router.get("/health").status_code == 503, WAIT_S, "the router sees it")
    for _ in range(2):
        with pytest.raises(openai.APIStatusError) as refused:
            routed.completions.create(model=MODEL, prompt=PROMPT)
        assert refused.value.status_code == 503
    assert in_flight(router) == 0
    engine.stop(grace_s=1)  # what the crash has left behind goes on computing for nobody


def events_data(line: str) -> Mapping[str, Any]:
    data = line.removeprefix("data: ")
    fields: Mapping[str, Any] = json.loads(data) if data.startswith("{") else {}
    return fields
