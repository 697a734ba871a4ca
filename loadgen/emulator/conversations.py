"""Messages and Responses requests, converted to chats as vLLM does."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from loadgen.emulator.generation import Generation, Limits, decoded, parse_chat

# Fields that both APIs share with chat.
_SAME = ("model", "stream", "priority", "vllm_xargs", "ignore_eos")


class _Item(msgspec.Struct):
    content: str | list[dict[str, Any]] = ""
    role: str = "user"


class _Message(msgspec.Struct):
    messages: list[_Item]
    max_tokens: int
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None


class _Response(msgspec.Struct):
    input: str | list[_Item]
    instructions: str | None = None
    max_output_tokens: int | None = None
    request_id: str | None = None


def parse_message(body: bytes, limits: Limits) -> Generation:
    """Parse the body of ``POST /v1/messages``."""
    asked = decoded(body, _Message)
    before = [] if asked.system is None else [_Item(asked.system, "system")]
    chat = {"max_tokens": asked.max_tokens, "stop": asked.stop_sequences}
    return replace(_parse(body, [*before, *asked.messages], chat, limits), form="message")


def parse_response(body: bytes, limits: Limits) -> Generation:
    """Parse the body of ``POST /v1/responses``."""
    asked = decoded(body, _Response)
    said = [_Item(asked.input)] if isinstance(asked.input, str) else asked.input
    before = [] if asked.instructions is None else [_Item(asked.instructions, "system")]
    generation = _parse(body, [*before, *said], {"max_tokens": asked.max_output_tokens}, limits)
    return replace(generation, form="response", name=asked.request_id)


def _parse(
    body: bytes, messages: list[_Item], chat: Mapping[str, object], limits: Limits
) -> Generation:
    fields = msgspec.json.decode(body)
    same = {name: fields[name] for name in _SAME if name in fields}
    return parse_chat(msgspec.json.encode({**same, **chat, "messages": messages}), limits)
