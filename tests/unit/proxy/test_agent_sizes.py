"""What agents send is sized as what others send, and leaves the size of that alone."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from router.core.request_limits import DEFAULT_LIMITS
from router.core.state.rates import TokenRate
from router.proxy.content import nobody_asks
from router.proxy.endpoints import ENDPOINTS, pool_request

# Of this text and this tokenizer; neither is what the router begins with.
BYTES_PER_TOKEN = 5.2
WORDS = 'the file "src/main.py" has\n\tno such line; '
# What templates write around messages and calls, the router knows only roughly.
TOLERANCE = 0.15


def text(tokens: int) -> str:
    size = round(tokens * BYTES_PER_TOKEN)
    return (WORDS * (size // len(WORDS) + 1))[:size]


def chat(turns: int, tokens: int) -> dict[str, Any]:
    """Calls of a tool and their results, of so many tokens together."""
    each, messages = tokens // turns, []
    for turn in range(turns):
        call = {"name": "write_file", "arguments": json.dumps({"text": text(each // 2)})}
        calls = [{"id": f"call_{turn}", "type": "function", "function": call}]
        thought = {"role": "assistant", "content": None, "reasoning_content": text(each // 4)}
        messages.append({**thought, "tool_calls": calls})
        messages.append(
            {"role": "tool", "tool_call_id": f"call_{turn}", "content": text(each // 4)}
        )
    return {"messages": messages}


def response(turns: int, tokens: int) -> dict[str, Any]:
    """The same, of Responses."""
    each, items = tokens // turns, []
    for turn in range(turns):
        arguments = json.dumps({"text": text(each // 2)})
        name = {"call_id": f"call_{turn}", "name": "write_file"}
        items.append({"type": "function_call", **name, "arguments": arguments})
        output = text(each // 2)
        items.append({"type": "function_call_output", "call_id": f"call_{turn}", "output": output})
    return {"input": items}


def message(turns: int, tokens: int) -> dict[str, Any]:
    """The same, of Anthropic's interface."""
    each, messages = tokens // turns, []
    for turn in range(turns):
        use = {
            "type": "tool_use",
            "id": f"t{turn}",
            "name": "write",
            "input": {"t": text(each // 2)},
        }
        messages.append({"role": "assistant", "content": [use]})
        content = [{"type": "text", "text": text(each // 2)}]
        result = {"type": "tool_result", "tool_use_id": f"t{turn}", "content": content}
        messages.append({"role": "user", "content": [result]})
    return {"messages": messages}


def sized(rate: TokenRate, path: str, fields: dict[str, Any], tokens: int = 0) -> int:
    """What a request is taken for; then its engine says what it is, if it does."""
    parsed = ENDPOINTS[path].parse(json.dumps(fields).encode(), DEFAULT_LIMITS, nobody_asks)
    request = pool_request(parsed, rate.tokens, 0.0)
    if tokens:
        rate.learn(request.text_bytes, tokens, request.parts)
    return request.prompt_tokens


@pytest.mark.parametrize(
    ("path", "turns_of"),
    [
        ("/v1/chat/completions", chat),
        ("/v1/responses", response),
        ("/v1/messages", message),
    ],
)
def test_after_a_hundred_turns_of_agents_all_are_sized_right(
    path: str, turns_of: Callable[[int, int], dict[str, Any]]
) -> None:
    rate = TokenRate()
    for turn in range(100):
        tokens = 2_000 + 110 * turn
        sized(rate, path, turns_of(4 + turn // 4, tokens), tokens)

    plain = {"messages": [{"role": "user", "content": text(1_000)}]}
    assert sized(rate, "/v1/chat/completions", plain) == pytest.approx(1_000, rel=TOLERANCE)
    assert sized(rate, path, turns_of(29, 13_000)) == pytest.approx(13_000, rel=TOLERANCE)


def test_images_are_what_engines_say_of_them() -> None:
    rate = TokenRate()
    plain = {"messages": [{"role": "user", "content": text(1_000)}]}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 20_000}}
    words = {"type": "text", "text": text(500)}
    shown = {"messages": [{"role": "user", "content": [words, image, image]}]}
    for _ in range(100):
        sized(rate, "/v1/chat/completions", plain, 1_000)
        sized(rate, "/v1/chat/completions", shown, 500 + 2 * 1_200)

    assert sized(rate, "/v1/chat/completions", plain) == pytest.approx(1_000, rel=TOLERANCE)
    assert sized(rate, "/v1/chat/completions", shown) == pytest.approx(2_900, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", {"input": "go on", "previous_response_id": "resp_1"}),
        ("/v1/chat/completions", {"messages": [{"content": "a"}], "documents": [{"text": "b"}]}),
        ("/v1/completions", {"prompt": "a", "prompt_embeds": "b"}),
        ("/v1/completions", {"prompt": [1, 2, 3]}),
    ],
)
def test_nothing_is_learned_of_what_was_not_measured(path: str, fields: dict[str, Any]) -> None:
    rate = TokenRate()
    sized(rate, path, fields, 100_000)
    assert (rate.bytes_per_token, rate.tokens_per_part) == (4, 0)
