"""Prompts of text through a router with the tokenizer, beside what a real vLLM makes of them."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.proxy.model_tokenizer import ModelTokenizer
from tests.support.engine import MODEL, Installation, running_engine
from tests.support.engine_python import ROOT
from tests.support.server import free_port, wait_until
from tests.support.told_hits import noted, running_noting
from tests.support.trained import FLAGS, Trained, chats

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

WAIT_S = 60
# What templates of other models read: tools, calls, thoughts, parts and a value of the request.
RICH = """{{- bos_token }}
{%- if tools %}
    {%- for tool in tools %}
        {{- tool | tojson }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {{- '<' + part.text + '>' }}
        {%- endfor %}
    {%- endif %}
    {%- if message.reasoning_content %}{{ '(' + message.reasoning_content + ')' }}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {{- call.function.name }} {{ call.function.arguments | tojson(indent=2) }}
    {%- endfor %}
    {{- message.tool_call_id }}{{ message.name }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}
    {%- generation %}{{ '<|im_start|>assistant\\n' }}{% endgeneration %}
    {%- if not enable_thinking %}{{ 'No thoughts.' }}{% endif %}
{%- endif %}
"""
CALLED = {
    "role": "assistant",
    "content": None,
    "reasoning": "why not",
    "tool_calls": [
        {
            "id": "call-1",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"where": "Zürich", "days": [1, 2]}'},
        }
    ],
}
TOOL = {
    "type": "function",
    "function": {
        "parameters": {"type": "object", "properties": {"where": {"type": "string"}}},
        "name": "weather",
        "description": "What's the <weather>?",
        "strict": False,
    },
}


@pytest.fixture(scope="module")
def trained(
    engine_installation: Installation, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trained]:
    endpoint = f"tcp://127.0.0.1:{free_port(2)}"
    config = json.dumps({"evenstep": {"snapshots": endpoint}})
    where = replace(engine_installation, model=engine_installation.trained)
    flags = (
        *(*FLAGS, "--enable-prefix-caching", "--enable-prompt-tokens-details"),
        *("--additional-config", config, "--trust-request-chat-template"),
    )
    folder, environment = tmp_path_factory.mktemp("trained"), {"PYTHONPATH": str(ROOT)}
    with running_engine(where, folder, *flags, environment=environment) as server:
        yield Trained(server, endpoint)


def talks(count: int) -> list[dict[str, Any]]:
    """Chats and prompts with all that decides their tokens."""
    rng, texts = random.Random(3), chats(2 * count, 3, (5, 120))
    bodies: list[dict[str, Any]] = []
    for number in range(count):
        text, parts = texts[number], [{"type": "text", "text": texts[count + number]}, "and"]
        messages = [
            {"role": "system", "content": "Say no more."},
            {"role": "user", "content": text, "name": "Zoë"},
            CALLED,
            {"role": "tool", "content": [{"type": "text", "text": "5 °C"}], "tool_call_id": "1"},
            {"role": "user", "content": parts if number % 2 else "東京は？ 👩‍💻"},
        ]
        bodies.append({"messages": messages[: rng.choice((1, 2, 5))]})
        if number % 3 == 0:
            bodies[-1]["tools"] = [TOOL]
        if number % 4 == 0:
            bodies[-1]["chat_template_kwargs"] = {"enable_thinking": bool(number % 8)}
        if number % 5 == 0:
            bodies[-1] |= {"add_special_tokens": True, "reasoning_effort": "low"}
    return bodies


@pytest.mark.parametrize("template", ["", RICH], ids=["own", "rich"])
def test_tokens_are_the_engines(
    trained: Trained, engine_installation: Installation, tmp_path: Path, template: str
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes((engine_installation.trained / name).read_bytes())
    if template:
        (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = ModelTokenizer(str(tmp_path))
    of_itself = {"chat_template": template} if template else {}
    for body in talks(20):
        if not template:
            body["messages"] = [one for one in body["messages"] if one.get("content")]
        asked = {**body, **of_itself, "max_tokens": 1, "tool_choice": "none"}
        told = answer(trained.server.url, "chat/completions", asked)["prompt_token_ids"]
        assert tokenizer.ids(body) == told
    for prompt in (" a text", "<|im_start|>user\nin  its own\r\nform"):
        for more in ({}, {"add_special_tokens": False}):
            body = {"prompt": prompt, **more}
            (choice,) = answer(trained.server.url, "completions", {**body, "max_tokens": 1})[
                "choices"
            ]
            assert tokenizer.ids(body) == choice["prompt_token_ids"]


def test_first_requests_are_foretold(
    trained: Trained, engine_installation: Installation, tmp_path: Path
) -> None:
    """Texts that part inside a chunk of bytes, which one cannot know without a tokenizer."""
    file, folder = tmp_path / "hits", str(engine_installation.trained)
    flags = (
        *("--worker", trained.worker, "--tokenizer", f"{MODEL}={folder}"),
        *("--policy", "barrier_time"),  # it needs no search to be compiled
    )
    shared, own = chats(1, 7, (400, 400))[0], chats(6, 8, (60, 90))
    found = []
    with running_noting(tmp_path, file, *flags) as router:
        for number, text in enumerate(own):
            messages = [{"role": "user", "content": f"{shared} {text}"}]
            said = {"messages": messages} if number < 3 else {"prompt": f"{shared} {text}"}
            path = "chat/completions" if number < 3 else "completions"
            usage = answer(router.url, path, {**said, "max_tokens": 16, "ignore_eos": True})[
                "usage"
            ]
            cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
            found.append((usage["prompt_tokens"], cached, cached))
            wait_until(lambda: len(noted(file)) == len(found), WAIT_S, "it was compared")
    assert noted(file) == found
    assert [cached > 400 for _, cached, _ in found] == [False, True, True] * 2


def answer(url: str, path: str, body: dict[str, Any]) -> Any:
    more = {"model": MODEL, "temperature": 0, "return_token_ids": True}
    got = httpx.post(f"{url}/v1/{path}", json={**more, **body}, timeout=WAIT_S)
    assert got.status_code == 200, got.text
    return got.json()
