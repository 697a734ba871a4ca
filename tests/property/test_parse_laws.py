"""Laws of reading a request: any JSON object is read, and the hidden length never is."""

import contextlib
import json
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from router.core.errors import InvalidRequestError
from router.core.request_limits import DEFAULT_LIMITS
from router.core.state.rates import TokenRate
from router.dispatch.models import CachedModel
from router.proxy.body import ParsedRequest, parse, parse_message, parse_response
from router.proxy.endpoints import pool_request

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
ANY = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
PROMPTS = TEXT | st.lists(TEXT | st.lists(st.integers(0, 99))) | st.lists(st.integers(0, 99))
PARTS = st.fixed_dictionaries({"type": TEXT}, optional={"text": TEXT | ANY})
MESSAGES = st.lists(st.fixed_dictionaries({"role": TEXT, "content": TEXT | st.lists(PARTS) | ANY}))
FIELDS = {
    "model": st.none() | TEXT,
    "prompt": PROMPTS | ANY,
    "messages": MESSAGES | ANY,
    "tools": ANY,
    "n": st.integers(0, 9) | ANY,
    "best_of": st.integers(0, 9) | ANY,
    "max_tokens": st.integers(0, 99) | ANY,
    "max_completion_tokens": st.integers(0, 99) | ANY,
    "priority": st.integers() | ANY,
    "vllm_xargs": st.dictionaries(TEXT, ANY, max_size=3) | ANY,
}
BODIES = st.builds(
    lambda known, other: {**other, **known},
    st.fixed_dictionaries({}, optional=FIELDS),
    st.dictionaries(TEXT, ANY, max_size=3),
)


def with_hidden_length(body: dict[str, Any], tokens: int) -> dict[str, Any]:
    arguments = body.get("vllm_xargs")
    others = arguments if isinstance(arguments, dict) else {}
    return {**body, "vllm_xargs": {**others, "evenstep_output_tokens": tokens}}


def readings(body: dict[str, Any]) -> tuple[Any, ...]:
    """All that anybody behind the parser can see of a body."""
    try:
        parsed = parse(json.dumps(body).encode())
    except InvalidRequestError as error:
        return error.message, error.param
    request = pool_request(parsed, TokenRate().tokens, 1.0)
    return parsed, request


@given(BODIES, st.integers(0, 10**6), st.integers(0, 10**6))
def test_a_policy_that_reads_the_hidden_length_cannot_exist(
    body: dict[str, Any], one: int, other: int
) -> None:
    expected = readings(body)

    assert readings(with_hidden_length(body, one)) == expected
    assert readings(with_hidden_length(body, other)) == expected


@given(BODIES)
def test_every_object_is_read(body: dict[str, Any]) -> None:
    body["model"] = "tiny"
    asked = body.get("n"), body.get("best_of")
    prompts = max(1, len(body["prompt"])) if isinstance(body.get("prompt"), list) else 1
    try:
        request = parse(json.dumps(body).encode())
    except InvalidRequestError as error:
        refused = error.message
    else:
        assert_sound(request)
        assert request.slots <= 1_024
        assert not any(type(n) is int and n > 1_024 for n in asked)
        return
    assert "1,024" in refused
    assert max(1, *map(count, asked)) * prompts > 1_024


def count(given: Any) -> float:
    """Choices that a client asks for by ``n``; engines read whole floats and digits, too."""
    try:
        return float(given) if isinstance(given, int | float | str) else 0.0
    except ValueError:
        return 0.0


@given(st.binary())
def test_every_other_body_is_refused(body: bytes) -> None:
    with contextlib.suppress(InvalidRequestError):
        assert_sound(parse(body))


def assert_sound(request: ParsedRequest) -> None:
    assert min(request.known_tokens, request.text_bytes) >= 0
    assert request.slots >= 1
    assert request.max_tokens is None or request.max_tokens >= 1


@given(BODIES, st.dictionaries(st.sampled_from(["messages", "input", "system"]), ANY))
def test_ids_are_found_or_there_are_none(body: dict[str, Any], texts: dict[str, Any]) -> None:
    """Whatever a body holds, asking for its content refuses none and changes nothing else."""
    said = json.dumps({**body, **texts, "model": "tiny"}).encode()
    for read in (parse, parse_message, parse_response):
        try:
            plain = read(said)
        except InvalidRequestError:
            continue
        asked = read(said, DEFAULT_LIMITS, lambda _: CachedModel("tiny", ""))
        assert replace(asked, content=None) == plain
        if asked.content is not None:
            assert not asked.content.pieces or not asked.content.chunks
            assert len(asked.content.chunks) == 2 * len(asked.content.sizes)
