"""What the router reads of a request's body; everything else passes through unread.

Values that an engine would refuse are not judged here: the engine's own 400 reaches the client
unchanged. An estimate of the prompt's length never causes an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from router.errors import InvalidRequestError

# English text under common tokenizers; only the balance depends on it, never the answer.
_BYTES_PER_TOKEN = 4
_TOKENS_PER_MESSAGE = 4
# No engine takes more; sums and products stay within the range of floats.
_MOST = 2**31 - 1

_decoder = msgspec.json.Decoder()


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """What balancing needs of a completion request; its output length is not among it.

    Attributes:
        model: as named by the client, None where it named none.
        prompt_tokens: per engine request; exact for token-id prompts, else an estimate.
        slots: engine requests that it becomes.
        max_tokens: cap on the output.
        priority: lower goes first.
    """

    model: str | None
    prompt_tokens: int
    slots: int
    max_tokens: int | None
    priority: int


def parse(body: bytes) -> ParsedRequest:
    """Read the body of a (chat) completion request.

    Raises:
        InvalidRequestError: not a JSON object, or a model that is not a string.
    """
    try:
        fields = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise InvalidRequestError("the body should be a JSON object")
    model = fields.get("model")
    if model is not None and not isinstance(model, str):
        raise InvalidRequestError("'model' should be a string", param="model")
    prompts = _prompt_lengths(fields)
    copies = max(_whole(fields.get("n"), 1), _whole(fields.get("best_of"), 1))
    return ParsedRequest(
        model=model,
        prompt_tokens=-(-sum(prompts) // len(prompts)),
        slots=len(prompts) * copies,
        max_tokens=_max_tokens(fields),
        priority=fields["priority"] if type(fields.get("priority")) is int else 0,
    )


def _max_tokens(fields: Mapping[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        if _whole(fields.get(name), 0) > 0:
            return _whole(fields[name], 0)
    return None


def _whole(value: Any, otherwise: int) -> int:
    return min(value, _MOST) if type(value) is int and value > 0 else otherwise


def _prompt_lengths(fields: Mapping[str, Any]) -> list[int]:
    """Tokens of each prompt, at least one prompt."""
    if "messages" in fields:
        return [_chat_tokens(fields)]
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        return [_prompt_tokens(one) for one in prompt]
    return [_prompt_tokens(prompt)]


def _prompt_tokens(prompt: Any) -> int:
    if isinstance(prompt, str):
        return _text_tokens(prompt)
    return len(prompt) if isinstance(prompt, list) else 0


def _chat_tokens(fields: Mapping[str, Any]) -> int:
    messages = fields["messages"]
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return 0
    tools = fields.get("tools")
    tokens = _text_tokens(msgspec.json.encode(tools).decode()) if tools else 0
    for message in messages:
        tokens += _TOKENS_PER_MESSAGE
        if isinstance(message, dict):
            tokens += _content_tokens(message.get("content"))
    return tokens


def _content_tokens(content: Any) -> int:
    if isinstance(content, str):
        return _text_tokens(content)
    if not isinstance(content, list):
        return 0
    texts = (part.get("text") for part in content if isinstance(part, dict))
    return sum(_text_tokens(text) for text in texts if isinstance(text, str))


def _text_tokens(text: str) -> int:
    return -(-len(text.encode("utf-8", "surrogatepass")) // _BYTES_PER_TOKEN)
