"""The two bodies that a request becomes, and what a prefill worker may answer."""

import json
from typing import Any

import pytest

from router.core.errors import UpstreamError
from router.proxy.kv_transfer import Computed, decode_body, prefill_body, read_answer

ID = f"es-{1:020x}"


def first(hands_params: bool = True, **fields: Any) -> dict[str, Any]:
    body = json.dumps(fields).encode()
    return dict(json.loads(prefill_body(body, ID, hands_params=hands_params)))


def test_what_needs_log_probabilities_goes_with_them() -> None:
    """Engines refuse ``logprob_token_ids`` without ``logprobs``."""
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "logprob_token_ids": [7, 8]}
    assert not asked.keys() & first(prompt="x", **asked).keys()


def test_a_prompt_that_is_answered_by_its_end_keeps_its_kv() -> None:
    """Connectors keep it for a request that was cut at its one token, not for one that ended."""
    sent = first(prompt="x", stop_token_ids=[5], ignore_eos=False)
    assert sent["ignore_eos"] is True
    assert "stop_token_ids" not in sent


def test_what_is_found_by_content_ends_as_it_will() -> None:
    sent = first(hands_params=False, prompt="x", stop_token_ids=[5])
    assert sent == {"prompt": "x", "stop_token_ids": [5], "stream": False, "n": 1, "max_tokens": 1}


@pytest.mark.parametrize(
    "given",
    [{"max_tokens": None}, {"max_completion_tokens": None}, {"max_completion_tokens": 9}, {}],
    ids=str,
)
def test_one_token_however_many_are_asked_for(given: dict[str, Any]) -> None:
    sent = first(prompt="x", **given)
    assert {name: sent[name] for name in ("max_tokens", *given)} == dict.fromkeys(
        ("max_tokens", *given), 1
    )


def test_what_the_router_does_not_know_goes_on_as_it_was_written() -> None:
    body = b'{"seed": 123456789012345678901234567890, "x": [1.0, 1E2, {"n": 3, "stream": true}]}'
    sent = prefill_body(body, ID, hands_params=False)
    assert b'"seed":123456789012345678901234567890' in sent
    assert b'[1.0, 1E2, {"n": 3, "stream": true}]' in sent


def test_names_are_known_however_they_are_written() -> None:
    sent = prefill_body(b'{"strea\\u006d": true, "stream": true}', ID, hands_params=False)
    assert sent.count(b"true") == 0


@pytest.mark.parametrize("body", [b"{}", b" { } ", b'\n{"a": {"kv_transfer_params": 1}}'])
def test_the_place_of_the_kv_is_one_field_more(body: bytes) -> None:
    spliced = json.loads(decode_body(body, b'{"x": [1]}'))
    assert spliced == {"kv_transfer_params": {"x": [1]}, **json.loads(body)}


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"usage": null}',
        b'{"usage": {"prompt_tokens": -1}}',
        b'{"usage": {"prompt_tokens": 1e9}}',
        b'{"usage": {"prompt_tokens": 9223372036854775808}}',
        b'{"usage": {"prompt_tokens": 3}, "kv_transfer_params": "here"}',
        b'{"usage": {"prompt_tokens": 3}, "kv_transfer_params": [{}]}',
        b'{"usage": {"prompt_tokens": 3}, "kv_transfer_params": ' + b"[" * 10**6,
    ],
    ids=lambda answer: answer[-40:].decode("latin-1"),
)
def test_what_is_no_engines_answer(answer: bytes) -> None:
    with pytest.raises(UpstreamError, match="cannot be read"):
        read_answer(answer)


def test_an_answer_as_engines_give_it() -> None:
    told = b'{"kv_transfer_params": {"a": [ 1]} , "usage": {"prompt_tokens": 3}, "id": "x"}'
    assert read_answer(told) == Computed(3, b'{"a": [ 1]}')
    assert read_answer(b'{"usage": {"prompt_tokens": 3}, "kv_transfer_params": null}') == Computed(
        3, None
    )
