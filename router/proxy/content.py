"""Ids of a prompt's content, which prefix caches are asked for; nothing long is decoded."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from router.core.prefix.ids import chain, seed
from router.core.prefix.text_chunks import seed as text_seed
from router.core.prefix.text_chunks import text_content
from router.core.types import Content
from router.dispatch.models import CachedModel
from router.proxy.json_fields import Raw, given, items, start
from router.proxy.model_tokenizer import tokenizer_of

# Fields that decide how vLLM makes tokens of a prompt or which cached ones it may use, beside those
# that become a part of the text.
_DECIDING = (
    *("cache_salt", "chat_template", "chat_template_kwargs", "documents"),
    *("add_generation_prompt", "continue_final_message", "add_special_tokens"),
    *("tool_choice", "response_format", "output_config", "text", "truncation"),
    *("reasoning_effort", "reasoning", "thinking"),
    *("media_io_kwargs", "mm_processor_kwargs", "mm_payload"),
)
# With them a prompt is not what the body says, or not all of it.
_HIDDEN = (
    *("truncate_prompt_tokens", "prompt_embeds"),
    *("previous_response_id", "previous_input_messages"),
)
# What a chat's tokens follow from.
_RENDERED = (
    *("prompt", "messages", "tools", "documents", "chat_template", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message", "add_special_tokens", "reasoning_effort"),
)
# Longer ones are not decoded: over a million ids.
_MOST_IDS_BYTES = 8 * 1024 * 1024
# Marks of clients of ``/v1/messages``, which move on with the conversation and become no tokens.
_MARK = b'"cache_control"'
_MARKED = re.compile(
    rb',\s*"cache_control"\s*:\s*(?:null|\{[^{}]*\})'
    rb'|"cache_control"\s*:\s*(?:null|\{[^{}]*\})\s*,?\s*'
)
# A block of the system prompt that differs in each request; engines leave it out.
_BILLING, _HEAD_BYTES = b'"x-anthropic-billing-header', 256

_token_ids = msgspec.json.Decoder(list[int])


CachedAs = Callable[[str | None], CachedModel | None]
"""From the name in a request; None: nobody asks for the content of its requests."""


def nobody_asks(_: str | None) -> None:
    """No group asks for content."""


def text_of(
    fields: msgspec.Struct, model: CachedModel, most: int, *parts: Raw, whole: tuple[Raw, ...] = ()
) -> Content | None:
    """Ids of a text in a body's raw fields; None: some of it is hidden.

    ``parts``: texts, or lists of messages of at most ``most``, each a part; ``whole`` come first.
    """
    if _hidden(fields):
        return None
    decides = {"model": model.name.encode(), "adapter": model.adapter.encode()}
    for name in _DECIDING:
        if given(raw := getattr(fields, name)):
            decides[name] = bytes(raw)
    return text_content(text_seed(decides), _parts(whole, parts, most))


def tokenized(fields: msgspec.Struct, model: CachedModel) -> list[int] | None:
    """Token ids of a text or of messages, as the engine makes them; None: they are not known."""
    if not model.tokenizer or _hidden(fields):
        return None
    try:
        said = {
            name: msgspec.json.decode(raw)
            for name in _RENDERED
            if given(raw := getattr(fields, name))
        }
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return tokenizer_of(model.tokenizer).ids(said)


def ids_of(prompt: Raw, fields: msgspec.Struct, model: CachedModel) -> Content | None:
    """Ids of a prompt of token ids; None: it is not valid, too long, or some of it is hidden."""
    if _hidden(fields) or memoryview(prompt).nbytes > _MOST_IDS_BYTES:
        return None
    try:
        tokens = _token_ids.decode(prompt)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return tokens_content(tokens, fields, model)


def tokens_content(
    tokens: Sequence[int], fields: msgspec.Struct, model: CachedModel
) -> Content | None:
    """Ids of a prompt of these tokens; None: its salt is not valid."""
    salt: Raw = getattr(fields, "cache_salt")  # noqa: B009 - the struct is the caller's
    try:
        said = msgspec.json.decode(salt, type=str) if given(salt) else ""
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return Content(pieces=chain(tokens, seed(model.adapter, said)))


def _hidden(fields: msgspec.Struct) -> bool:
    return given(*(getattr(fields, name) for name in _HIDDEN))


def _parts(whole: Iterable[Raw], parts: Iterable[Raw], most: int) -> Iterator[bytes]:
    for raw in whole:
        if given(raw):
            yield bytes(raw)
    for raw in filter(given, parts):
        if start(raw) != b"[":
            # A text that goes on keeps its chunks if its last quote is in none.
            yield bytes(memoryview(raw)[:-1])
            continue
        for one in items(raw, most):
            part = bytes(one)
            if _MARK in part:
                part = _MARKED.sub(b"", part)
            if _BILLING not in part[:_HEAD_BYTES]:
                yield part
