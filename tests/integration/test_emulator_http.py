import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message

from loadgen.emulator.emulated_fleet import EmulatedFleet
from loadgen.emulator.sent import SentLog
from loadgen.emulator.stepper import Lateness
from loadgen.emulator.worker_app import WorkerApp
from router.core.step_time import StepTime
from tests.support.emulated import (
    TIMEOUT_S,
    client,
    emulated,
    eventually,
    openai_client,
    reading,
)

HIDDEN = "evenstep_output_tokens"
ENDLESS = {"prompt": [1, 2, 3], "max_tokens": 90_000, "ignore_eos": True}


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[EmulatedFleet]:
    async with emulated(tmp_path, workers=2, kv_tokens=100_000) as fleet:
        yield fleet


@pytest.fixture
async def http(fleet: EmulatedFleet) -> AsyncIterator[httpx.AsyncClient]:
    async with client(fleet) as http:
        yield http


@pytest.fixture
async def api(fleet: EmulatedFleet) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai_client(fleet) as api:
        yield api


def xargs(tokens: int) -> dict[str, Any]:
    return {"vllm_xargs": {HIDDEN: tokens}}


async def events(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    async with http.stream("POST", path, json=body) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = [line async for line in response.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_a_streamed_completion_says_what_a_whole_one_says(api: openai.AsyncOpenAI) -> None:
    ask: dict[str, Any] = {
        "model": "emulated",
        "prompt": [1, 2, 3, 4],
        "max_tokens": 50,
        "extra_body": xargs(20),
    }
    whole: Completion = await api.completions.create(**ask)
    stream: openai.AsyncStream[Completion] = await api.completions.create(
        **ask, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    assert len(chunks) == 20
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.model_dump(exclude_none=True) == whole.usage.model_dump(exclude_none=True)
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (4, 20)


async def test_a_streamed_chat_says_what_a_whole_one_says(api: openai.AsyncOpenAI) -> None:
    ask: dict[str, Any] = {
        "model": "emulated",
        "messages": [{"role": "user", "content": "hello"}],
        "n": 2,
        "stop": ["step"],
    }
    whole: ChatCompletion = await api.chat.completions.create(**ask)
    texts, roles = ["", ""], []
    reasons: list[str | None] = [None, None]
    stream: openai.AsyncStream[ChatCompletionChunk] = await api.chat.completions.create(
        **ask, stream=True
    )
    async for chunk in stream:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason
        roles.append(choice.delta.role)
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert roles[:2] == ["assistant", "assistant"]
    assert roles[2:] == [None] * len(roles[2:])
    assert not any("step" in text for text in texts)


async def test_several_prompts_and_choices(api: openai.AsyncOpenAI) -> None:
    answer = await api.completions.create(
        model="emulated", prompt=[[1, 2], [3, 4, 5]], n=2, max_tokens=3
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 12)


async def test_events_have_vllm_s_fields(http: httpx.AsyncClient) -> None:
    body = {"prompt": [1], "stream": True, "stream_options": {"include_usage": True}, **xargs(2)}
    first, last, usage = await events(http, "/v1/completions", body)
    assert list(first) == ["id", "object", "created", "model", "choices"]
    assert first["object"] == "text_completion"
    (choice,) = first["choices"]
    assert list(choice) == [
        "index", "text", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids",
        "token_ids",
    ]  # fmt: skip
    assert (choice["finish_reason"], last["choices"][0]["finish_reason"]) == (None, "stop")
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 1, "total_tokens": 3, "completion_tokens": 2}
    messages = [{"role": "user", "content": "x"}]
    chat = await events(http, "/v1/chat/completions", {**body, "prompt": 0, "messages": messages})
    assert {event["object"] for event in chat} == {"chat.completion.chunk"}
    assert chat[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chat[1]["choices"][0].keys() == {
        "index", "delta", "logprobs", "finish_reason", "token_ids",
    }  # fmt: skip
    assert chat[2]["choices"][0].keys() == {
        "index", "delta", "logprobs", "finish_reason", "stop_reason", "token_ids",
    }  # fmt: skip


async def test_a_stop_string_is_named_and_left_out(http: httpx.AsyncClient) -> None:
    plain = (await http.post("/v1/completions", json={"prompt": [9], **xargs(16)})).json()
    third = plain["choices"][0]["text"].split()[2]
    body = {"prompt": [9], "stop": third, **xargs(16)}
    (choice,) = (await http.post("/v1/completions", json=body)).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", third)
    assert choice["text"] == plain["choices"][0]["text"].partition(third)[0]
    streamed = await events(http, "/v1/completions", {**body, "stream": True})
    assert "".join(event["choices"][0]["text"] for event in streamed) == choice["text"]
    assert streamed[-1]["choices"][0]["stop_reason"] == third


async def test_engine_ids_hold_the_router_s(fleet: EmulatedFleet, http: httpx.AsyncClient) -> None:
    token = "es-0123456789abcdef0123"
    async with reading(fleet) as reader:
        body = {"prompt": [[1], [2]], "max_tokens": 2, "n": 2}
        answer = await http.post("/v1/completions", json=body, headers={"x-request-id": token})
        assert answer.json()["id"] == f"cmpl-{token}"
        ids: set[str] = set()
        while len(ids) < 4:
            ids |= {request.id for request in (await reader.next()).running}
        assert sorted(id_.rpartition("-")[0] for id_ in ids) == [
            f"{child}_cmpl-{token}-{prompt}" for child in range(2) for prompt in range(2)
        ]
        messages = [{"role": "user", "content": "x"}]
        chat = {"messages": messages, "max_tokens": 2}
        await http.post("/v1/chat/completions", json=chat, headers={"x-request-id": token})
        while not (running := (await reader.next()).running):
            pass
        prefix, _, suffix = running[0].id.rpartition("-")
        assert (prefix, len(suffix)) == (f"chatcmpl-{token}", 8)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_aborts_its_request(
    fleet: EmulatedFleet, http: httpx.AsyncClient, stream: bool
) -> None:
    engine = fleet.workers[0].model.engine
    async with reading(fleet) as reader:
        call = asyncio.create_task(
            http.post("/v1/completions", json={**ENDLESS, "n": 2, "stream": stream})
        )
        await eventually(lambda: len(engine.running) == 2, "both run")
        ids = {request.id for request in engine.running}
        call.cancel()
        await eventually(lambda: not engine.unfinished, "the engine is empty")
        finished: set[str] = set()
        while finished != ids:
            finished |= set((await reader.next()).finished)
        full = await reader.full()
    assert full.running == ()
    assert (await http.get("/load")).json() == {"server_load": 0}


class Watched(asyncio.Event):
    """Tells when somebody waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.awaited = asyncio.Event()

    async def wait(self) -> Literal[True]:
        self.awaited.set()
        return await super().wait()


AT_REST = pytest.mark.parametrize(("stop", "go"), [("/pause", "/resume"), ("/sleep", "/wake_up")])


@AT_REST
async def test_an_engine_at_rest_answers_when_it_goes_on(
    fleet: EmulatedFleet, http: httpx.AsyncClient, stop: str, go: str
) -> None:
    worker = fleet.workers[0]
    worker.operated.going = going = Watched()
    worker.operated.do(stop, b"")
    answer = asyncio.create_task(http.post("/v1/completions", json={"prompt": [1], **xargs(1)}))
    waits = asyncio.create_task(going.awaited.wait())
    await asyncio.wait([answer, waits], return_when=asyncio.FIRST_COMPLETED)
    assert (answer.done(), worker.prompt_tokens_total) == (False, 0)
    worker.operated.do(go, b"")
    assert (await answer).status_code == 200
    assert worker.prompt_tokens_total == 1


@AT_REST
async def test_a_client_that_leaves_an_engine_at_rest_is_not_served_later(
    fleet: EmulatedFleet, stop: str, go: str
) -> None:
    worker = fleet.workers[0]
    worker.operated.do(stop, b"")
    body = json.dumps(ENDLESS).encode()
    messages = iter(({"type": "http.request", "body": body}, {"type": "http.disconnect"}))

    async def receive() -> Message:
        return next(messages)

    async def send(_: Message) -> None:
        raise AssertionError("nobody is there")

    scope = {"type": "http", "path": "/v1/completions", "method": "POST", "headers": []}
    async with asyncio.timeout(TIMEOUT_S):
        await WorkerApp(worker, Lateness(), SentLog(None))(scope, receive, send)
    worker.operated.do(go, b"")
    assert (worker.answers, worker.prompt_tokens_total) == ([], 0)


async def test_a_stream_interval_gathers_tokens_as_vllm_does(tmp_path: Path) -> None:
    async with emulated(tmp_path, stream_interval=4) as fleet, client(fleet) as http:
        body = {"prompt": [1], "stream": True, "max_tokens": 99, **xargs(11)}
        streamed = await events(http, "/v1/completions", body)
        words = [len(event["choices"][0]["text"].split()) for event in streamed]
        assert words == [1, 4, 4, 2]


async def test_pages(fleet: EmulatedFleet, http: httpx.AsyncClient) -> None:
    health = await http.get("/health")
    assert (health.status_code, health.content) == (200, b"")
    (card,) = (await http.get("/v1/models")).json()["data"]
    assert (card["id"], card["max_model_len"]) == ("emulated", 100_000)
    assert "emulated" in (await http.get("/version")).json()["version"]
    assert (await http.get("/nothing")).status_code == 404
    assert (await http.get("/v1/completions")).status_code == 405


async def test_metrics_count_and_parse(fleet: EmulatedFleet, http: httpx.AsyncClient) -> None:
    await http.post("/v1/completions", json={"prompt": [1, 2, 3], **xargs(5)})
    page = await http.get("/metrics")
    samples = {
        sample.name: sample
        for family in text_string_to_metric_families(page.text)
        for sample in family.samples
    }
    assert samples["vllm:num_requests_running"].labels == {"engine": "0", "model_name": "emulated"}
    values = {name: sample.value for name, sample in samples.items()}
    assert values["vllm:prompt_tokens_total"] == 3
    assert values["vllm:generation_tokens_total"] == 5
    assert values["vllm:num_requests_running"] == values["vllm:num_requests_waiting"] == 0
    assert values["vllm:kv_cache_usage_perc"] == values["vllm:num_preemptions_total"] == 0
    assert values["evenstep_emulator_time_scale"] == 1
    assert "evenstep_emulator_step_lateness_ratio" in values


async def test_refusals_have_vllm_s_body(api: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await api.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await api.completions.create(model="emulated", prompt="x", max_tokens=100_000)
    refused = await http.post("/v1/completions", content=b"{")
    assert refused.status_code == 400
    assert refused.json()["error"].keys() == {"message", "type", "param", "code"}


async def test_only_its_own_rank_is_accepted(http: httpx.AsyncClient) -> None:
    body = {"prompt": [1], "max_tokens": 1}
    for rank, status in (("0", 200), ("1", 400), ("x", 400)):
        headers = {"x-data-parallel-rank": rank}
        answer = await http.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == status


async def test_priority_decides_who_waits(tmp_path: Path) -> None:
    async with emulated(tmp_path, slots=1) as fleet, client(fleet) as http:
        engine = fleet.workers[0].model.engine
        done: list[str] = []

        async def ask(name: str, **body: Any) -> None:
            await http.post("/v1/completions", json={"prompt": [1], **body})
            done.append(name)

        first = asyncio.create_task(ask("first", max_tokens=300, ignore_eos=True))
        await eventually(lambda: len(engine.running) == 1, "the first runs")
        low = asyncio.create_task(ask("low", priority=1))
        await eventually(lambda: engine.waiting == 1, "one waits")
        high = asyncio.create_task(ask("high", priority=-1))
        await eventually(lambda: engine.waiting == 2, "two wait")
        await asyncio.gather(first, low, high)
        assert done == ["first", "high", "low"]


async def test_preempted_requests_finish_with_their_text(tmp_path: Path) -> None:
    async with emulated(tmp_path, slots=4, kv_tokens=60) as fleet, client(fleet) as http:
        body = {"prompt": [1] * 10, "max_tokens": 40, "ignore_eos": True, "stream": True}
        answers = await asyncio.gather(
            *(events(http, "/v1/completions", body) for _ in range(4)),
        )
        texts = {"".join(e["choices"][0]["text"] for e in answer) for answer in answers}
        assert fleet.workers[0].model.engine.preemptions_total > 0
    assert len(texts) == 1
    assert len(texts.pop().split()) == 40


async def test_time_scale_is_kept(tmp_path: Path) -> None:
    """20 steps of 5 ms at half the speed of life take 0.2 s and not less."""
    settings = {"time_scale": 2.0, "step_time": StepTime(5e-3, 0.0)}
    async with emulated(tmp_path, **settings) as fleet, client(fleet) as http:
        await http.post("/v1/completions", json={"prompt": [1], "max_tokens": 1})
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        await http.post("/v1/completions", json={"prompt": [1], **xargs(20), "max_tokens": 20})
        assert loop.time() - begun_s >= 0.2
        assert fleet.describe()["time_scale"] == 2.0
