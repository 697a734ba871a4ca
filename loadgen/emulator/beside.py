"""Emulated vLLM endpoints that do not generate; only those that clients are tested with."""

import zlib
from collections.abc import Callable
from typing import TypeVar

import msgspec

from loadgen.emulator.generation import Limits, RejectedError, decoded
from loadgen.emulator.text import estimate_text_tokens

_DIMENSIONS = 8

_encode = msgspec.json.encode


class _Asked(msgspec.Struct, kw_only=True):
    model: str | None = None


class _Embeddings(_Asked):
    input: str | list[str | int | list[int]]


class _Text(_Asked):
    prompt: str


class _Tokens(_Asked):
    tokens: list[int]


Asked = TypeVar("Asked", bound=_Asked)


def embed(body: bytes, limits: Limits) -> bytes:
    """Answer ``/v1/embeddings`` with a short made-up vector; the same input gives the same one."""
    asked = _decode(body, _Embeddings, limits)
    ids = isinstance(asked.input, list) and all(isinstance(one, int) for one in asked.input)
    inputs = [asked.input] if ids or isinstance(asked.input, str) else asked.input
    vectors = [
        {
            "object": "embedding",
            "index": index,
            "embedding": [
                zlib.crc32(f"{place}/{one}".encode()) / 2**32 for place in range(_DIMENSIONS)
            ],
        }
        for index, one in enumerate(inputs)
    ]
    tokens = sum(
        len(one) if isinstance(one, list) else estimate_text_tokens(str(one)) for one in inputs
    )
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
    return _encode({"object": "list", "model": limits.model, "data": vectors, "usage": usage})


def tokenize(body: bytes, limits: Limits) -> bytes:
    """Answer ``/tokenize``: the tokens are the characters' code points."""
    tokens = [ord(character) for character in _decode(body, _Text, limits).prompt]
    lengths = {"count": len(tokens), "max_model_len": limits.max_model_len}
    return _encode({**lengths, "tokens": tokens, "token_strs": None})


def detokenize(body: bytes, limits: Limits) -> bytes:
    """Answer ``/detokenize``, the inverse of ``tokenize``."""
    tokens = _decode(body, _Tokens, limits).tokens
    if not all(0 <= token < 0xD800 for token in tokens):
        raise RejectedError("tokens out of range", "tokens")
    return _encode({"prompt": "".join(map(chr, tokens))})


BESIDE: dict[str, Callable[[bytes, Limits], bytes]] = {
    "/v1/embeddings": embed,
    "/tokenize": tokenize,
    "/detokenize": detokenize,
}


def _decode(body: bytes, kind: type[Asked], limits: Limits) -> Asked:
    asked = decoded(body, kind)
    limits.check(asked.model)
    return asked
