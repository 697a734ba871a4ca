"""Ids of prefixes: the same tokens have the same id on every engine and in every router.

An engine's own block hashes differ from one start to the next. Here an id stands for all tokens of
a prompt up to the end of a piece of 16 tokens, and for what else vLLM keeps apart: LoRA adapter,
cache salt, multimodal content. A block of k pieces has the id of its last piece, so ids do not
depend on an engine's block size. A chain is the ids of a prompt, one after the other, eight bytes
each, in the machine's order. Collisions are harmless: the engine decides what it has cached.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b

PIECE_TOKENS = 16
ID_BYTES = 8

_PIECE_BYTES = PIECE_TOKENS * array("I").itemsize
_NOTHING: Mapping[int, bytes] = {}


def seed(lora: str = "", salt: str = "") -> bytes:
    """Parent of the first piece's id: what all prompts of an adapter and a salt share."""
    told = f"{len(lora)} {lora}{salt}".encode("utf-8", "surrogatepass")
    return blake2b(told, digest_size=ID_BYTES).digest()


def chain(tokens: Sequence[int], parent: bytes, extra: Mapping[int, bytes] = _NOTHING) -> bytes:
    """Ids of the full pieces of these tokens, which follow the piece ``parent``.

    Args:
        tokens: from a piece's start on.
        parent: id of the piece before, or a ``seed``.
        extra: what else decides a piece's content, by the piece's number among these: multimodal
            content that begins in it.
    """
    packed = packed_tokens(tokens)
    if len(packed) == _PIECE_BYTES and not extra:  # engines add a block at a time
        return blake2b(parent + packed, digest_size=ID_BYTES).digest()
    ids = []
    for number, start in enumerate(range(0, len(packed) - _PIECE_BYTES + 1, _PIECE_BYTES)):
        piece = packed[start : start + _PIECE_BYTES]
        if extra and (more := extra.get(number)) is not None:
            piece += more
        parent = blake2b(parent + piece, digest_size=ID_BYTES).digest()
        ids.append(parent)
    return b"".join(ids)


def packed_tokens(tokens: Sequence[int]) -> bytes:
    """Tokens in four bytes each; no vocabulary has more."""
    try:
        return array("I", tokens).tobytes()
    except OverflowError:
        return array("I", [token & 0xFFFF_FFFF for token in tokens]).tobytes()


def block_ids(chain_: bytes, block_tokens: int) -> bytes:
    """Ids of the full blocks in a chain of pieces; a block has a whole number of pieces."""
    pieces = block_tokens // PIECE_TOKENS
    if pieces == 1:
        return chain_
    ids = array("Q", chain_)
    return ids[pieces - 1 :: pieces].tobytes()
