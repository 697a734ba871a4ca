"""The league's emulated engines: the token ids that they tell routers, and what that takes."""

import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from loadgen.emulator.generation import Limits
from loadgen.emulator.prompt_content import Content, whole_tokens
from tests.bench.league import rendering
from tests.support.fleet import running_fleet

LIMITS = Limits("emulated", 1 << 20, seed=0)
WORKERS = 2


def asked(prompt: str) -> bytes:
    return json.dumps({"model": "emulated", "prompt": prompt, "max_tokens": 3}).encode()


def ids(answer: bytes) -> list[int]:
    (one,) = msgspec.json.decode(answer)
    found: list[int] = one["token_ids"]
    return found


def test_every_engine_tells_token_ids_as_its_kv_events_do(tmp_path: Path) -> None:
    prompt = "one, two, three and four"
    messages = [{"role": "user", "content": prompt}]
    with (
        running_fleet(tmp_path, "--workers", str(WORKERS), program=rendering.__name__) as fleet,
        httpx.Client(timeout=60) as http,
    ):
        for rank in range(WORKERS):
            url = f"http://127.0.0.1:{fleet.server.port + rank}"

            def told(path: str, body: Any, url: str = url) -> Any:
                return http.post(f"{url}{path}/render", json=body).raise_for_status().json()

            (one,) = told("/v1/completions", {"prompt": prompt, "max_tokens": 3})
            assert one["token_ids"] == Content(prompt).ids(0, 6)
            assert one["sampling_params"] == {"max_tokens": 3}
            chat = told("/v1/chat/completions", {"messages": messages})
            assert chat["token_ids"][-6:] == one["token_ids"]
            metrics = http.get(f"{url}/metrics").text
            assert 'vllm:num_requests_running{engine="0"' in metrics
            assert 'engine="1"' not in metrics


def test_ids_of_plain_text_are_not_made_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["plain enough, whatever else", "zwölf Äpfel"]
    expected = [Content(whole_tokens(text)).ids(0, -(-len(text) // 4)) for text in texts]
    slow: list[Content] = []
    by_token = Content.ids

    def counting(content: Content, start: int, end: int) -> list[int]:
        slow.append(content)
        return by_token(content, start, end)

    monkeypatch.setattr(Content, "ids", counting)
    assert [ids(rendering.completion(asked(text), LIMITS)) for text in texts] == expected
    assert [content.tokens for content in slow] == [whole_tokens(texts[1])]


def test_a_text_is_computed_once_whatever_else_is_asked_meanwhile() -> None:
    """Each engine is asked about each text, and the texts of many requests come mixed."""
    rendering.completion.cache_clear()
    texts = [asked(f"text {number}") for number in range(2000)]
    first, *others = [[rendering.completion(text, LIMITS) for text in texts] for _ in range(8)]
    assert all(answers == first for answers in others)
    assert rendering.completion.cache_info().misses == len(texts)
