"""Conversations come back to their cache, though no engine tells what it has cached."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.fleet import Fleet, running_fleet, worker_flags
from tests.support.server import Server, running_router

FLEET = ("--workers", "4", "--slots", "4", "--no-snapshots", "--model", "m")
SYSTEM = {"role": "system", "content": "Steps are even. " * 120}
# What it continues is with the engine alone: the router sees no prompt that it could know again.
HIDDEN = {"truncate_prompt_tokens": 4000}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, Server]]:
    folder = tmp_path_factory.mktemp("guessed")
    with (
        running_fleet(folder, *FLEET) as fleet,
        running_router(
            folder, *worker_flags(fleet), "--policy", "prefix_score", "--worker-headers", "true"
        ) as router,
    ):
        yield fleet, router


def ask(router: Server, name: str, body: dict[str, Any], **headers: str) -> tuple[str, int, int]:
    """The worker that has served a chat of this name, its prompt tokens, and those cached."""
    chat = {"messages": [SYSTEM, {"role": "user", "content": name * 40}], "max_tokens": 4}
    answer = httpx.post(
        f"{router.url}/v1/chat/completions",
        json={"model": "m", **chat, **body},
        headers=headers,
        timeout=30.0,
    )
    answer.raise_for_status()
    usage = answer.json()["usage"]
    cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
    return answer.headers["x-evenstep-worker"], usage["prompt_tokens"], cached


def assert_cached_thrice(asked: list[tuple[str, int, int]]) -> None:
    (worker, tokens, cached), *later = asked
    assert cached == 0
    assert len(later) == 3
    assert all(each == (worker, tokens, (tokens - 1) // 16 * 16) for each in later)


def told(router: Server, name: str) -> float:
    text = router.get("/metrics").text
    return sum(map(float, re.findall(rf"^evenstep_{name}{{.*}} (\S+)$", text, re.MULTILINE)))


def test_the_same_chat_is_served_from_the_cache(served: tuple[Fleet, Server]) -> None:
    _, router = served
    before = told(router, "prefix_guessed_tokens_total")
    salt = {"cache_salt": "seen"}
    assert_cached_thrice([ask(router, "seen", salt) for _ in range(4)])
    assert told(router, "prefix_guessed_workers") >= 1
    assert told(router, "prefix_guessed_tokens_total") > before
    assert told(router, "prefix_requests_total") == 0, "nobody has told what was cached"


@pytest.mark.parametrize("named", ["header", "body"])
def test_a_session_is_served_from_the_cache(served: tuple[Fleet, Server], named: str) -> None:
    _, router = served
    body, headers = {**HIDDEN, "cache_salt": named}, {}
    if named == "header":
        headers["X-Session-ID"] = "chat 1"
    else:
        body["prompt_cache_key"] = "chat 1"
    assert_cached_thrice([ask(router, named, body, **headers) for _ in range(4)])


def test_an_absurd_name_is_no_session(served: tuple[Fleet, Server]) -> None:
    _, router = served
    before = told(router, "prefix_guessed_tokens_total")
    for _ in range(4):
        ask(router, "absurd", HIDDEN, **{"X-Session-ID": "s" * 257})
    assert told(router, "prefix_guessed_tokens_total") == before
