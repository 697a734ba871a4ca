"""What the router reads of a request's body; everything else passes through unread.

Values that an engine would refuse are not judged here: the engine's own 400 reaches the client
unchanged. An estimate of the prompt's length never causes an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from router.errors import InvalidRequestError
from router.proxy.split import splittable

# What a chat template writes around a message.
_BYTES_PER_MESSAGE = 16
# No engine takes more; sums and products stay within the range of floats.
_MOST = 2**31 - 1

_decoder = msgspec.json.Decoder()


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """What balancing needs of a completion request; its output length is not among it.

    Attributes:
        model: as named by the client, None where it named none.
        known_tokens: of prompts given as token ids, per engine request.
        text_bytes: of prompts given as text, per engine request.
        slots: engine requests that it becomes.
        max_tokens: cap on the output.
        priority: lower goes first.
        text_only: its messages hold no images or the like, which become tokens as well.
        splittable: one worker may compute its prompt, and another decode.
    """

    model: str | None
    known_tokens: int
    text_bytes: int
    slots: int
    max_tokens: int | None
    priority: int
    text_only: bool = True
    splittable: bool = True


def parse(body: bytes) -> ParsedRequest:
    """Read the body of a (chat) completion request.

    Raises:
        InvalidRequestError: not a JSON object, or a model that is not a string.
    """
    fields = read_fields(body)
    prompts = _prompts(fields)
    known_tokens, text_bytes = (
        -(-sum(each) // len(prompts)) for each in zip(*prompts, strict=True)
    )
    text_only = _all_text(fields.get("messages"))
    copies = max(_whole(fields.get("n"), 1), _whole(fields.get("best_of"), 1))
    return ParsedRequest(
        model=model_of(fields),
        known_tokens=known_tokens,
        text_bytes=text_bytes,
        slots=len(prompts) * copies,
        max_tokens=_max_tokens(fields),
        priority=_priority_of(fields),
        text_only=text_only,
        splittable=text_only and splittable(fields),
    )


def parse_message(body: bytes) -> ParsedRequest:
    """Read the body of ``/v1/messages``.

    Raises:
        InvalidRequestError: as ``parse`` does.
    """
    fields = read_fields(body)
    size = _chat_bytes(fields.get("messages"), fields.get("tools"))
    return _one_answer(
        fields,
        text_bytes=size + _content_bytes(fields.get("system")),
        max_tokens=_whole(fields.get("max_tokens"), 0) or None,
        text_only=_all_text(fields.get("messages")),
    )


def parse_response(body: bytes) -> ParsedRequest:
    """Read the body of ``/v1/responses``.

    Raises:
        InvalidRequestError: as ``parse`` does; or a response that is to be computed when its
            client has gone, whose end the router would not see.
    """
    fields = read_fields(body)
    if fields.get("background"):
        raise InvalidRequestError("background responses are not supported", param="background")
    given = fields.get("input")
    if isinstance(given, str):
        given = [{"content": given}]
    size = _chat_bytes(given, fields.get("tools"))
    return _one_answer(
        fields,
        text_bytes=size + _content_bytes(fields.get("instructions")),
        max_tokens=_whole(fields.get("max_output_tokens"), 0) or None,
        # What was said before is with the engine.
        text_only=_all_text(given) and not fields.get("previous_response_id"),
    )


def _one_answer(
    fields: Mapping[str, Any], *, text_bytes: int, max_tokens: int | None, text_only: bool
) -> ParsedRequest:
    return ParsedRequest(
        model=model_of(fields),
        known_tokens=0,
        text_bytes=text_bytes,
        slots=1,
        max_tokens=max_tokens,
        priority=_priority_of(fields),
        text_only=text_only,
        splittable=False,
    )


def read_fields(body: bytes) -> dict[str, Any]:
    """A body's fields.

    Raises:
        InvalidRequestError: not a JSON object.
    """
    try:
        fields = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise InvalidRequestError("the body should be a JSON object")
    return fields


def model_of(fields: Mapping[str, Any]) -> str | None:
    """The model that a body names, None if it names none.

    Raises:
        InvalidRequestError: a model that is not a string.
    """
    model = fields.get("model")
    if model is not None and not isinstance(model, str):
        raise InvalidRequestError("'model' should be a string", param="model")
    return model


def _priority_of(fields: Mapping[str, Any]) -> int:
    return fields["priority"] if type(fields.get("priority")) is int else 0


def _max_tokens(fields: Mapping[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        if _whole(fields.get(name), 0) > 0:
            return _whole(fields[name], 0)
    return None


def _whole(value: Any, otherwise: int) -> int:
    return min(value, _MOST) if type(value) is int and value > 0 else otherwise


def _prompts(fields: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Token ids and bytes of text of each prompt, at least one prompt."""
    if "messages" in fields:
        return [(0, _chat_bytes(fields["messages"], fields.get("tools")))]
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        return [_prompt(one) for one in prompt]
    return [_prompt(prompt)]


def _prompt(prompt: Any) -> tuple[int, int]:
    if isinstance(prompt, str):
        return 0, _text_bytes(prompt)
    return (len(prompt) if isinstance(prompt, list) else 0), 0


def _chat_bytes(messages: Any, tools: Any) -> int:
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return 0
    size = len(msgspec.json.encode(tools)) if tools else 0
    for message in messages:
        size += _BYTES_PER_MESSAGE
        if isinstance(message, dict):
            size += _content_bytes(message.get("content"))
    return size


def _content_bytes(content: Any) -> int:
    if isinstance(content, str):
        return _text_bytes(content)
    if not isinstance(content, list):
        return 0
    return sum(_text_bytes(part["text"]) for part in content if _is_text(part))


def _parts(messages: Any) -> Iterator[Any]:
    """Parts of the messages whose content comes in parts."""
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        yield from content if isinstance(content, list) else ()


def _all_text(messages: Any) -> bool:
    return all(map(_is_text, _parts(messages)))


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _text_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
