import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest

from router.core.errors import InvalidRequestError
from router.core.request_limits import RequestLimits
from router.core.state.rates import TokenRate
from router.proxy.body import ParsedRequest, parse, parse_message, parse_response
from router.proxy.endpoints import pool_request


def parsed(**fields: Any) -> ParsedRequest:
    return parse(json.dumps(fields).encode())


def tokens_of(request: ParsedRequest) -> int:
    """What it comes to before anything is learned."""
    return request.known_tokens + TokenRate().tokens(request.text_bytes, request.parts)


@pytest.mark.parametrize(
    ("prompt", "tokens", "slots"),
    [
        ("", 0, 1),
        ("abcd", 1, 1),
        ("abcde", 2, 1),
        ("äöü", 2, 1),
        ([], 0, 1),
        ([5, 6, 7], 3, 1),
        (["abcd", "abcdefgh"], 2, 2),
        (["", ""], 0, 2),
        ([[1, 2, 3], [4]], 2, 2),
        ([[1, 2], "abcd"], 2, 2),
        ([[]], 0, 1),
        (None, 0, 1),
        (17, 0, 1),
        (True, 0, 1),
        ({"a": 1}, 0, 1),
        ([{"a": 1}], 1, 1),
        (["abcd", 3, None, {}], 1, 4),
    ],
)
def test_prompt(prompt: Any, tokens: int, slots: int) -> None:
    request = parsed(prompt=prompt)

    assert (tokens_of(request), request.slots) == (tokens, slots)


def test_prompt_lengths_of_a_list_are_averaged_upwards() -> None:
    assert parsed(prompt=[[1] * 3, [1] * 4]).known_tokens == 4


def test_without_a_prompt() -> None:
    assert parsed() == ParsedRequest(None, 0, 0, 1, None, 0)


PER_MESSAGE = 4


@pytest.mark.parametrize(
    ("messages", "tokens"),
    [
        ([], 0),
        ([{"role": "user", "content": "abcdefgh"}], PER_MESSAGE + 2),
        ([{"content": "abcd"}, {"content": "abcd"}], 2 * PER_MESSAGE + 2),
        ([{"content": [{"type": "text", "text": "abcd"}, {"text": "abcd"}]}], PER_MESSAGE + 2),
        ([{"content": [{"type": "image_url", "image_url": {"url": "x" * 99}}]}], PER_MESSAGE),
        ([{"content": None}], PER_MESSAGE),
        ([{"content": 3}], PER_MESSAGE),
        ([{"content": [None, 3, "abcd", {"text": 3}]}], PER_MESSAGE),
        ([{}], PER_MESSAGE),
        ([None, 3, "abcd"], 3 * PER_MESSAGE),
        (None, 0),
        (3, 0),
        ("abcdefgh", 0),
        ({"role": "user"}, 0),
    ],
)
def test_chat(messages: Any, tokens: int) -> None:
    assert tokens_of(parsed(messages=messages)) == tokens


IMAGE = {"type": "image_url", "image_url": {"url": "x" * 99}}


@pytest.mark.parametrize(
    ("content", "learns"),
    [
        ("abcd", True),
        ([{"type": "text", "text": "abcd"}], True),
        ([{"type": "text", "text": "abcd"}, IMAGE], False),
        ([IMAGE], False),
        ([None], False),
        ([{"text": 3}], False),
    ],
)
def test_what_is_no_text_says_nothing_of_text(content: Any, learns: bool) -> None:
    """It is estimated by its text still."""
    messages = [{"content": "abcd"}, {"content": content}]
    parsed = parse(json.dumps({"messages": messages}).encode())
    request = pool_request(parsed, TokenRate().tokens, 0.0)
    assert (request.text_bytes > 0 and not request.parts) is learns
    assert request.prompt_tokens > 2 * PER_MESSAGE


@pytest.mark.parametrize("tools", [None, [], "", 0])
def test_empty_tools_count_nothing(tools: Any) -> None:
    request = parsed(messages=[{"content": "abcd"}], tools=tools)
    assert tokens_of(request) == PER_MESSAGE + 1


@pytest.mark.parametrize("tools", [[{"type": "function"}], {"a": "b" * 16}, "abcdefgh", 12345])
def test_tools_count_as_text(tools: Any) -> None:
    text = json.dumps(tools, separators=(",", ":"))

    request = parsed(messages=[], tools=tools)

    assert request.text_bytes == len(text)


