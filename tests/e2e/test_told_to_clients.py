"""What a client and the log are told of a request's way: worker, waits, why it was asked again."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.fleet import Fleet, running_fleet, worker_flags
from tests.support.server import Server, running_router, wait_until

# Of an engine request, at 10 ms a token.
TOKENS, LEAST_S = 40, 0.39


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two engines of one slot each, with names that no header can hold."""
    flags = ("--workers", "2", "--slots", "1", "--no-barrier", "--step-time", "0.01,0")
    with running_fleet(tmp_path_factory.mktemp("fleet"), *flags) as fleet:
        yield fleet


@pytest.fixture(params=["splice", "asgi"])
def router(tmp_path: Path, fleet: Fleet, request: pytest.FixtureRequest) -> Iterator[Server]:
    flags = [*worker_flags(fleet), "--data-plane", request.param, "--policy", "round_robin"]
    flags += ["--log-format", "json", "--worker-headers", "true"]
    with running_router(tmp_path, *flags) as router:
        wait_until(lambda: all(ups(router)), 60, "both engines are up")
        yield router


def ups(router: Server) -> list[bool]:
    workers = router.get("/health").json()["groups"]["default"]["workers"]
    return [worker["up"] for worker in workers]


def lines(router: Server, path: str = "/v1/completions") -> list[dict[str, Any]]:
    """Of the log, those of requests for a path."""
    every = [json.loads(line) for line in router.log.read_text().splitlines() if line[:1] == "{"]
    return [line for line in every if line.get("path") == path and line["level"] == "info"]


def ask(router: Server, http: httpx.Client | None = None, **fields: Any) -> httpx.Response:
    body = {"prompt": [1, 2], "max_tokens": TOKENS, "ignore_eos": True, **fields}
    return (http or httpx).post(f"{router.url}/v1/completions", json=body, timeout=60)


def test_answers_and_the_log_tell_worker_and_waits(router: Server) -> None:
    # All come within one answer: a client of its own for each takes a busy machine too long.
    with httpx.Client(timeout=60) as http, ThreadPoolExecutor(6) as clients:
        answers = list(clients.map(lambda i: ask(router, http, stream=i % 2 == 0), range(6)))
    assert {answer.status_code for answer in answers} == {200}
    wait_until(lambda: len(lines(router)) == 6, 60, "the lines are written")
    found = {line["request_id"]: line for line in lines(router)}
    waits = []
    for answer in answers:
        line = found[answer.headers["x-request-id"]]
        assert answer.headers["x-evenstep-worker"] == line["worker"]
        waits.append(float(answer.headers["x-evenstep-pool-wait-s"]))
        assert line["pool_s"] == pytest.approx(waits[-1], abs=1e-5)
        assert line["engine_s"] >= LEAST_S
        assert line["pool_s"] + line["engine_s"] <= line["duration_s"] + 1e-3
        assert "again" not in line
    assert max(waits) > LEAST_S / 4, "two slots for six"
    tokens = {"prompt": "Hello"}
    beside = httpx.post(f"{router.url}/tokenize", json=tokens, timeout=60)
    assert beside.headers["x-evenstep-worker"] in {line["worker"] for line in found.values()}


def test_without_the_setting_answers_tell_nothing(tmp_path: Path, fleet: Fleet) -> None:
    with running_router(tmp_path, *worker_flags(fleet)) as router:
        assert not [name for name in ask(router).headers if name.startswith("x-evenstep")]


def test_the_log_tells_why_a_worker_was_asked_after_another(router: Server, fleet: Fleet) -> None:
    fleet.fault(0, "error", status=500)
    try:
        for _ in range(3):
            assert ask(router, max_tokens=1).status_code == 200
    finally:
        fleet.restore(0)
    wait_until(lambda: len(lines(router)) == 3, 60, "the lines are written")
    again = [line for line in lines(router) if line["attempts"] == 2]
    assert again
    assert {line["again"].rpartition(": ")[2] for line in again} == {"status 500"}
    assert all(not line["again"].startswith(line["worker"]) for line in again)


def test_a_clients_own_deadline_is_not_tried_again_by_its_library(router: Server) -> None:
    deadline = {"X-Request-Timeout-S": "0.02"}
    with (
        openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=2) as client,
        pytest.raises(openai.InternalServerError) as caught,
    ):
        client.completions.create(
            model="emulated", prompt=[1, 2], max_tokens=TOKENS, extra_headers=deadline
        )
    assert caught.value.status_code == 504
    assert caught.value.response.headers["x-should-retry"] == "false"
    wait_until(lambda: bool(lines(router)), 60, "the line is written")
    assert len(lines(router)) == 1
