"""The ids of a body's prompt, read from its bytes."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from router.core.prefix.ids import chain, seed
from router.core.request_limits import DEFAULT_LIMITS, RequestLimits
from router.core.types import Content
from router.dispatch.models import CachedModel
from router.proxy.body import ParsedRequest, parse, parse_message, parse_response
from router.proxy.content import CachedAs

Parse = Callable[[bytes, RequestLimits, CachedAs], ParsedRequest]

ASKED: dict[str, Any] = {"role": "user", "content": "asked " * 200}
ANSWERED = {"role": "assistant", "content": "answered"}
CHAT: dict[str, Any] = {"messages": [ASKED]}


def content(read: Parse = parse, model: str = "m", adapter: str = "", **fields: Any) -> Content:
    found = read(json.dumps(fields).encode(), DEFAULT_LIMITS, lambda _: CachedModel(model, adapter))
    assert found.content is not None
    return found.content


def none(read: Parse = parse, **fields: Any) -> bool:
    body = json.dumps(fields).encode()
    return read(body, DEFAULT_LIMITS, lambda _: CachedModel("m", "")).content is None


@pytest.mark.parametrize(
    ("read", "field"),
    [(parse, "messages"), (parse_message, "messages"), (parse_response, "input")],
)
def test_the_next_turn_goes_on_with_the_chunks_of_this_one(read: Parse, field: str) -> None:
    first: dict[str, Any] = {field: [ASKED]}
    second: dict[str, Any] = {field: [ASKED, ANSWERED, ASKED]}
    one, two = content(read, **first), content(read, **second)
    assert two.chunks.startswith(one.chunks)
    assert len(two.chunks) > len(one.chunks)
    assert len(one.sizes) * 2 == len(one.chunks)


@pytest.mark.parametrize(
    "decides",
    [
        {"cache_salt": "s"},
        {"tools": [{"type": "function"}]},
        {"functions": [{"name": "f"}]},
        {"chat_template": "{{ messages }}"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"documents": [{"text": "a"}]},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"add_special_tokens": True},
        {"reasoning_effort": "low"},
        {"tool_choice": "none"},
        {"response_format": {"type": "json_object"}},
        {"mm_processor_kwargs": {"fps": 1}},
    ],
)
def test_what_changes_a_prompt_changes_all_ids(decides: dict[str, Any]) -> None:
    plain, other = content(**CHAT), content(**CHAT, **decides)
    assert plain.chunks[8:16] not in other.chunks
    null: dict[str, Any] = dict.fromkeys(decides)
    assert content(**CHAT, **null) == plain


def test_models_do_not_mix() -> None:
    assert content(model="a", **CHAT) != content(model="b", **CHAT)
    assert content(model="a", adapter="a", **CHAT) != content(model="a", **CHAT)


def test_what_changes_no_prompt_changes_no_id() -> None:
    assert content(**CHAT, temperature=1, max_tokens=5, stream=True, n=3) == content(**CHAT)


def test_marks_that_move_on_do_not_part_a_conversation() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    text = {"type": "text", "text": 'of \\"cache_control\\": {}'}
    for marked in ({**text, **mark}, {**mark, **text}):
        moved = content(parse_message, messages=[{"role": "user", "content": [marked]}])
        assert moved == content(parse_message, messages=[{"role": "user", "content": [text]}])


def test_a_block_of_the_system_prompt_that_engines_drop() -> None:
    def of(billing: str) -> Content:
        blocks = [{"type": "text", "text": billing}, {"type": "text", "text": "be kind"}]
        return content(parse_message, system=blocks, **CHAT)

    head = "x-anthropic-billing-header: "
    assert of(head + "1") == of(head + "2")
    assert of("1") != of("2")


def test_a_text_that_goes_on() -> None:
    one, two = content(prompt="a" * 2000), content(prompt="a" * 3000)
    assert two.chunks[: 8 * 4] == one.chunks[: 8 * 4]
    assert content(prompt=["a" * 2000]) == one


def test_token_ids_are_exact() -> None:
    ids = list(range(100))
    exact = Content(pieces=chain(ids, seed()))
    assert content(prompt=ids) == content(prompt=[ids]) == exact
    assert content(prompt=ids, adapter="l", cache_salt="s").pieces == chain(ids, seed("l", "s"))


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ["a", "b"]},
        {"prompt": [[1], [2]]},
        {"prompt": [1.5]},
        {"prompt": [1], "cache_salt": 5},
        {"prompt": [1], "truncate_prompt_tokens": 5},
        {"prompt": {"id": "a"}},
        {"prompt": "a", "messages": [ASKED]},
        {"prompt": "a", "prompt_embeds": "AAAA"},
        {"messages": [ASKED], "truncate_prompt_tokens": 5},
        {"prompt": [1] * (5 << 20)},
    ],
)
def test_prompts_that_have_no_ids(fields: dict[str, Any]) -> None:
    assert none(**fields)


def test_responses_whose_beginning_the_engine_keeps() -> None:
    assert none(parse_response, input="a", previous_response_id="resp_1")
    assert none(parse_response, input="a", prompt={"id": "template"})
    assert not none(parse_response, input="a")


@pytest.mark.parametrize("read", [parse, parse_message, parse_response])
def test_nobody_asks(read: Parse) -> None:
    body = json.dumps({**CHAT, "input": "a"}).encode()
    assert read(body, DEFAULT_LIMITS, lambda _: None).content is None


@pytest.mark.parametrize("read", [parse, parse_message, parse_response])
@pytest.mark.parametrize(
    ("key", "name"),
    [("chat 1", b"chat 1"), (7, b""), (None, b""), ("k" * 254, b"k" * 254), ("k" * 255, b"")],
    ids=repr,
)
def test_a_body_may_name_its_session(read: Parse, key: Any, name: bytes) -> None:
    body = json.dumps({"prompt_cache_key": key, "cache_salt": "s"}).encode()
    assert read(body, DEFAULT_LIMITS, lambda _: None).session == (name, b'"s"')
    assert read(b"{}", DEFAULT_LIMITS, lambda _: None).session == (b"", b"")