@pytest.mark.parametrize(
    ("fields", "slots"),
    [
        ({}, 1),
        ({"n": 3}, 3),
        ({"best_of": 4}, 4),
        ({"n": 2, "best_of": 4}, 4),
        ({"n": 4, "best_of": 2}, 4),
        ({"n": 3, "prompt": ["a", "b"]}, 6),
        ({"n": 0}, 1),
        ({"n": -2}, 1),
        ({"n": True}, 1),
        ({"n": "3"}, 3),
        ({"n": 3.0}, 3),
        ({"n": "x"}, 1),
        ({"n": "nan"}, 1),
        ({"n": "-inf"}, 1),
        ({"n": None, "best_of": None}, 1),
        ({"n": [3]}, 1),
    ],
)
def test_slots(fields: dict[str, Any], slots: int) -> None:
    assert parsed(**fields).slots == slots


@pytest.mark.parametrize("messages", [None, [], [{"content": "x"}]])
def test_prompts_count_whatever_messages_stand_beside_them(messages: Any) -> None:
    assert parsed(prompt=["a", "b", "c"], n=2, messages=messages).slots == 6
    with pytest.raises(InvalidRequestError, match="prompts"):
        parsed(prompt=["x"] * 5000, messages=messages)


def test_whatever_its_depth_a_body_is_read_or_refused() -> None:
    for depth in range(700, 1100, 3):
        with contextlib.suppress(InvalidRequestError):
            parse(b'{"messages":[{"content":' + b"[" * depth + b"]" * depth + b"}]}")


def test_absurd_counts_stay_in_the_range_of_ordinary_numbers() -> None:
    request = parse(b'{"prompt": [7], "max_tokens": %s}' % (b"9" * 400))

    assert request.max_tokens is not None
    assert float(request.max_tokens) < 2**40


LIMITS = RequestLimits(max_slots=6, max_messages=3)
PART = {"type": "text", "text": "a,b,c,d,e,f,g"}


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 7},
        {"n": 10**7},
        {"n": 2**63 - 1},
        {"n": 10**400},
        {"best_of": 7},
        {"prompt": ["a"] * 7},
        {"prompt": [[]] * 7},
        {"prompt": ["a,b"] * 2, "n": 4},
        {"messages": [{}] * 4},
        {"messages": [PART] * 4},
        {"messages": [{"content": [PART] * 3}]},
        {"messages": [{}, {"tool_calls": [{}, {}]}]},
    ],
)
def test_what_asks_for_too_much_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=r"at most|may have|together"):
        parse(json.dumps(fields).encode(), LIMITS)


@pytest.mark.parametrize(
    ("fields", "slots"),
    [
        ({"n": 6}, 6),
        ({"prompt": ["a,b,c,d,e,f,g,h"] * 6}, 6),
        ({"prompt": [[1] * 99] * 3, "n": 2}, 6),
        ({"prompt": list(range(10_000))}, 1),
        ({"messages": [PART] * 3}, 1),
        ({"messages": [{}, {"content": [PART]}]}, 1),
    ],
)
def test_what_is_within_the_limits_is_read(fields: dict[str, Any], slots: int) -> None:
    assert parse(json.dumps(fields).encode(), LIMITS).slots == slots


@pytest.mark.parametrize(
    ("fields", "max_tokens"),
    [
        ({}, None),
        ({"max_tokens": 16}, 16),
        ({"max_completion_tokens": 8}, 8),
        ({"max_tokens": 16, "max_completion_tokens": 8}, 8),
        ({"max_tokens": 16, "max_completion_tokens": None}, 16),
        ({"max_tokens": 0}, None),
        ({"max_tokens": -1}, None),
        ({"max_tokens": False}, None),
        ({"max_tokens": "16"}, None),
        ({"max_tokens": {}}, None),
    ],
)
def test_max_tokens(fields: dict[str, Any], max_tokens: int | None) -> None:
    assert parsed(**fields).max_tokens == max_tokens


@pytest.mark.parametrize(
    ("priority", "expected"), [(3, 3), (-3, -3), (True, 0), ("1", 0), (None, 0), (1.5, 0)]
)
def test_priority(priority: Any, expected: int) -> None:
    assert parsed(priority=priority).priority == expected


