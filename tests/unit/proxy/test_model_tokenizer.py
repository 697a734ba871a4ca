"""Prompts of text as token ids. That they are vLLM's is shown by test_engine_tokenizer.py."""

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from router.core.prefix.ids import chain, seed
from router.core.request_limits import DEFAULT_LIMITS
from router.dispatch.models import CachedModel
from router.proxy.body import ParsedRequest, parse
from router.proxy.model_tokenizer import ModelTokenizer
from tests.support.byte_tokenizer import byte_tokenizer

PARTS = (
    "{% for m in messages %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endfor %}"
)
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 5}'}}
TEXT = {"type": "text", "text": "b"}
ASKED: dict[str, Any] = {"role": "user", "content": "hi"}
BEGUN = "<|begin|>[user]hi"


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(byte_tokenizer(tmp_path))


def shown(folder: str, **body: Any) -> str:
    """The text that its tokens are."""
    ids = ModelTokenizer(folder).ids(body)
    assert ids is not None
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    return str(tokenizer.decode(ids, skip_special_tokens=False))


def parsed(folder: str, **fields: Any) -> ParsedRequest:
    model = CachedModel("m", "", folder)
    return parse(json.dumps(fields).encode(), DEFAULT_LIMITS, lambda _: model)


def call(**function: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", **function}}]}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"prompt": "hi"}, "<|begin|>hi"),
        ({"prompt": ["hi"]}, "<|begin|>hi"),
        ({"prompt": "hi", "add_special_tokens": False}, "hi"),
        ({"prompt": "a longer one than"}, "<|begin|>a longer one than"),
        ({"messages": [ASKED]}, f"{BEGUN}[assistant]"),
        ({"messages": [ASKED], "add_special_tokens": True}, f"<|begin|>{BEGUN}[assistant]"),
        ({"messages": [ASKED], "add_generation_prompt": False}, BEGUN),
        ({"messages": [ASKED], "documents": ["d"]}, f"{BEGUN}['d'][assistant]"),
        ({"messages": [ASKED], "reasoning_effort": "low"}, f"{BEGUN}True[assistant]"),
        ({"messages": [ASKED], "reasoning_effort": "none"}, f"{BEGUN}False[assistant]"),
        (
            {
                "messages": [ASKED],
                "reasoning_effort": "low",
                "chat_template_kwargs": {"enable_thinking": 5, "bos_token": ""},
            },
            "[user]hi5[assistant]",
        ),
        (
            {"messages": [ASKED], "tools": [{"function": {"strict": 1, "name": "<f>"}}]},
            BEGUN + '[{"type": "function", "function": {"name": "<f>", "description": null, '
            '"parameters": null, "strict": 1}}][assistant]',
        ),
        (
            {"messages": [{"role": "user", "content": ["a", TEXT], "name": "n"}]},
            "<|begin|>[user]a\nbn[assistant]",
        ),
        (
            {"messages": [{"role": "tool", "content": None, "tool_call_id": "1"}]},
            "<|begin|>[tool]1[assistant]",
        ),
        (
            {"messages": [{"role": "assistant", "content": "b", "reasoning_content": "r"}]},
            "<|begin|>[assistant]br[assistant]",
        ),
        ({"messages": [call(arguments='{"x": 5}')]}, "<|begin|>[assistant]5[assistant]"),
        ({"messages": [call(arguments={"x": 6})]}, "<|begin|>[assistant]6[assistant]"),
        ({"messages": [call(arguments='{"x"')]}, "<|begin|>[assistant][assistant]"),
        ({"messages": [call()]}, "<|begin|>[assistant][assistant]"),
    ],
)  # fmt: skip
def test_what_becomes_tokens(folder: str, body: dict[str, Any], text: str) -> None:
    assert shown(folder, **body) == text


def test_a_template_that_reads_parts_gets_parts(tmp_path: Path) -> None:
    folder = byte_tokenizer(tmp_path, None)
    (folder / "chat_template.jinja").write_text(PARTS)
    chat = [{"role": "user", "content": ["a", {"type": "input_text", "text": "b"}]}, ASKED]
    assert shown(str(folder), messages=chat) == "<a><b><hi>"


def test_a_template_may_ask_for_the_date(tmp_path: Path) -> None:
    folder = byte_tokenizer(tmp_path, "{{ strftime_now('%Y') }}")
    assert shown(str(folder), messages=[ASKED]) in {time.strftime("%Y")}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "developer", "content": "d"}]},
        {"messages": [ASKED], "chat_template": "{{ messages }}"},
        {"messages": [ASKED], "continue_final_message": True},
        {"messages": [5]},
        {"prompt": "\ud800"},
        {"prompt": "a" * 2_000_001},
    ],
)
def test_what_an_engine_may_do_otherwise_counts_as_a_text(
    folder: str, body: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = ModelTokenizer(folder)
    with caplog.at_level(logging.WARNING):
        assert [tokenizer.ids(body) for _ in range(3)] == [None] * 3
    assert [folder in line for line in caplog.messages] == [True]


@pytest.mark.parametrize("template", [None, "{{ raise_exception('no') }}", "{{ messages.a.b }}"])
def test_a_template_that_fails_leaves_chats_to_what_is_learned(
    tmp_path: Path, template: str | None
) -> None:
    folder = str(byte_tokenizer(tmp_path, template))
    of_text = parsed("", messages=[ASKED])
    assert parsed(folder, messages=[ASKED]) == of_text
    assert of_text.content is not None
    assert of_text.content.chunks
    assert parsed(folder, prompt="hi").known_tokens == 3


def test_a_request_has_the_ids_and_the_length_of_its_tokens(folder: str) -> None:
    prompt = "a text of more than sixteen bytes"
    tokens = ModelTokenizer(folder).ids({"prompt": prompt}) or []
    for said in (prompt, [prompt]):
        found = parsed(folder, prompt=said, cache_salt="s")
        assert (found.known_tokens, found.text_bytes) == (len(tokens), 0)
        assert found.content is not None
        assert found.content.pieces == chain(tokens, seed("", "s"))
    both: dict[str, Any] = {"prompt": prompt, "messages": [ASKED]}
    assert parsed(folder, **both).content is None
    for hidden in ({"prompt": [prompt, prompt]}, {"prompt": prompt, "truncate_prompt_tokens": 5}):
        assert parsed(folder, **hidden) == parsed("", **hidden)
    chat = parsed(folder, messages=[ASKED], n=2)
    assert (chat.known_tokens, chat.slots, chat.measured) == (
        len(f"{BEGUN}[assistant]") - 8,
        2,
        True,
    )
