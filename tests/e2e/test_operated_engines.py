"""Engines whose operator loads adapters, has them sleep or pauses them, behind a router."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.core.types import ASLEEP, PAUSED
from tests.support.server import Server, free_port, running, running_router, wait_until

MARGIN_S = 60.0


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Two of them that do not wait for each other."""
    port = free_port(3)
    command = [sys.executable, "-m", "router.cli", "emulate", "--workers", "2", "--port", str(port)]
    command += ["--no-barrier", "--step-time", "0.001,0"]
    with running(command, port, tmp_path / "engines.log"):
        yield f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"


@pytest.fixture(params=["splice", "asgi"])
def router(
    tmp_path: Path, engines: tuple[str, str], request: pytest.FixtureRequest
) -> Iterator[Server]:
    shape = ["--data-plane", request.param]
    workers = [f"--worker={url},id={name}" for url, name in zip(engines, "ab", strict=True)]
    often = ["--health-interval", "0.05"]
    with running_router(tmp_path, *workers, *shape, *often, "--policy", "jsq") as router:
        wait_until(lambda: states(router) == [None, None], MARGIN_S, "both engines are up")
        yield router


def states(router: Server) -> list[str | None]:
    """Why each worker is down."""
    workers = router.get("/health").json()["groups"]["default"]["workers"]
    return [worker["down_reason"] for worker in workers]


def models(router: Server) -> list[str]:
    return [card["id"] for card in router.get("/v1/models").json()["data"]]


def ask(router: Server, model: str = "emulated") -> int:
    body: dict[str, Any] = {"model": model, "prompt": [1], "max_tokens": 2}
    return httpx.post(f"{router.url}/v1/completions", json=body, timeout=MARGIN_S).status_code


def act(url: str, path: str, **body: str) -> None:
    httpx.post(url + path, json=body, timeout=MARGIN_S).raise_for_status()


def given(url: str) -> float:
    """Requests that an engine has been given: of a token each."""
    lines = httpx.get(f"{url}/metrics", timeout=MARGIN_S).text.splitlines()
    found = [line for line in lines if line.startswith("vllm:prompt_tokens_total")]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def test_adapters_that_come_and_go(router: Server, engines: tuple[str, str]) -> None:
    assert models(router) == ["emulated"]
    assert ask(router, "sql") == 404
    act(engines[1], "/v1/load_lora_adapter", lora_name="sql", lora_path="/adapters/sql")
    wait_until(lambda: models(router) == ["emulated", "sql"], MARGIN_S, "the adapter is served")
    assert ask(router, "sql") == 200
    before = [given(url) for url in engines]
    with ThreadPoolExecutor(8) as clients:
        assert set(clients.map(lambda _: ask(router, "sql"), range(24))) == {200}
    assert [given(url) for url in engines] == [before[0], before[1] + 24]
    act(engines[1], "/v1/unload_lora_adapter", lora_name="sql")
    wait_until(lambda: models(router) == ["emulated"], MARGIN_S, "it is served no more")
    assert ask(router, "sql") == 404


def test_an_engine_that_sleeps_gets_no_requests(router: Server, engines: tuple[str, str]) -> None:
    act(engines[0], "/sleep")
    wait_until(lambda: states(router) == [ASLEEP, None], MARGIN_S, "it sleeps")
    before = [given(url) for url in engines]
    with ThreadPoolExecutor(8) as clients:
        assert set(clients.map(lambda _: ask(router), range(16))) == {200}
    assert [given(url) for url in engines] == [before[0], before[1] + 16]
    act(engines[0], "/wake_up")
    wait_until(lambda: states(router) == [None, None], MARGIN_S, "it is awake")
    wait_until(lambda: ask(router) == 200 and given(engines[0]) > before[0], MARGIN_S, "used")


def test_while_all_are_paused_requests_wait(router: Server, engines: tuple[str, str]) -> None:
    for url in engines:
        act(url, "/pause")
    wait_until(lambda: states(router) == [PAUSED, PAUSED], MARGIN_S, "both are paused")
    assert router.get("/health").status_code == 503
    with ThreadPoolExecutor(1) as client:
        answer = client.submit(ask, router)
        health = router.get("/health").json
        wait_until(
            lambda: router.get("/health").json()["groups"]["default"]["pool_requests"] == 1,
            MARGIN_S,
            "the request waits",
        )
        assert health()["status"] == "unavailable"
        for url in engines:
            act(url, "/resume")
        assert answer.result() == 200
