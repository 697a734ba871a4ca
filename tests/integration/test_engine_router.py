"""The router before a real vLLM, driven by the official client."""

import http.client
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest

from tests.support.engine import MODEL, metric, requests_running
from tests.support.engine_clients import GROUP
from tests.support.server import Server, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

PROMPT = "even steps"
# A minute and more: still running whenever a test looks.
LONG: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 30_000}
ENDLESS = {"ignore_eos": True}
# Generous: where cores are few, the engine's worker leaves little time to its HTTP server.
WAIT_S = 30


def in_flight(router: Server) -> int:
    (worker,) = router.get("/health").json()["groups"][GROUP]["workers"]
    return int(worker["in_flight"])


def wait_idle(engine: Server, router: Server) -> None:
    wait_until(lambda: requests_running(engine) == 0, WAIT_S, "the engine drops the request")
    wait_until(lambda: in_flight(router) == 0, WAIT_S, "the router drops the request")
    assert metric(router, "evenstep_worker_in_flight") == 0


# --- slots and pool ------------------------------------------------------------------------------


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


def usage_of(answer: Any) -> tuple[int, int]:
    return answer.usage.prompt_tokens, answer.usage.completion_tokens


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
        # The engine counts after a step what it has sent during it.
        wait_until(lambda: requests_running(engine) == 8, WAIT_S, "eight requests run")
        assert metric(engine, "vllm:num_requests_waiting") == 0
        assert waiting() == 1

        stream.close()

        assert usage_of(answer.result(timeout=WAIT_S)) == (len(PROMPT), 3)
    wait_idle(engine, router)


# --- what operators ask for ---------------------------------------------------------------------


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
    response = routed.responses.create(
        model=MODEL, input=PROMPT, max_output_tokens=30_000, stream=True, extra_body=ENDLESS
    )
    next(response)
    body = {**LONG, **ENDLESS, "stream": True}
    with httpx.stream("POST", f"{router.url}/v1/completions", json=body, timeout=60) as raw:
        lines = raw.iter_lines()
        next(lines)

        engine.kill()

        rest = [line for line in lines if line]
    assert [line for line in rest if "error" in events_data(line)] == rest[-1:]
    for stream in (watched, response):
        with pytest.raises(openai.APIError, match="worker"):
            list(stream)

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