def test_model() -> None:
    assert parsed(model="tiny").model == "tiny"
    assert parsed(model=None).model is None


@pytest.mark.parametrize("model", [1, True, ["tiny"], {}])
def test_a_model_that_is_no_string_is_refused(model: Any) -> None:
    with pytest.raises(InvalidRequestError, match="'model' should be a string") as caught:
        parsed(model=model)
    assert caught.value.param == "model"


@pytest.mark.parametrize("body", [b"", b"{", b"{'a': 1}", b"\xff\xfe", b"NaN", b'{"model":"\xff"}'])
def test_a_body_that_is_not_json_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="not valid JSON"):
        parse(body)


@pytest.mark.parametrize("body", [b"[]", b"null", b'"text"', b"1"])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="should be a JSON object"):
        parse(body)


@pytest.mark.parametrize("depth", [100, 900, 1_000, 100_000])
@pytest.mark.parametrize("field", [b"tools", b"prompt", b"other"])
def test_deep_nesting_is_read_or_refused(depth: int, field: bytes) -> None:
    body = b'{"messages": [], "%b": %b%b}' % (field, b"[" * depth, b"]" * depth)
    with contextlib.suppress(InvalidRequestError):
        assert parse(body).slots == 1


TEMPLATE = 16  # bytes, around a message
PICTURE = {"type": "input_image", "image_url": "data:,"}
WORDS = {"type": "input_text", "text": "abcd"}


@pytest.mark.parametrize(
    ("fields", "size", "parts"),
    [
        ({}, 0, 0),
        ({"messages": [{"role": "user", "content": "abcd"}]}, 4 + TEMPLATE, 0),
        ({"messages": [{"content": [WORDS, WORDS]}], "system": "ef"}, 10 + TEMPLATE, 0),
        ({"messages": [{"content": [WORDS, PICTURE]}], "system": [WORDS]}, 8 + TEMPLATE, 1),
        ({"messages": "abcd", "system": 7}, 0, 0),
    ],
)
def test_a_message(fields: dict[str, Any], size: int, parts: int) -> None:
    body = {"model": "m", "max_tokens": 9, "n": 4, "best_of": 3, "priority": 2, **fields}
    assert parse_message(json.dumps(body).encode()) == ParsedRequest(
        *("m", 0, size, 1, 9, 2),
        parts=parts,
        measured="previous_response_id" not in fields,
        splittable=False,
    )


@pytest.mark.parametrize(
    ("fields", "size", "parts"),
    [
        ({}, 0, 0),
        ({"input": "abcd", "instructions": "ef"}, 6 + TEMPLATE, 0),
        ({"input": [{"content": "abcd"}, {"content": [WORDS]}]}, 8 + 2 * TEMPLATE, 0),
        ({"input": [{"content": [PICTURE]}]}, TEMPLATE, 1),
        ({"input": "abcd", "previous_response_id": "resp_1"}, 4 + TEMPLATE, 0),
        ({"input": 7, "tools": []}, 0, 0),
    ],
)
def test_a_response(fields: dict[str, Any], size: int, parts: int) -> None:
    body = {"max_output_tokens": 9, "max_tokens": 3, "n": 4, "background": False, **fields}
    assert parse_response(json.dumps(body).encode()) == ParsedRequest(
        *(None, 0, size, 1, 9, 0),
        parts=parts,
        measured="previous_response_id" not in fields,
        splittable=False,
    )


def test_a_response_in_the_background_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="not supported") as caught:
        parse_response(b'{"input": "a", "background": true}')
    assert caught.value.param == "background"


@pytest.mark.parametrize("read", [parse_message, parse_response])
@pytest.mark.parametrize("body", [b"", b"[]", b'{"model": 1}', b'{"a": 1x}'])
def test_other_bodies_are_refused_alike(
    read: Callable[[bytes], ParsedRequest], body: bytes
) -> None:
    with pytest.raises(InvalidRequestError):
        read(body)


def priority(given: object) -> int:
    return parse(json.dumps({"prompt": "a", "priority": given}).encode()).priority


def test_a_priority_is_a_whole_number_and_beyond_all_goes_first_or_last() -> None:
    assert [priority(given) for given in (-7, 2**63, True, None)] == [-7, 2**63, 0, 0]
    assert priority(-(10**300)) < -(2**63)
    assert priority(10**300) > 2**63
