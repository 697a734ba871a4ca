import json
from typing import Any

import pytest

from loadgen.emulator.generation import (
    Generation,
    Limits,
    RejectedError,
    parse_chat,
    parse_completion,
)
from loadgen.emulator.shapes import error_body
from loadgen.emulator.transfer_params import KvTransfer, kept_params

LIMITS = Limits(model="m", max_model_len=1000, seed=7)


def completion(**fields: Any) -> Generation:
    return parse_completion(json.dumps({"prompt": [1, 2, 3], **fields}).encode(), LIMITS)


def chat(**fields: Any) -> Generation:
    body = {"messages": [{"role": "user", "content": "12345678"}], **fields}
    return parse_chat(json.dumps(body).encode(), LIMITS)


def hidden(tokens: object) -> dict[str, object]:
    return {"vllm_xargs": {"evenstep_output_tokens": tokens}}


@pytest.mark.parametrize(
    ("prompt", "lengths"),
    [
        ([1, 2, 3], (3,)),
        ([[1, 2, 3], [4]], (3, 1)),
        ("123456789", (3,)),
        (["1234", "12345"], (1, 2)),
    ],
)
def test_prompts_in_every_form(prompt: object, lengths: tuple[int, ...]) -> None:
    assert completion(prompt=prompt).prompt_tokens == lengths


def test_chat_prompts_count_text_and_messages() -> None:
    assert chat().prompt_tokens == (2 + 4,)
    parts = [{"type": "text", "text": "1234"}, {"type": "image_url", "image_url": {"url": "x"}}]
    messages = [{"role": "system", "content": None}, {"role": "user", "content": parts}]
    assert chat(messages=messages).prompt_tokens == (1 + 4 + 1 + 4,)


@pytest.mark.parametrize(
    ("fields", "tokens", "reason"),
    [
        ({"max_tokens": 50, **hidden(20)}, 20, "stop"),
        ({"max_tokens": 20, **hidden(20)}, 20, "stop"),
        ({"max_tokens": 19, **hidden(20)}, 19, "length"),
        ({"max_tokens": 50, "ignore_eos": True, **hidden(20)}, 50, "length"),
        ({**hidden(20)}, 16, "length"),
        ({"max_tokens": None, **hidden(20)}, 16, "length"),
    ],
)
def test_where_a_completion_ends(fields: dict[str, Any], tokens: int, reason: str) -> None:
    (plan,) = completion(**fields).plans
    assert (plan.output_tokens, plan.finish_reason) == (tokens, reason)


def test_a_chat_may_fill_the_context() -> None:
    assert chat(ignore_eos=True).plans[0].output_tokens == 994
    assert chat(ignore_eos=True, max_tokens=9).plans[0].output_tokens == 9
    assert chat(ignore_eos=True, max_completion_tokens=8).plans[0].output_tokens == 8


def test_choices_are_n_per_prompt_and_differ() -> None:
    generation = completion(prompt=[[1], [2]], n=2)
    assert len({plan.key for plan in generation.plans}) == len(generation.plans) == 4


def test_stream_options_and_priority() -> None:
    assert completion().stream is completion().include_usage is False
    assert completion(stream=True, stream_options={"include_usage": True}).include_usage
    assert not completion(stream=True, stream_options={"include_usage": False}).include_usage
    assert completion(priority=-3).priority == -3


def test_where_kv_goes_and_where_it_is() -> None:
    assert completion().kv_transfer is completion(kv_transfer_params={}).kv_transfer is None
    keep = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
    assert completion(kv_transfer_params=keep).kv_transfer == KvTransfer(
        True, False, "None", "None"
    )
    params = kept_params("e", "r", 33, host="h", rank=2)
    assert params["remote_block_ids"] == [[1, 2, 3]]
    assert params["remote_port"] == 5602
    assert chat(kv_transfer_params=params).kv_transfer == KvTransfer(False, True, "e", "r")


@pytest.mark.parametrize(
    ("fields", "message", "param", "status"),
    [
        ({"model": "x"}, "The model `x` does not exist.", "model", 404),
        ({"prompt": []}, "non-empty", "prompt", 400),
        ({"prompt": None}, "non-empty", "prompt", 400),
        ({"prompt": ""}, "non-empty", "prompt", 400),
        ({"prompt": [1, "a"]}, "either", "prompt", 400),
        ({"prompt": 3}, "Expected", "prompt", 400),
        ({"max_tokens": "3"}, "Expected", "max_tokens", 400),
        ({"max_tokens": 0}, "at least 1", "max_tokens", 400),
        ({"max_tokens": 998}, "maximum context length is 1000", "input_tokens", 400),
        ({"n": 0}, "at least 1", "n", 400),
        ({"n": 16_385}, "at most 16384, got 16385", "n", 400),
        ({"stop": [""]}, "empty", "stop", 400),
        ({"stream_options": {}}, "stream=True", "stream_options", 400),
        ({"kv_transfer_params": []}, "Expected", "kv_transfer_params", 400),
        (hidden("9"), "positive", "vllm_xargs", 400),
        (hidden(0), "positive", "vllm_xargs", 400),
    ],
)
def test_what_vllm_refuses(fields: dict[str, Any], message: str, param: str, status: int) -> None:
    with pytest.raises(RejectedError) as caught:
        completion(**fields)
    assert message in caught.value.message
    assert (caught.value.param, caught.value.status) == (param, status)
    error = json.loads(error_body(caught.value))["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert error["type"] == ("NotFoundError" if status == 404 else "BadRequestError")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"prompt": "\xff"}'])
def test_bodies_that_are_no_request(body: bytes) -> None:
    with pytest.raises(RejectedError):
        parse_completion(body, LIMITS)
    with pytest.raises(RejectedError):
        parse_chat(body, LIMITS)


def test_a_chat_needs_messages_that_fit() -> None:
    with pytest.raises(RejectedError, match="empty"):
        chat(messages=[])
    with pytest.raises(RejectedError, match="maximum context"):
        chat(messages=[{"role": "user", "content": "x" * 4000}])
