"""Content of a prompt in tokens: ids of its blocks, as prefix caching and KV events need them.

A token of a text is four characters, as they are counted. A block's id covers all tokens before it,
the adapter and the client's salt. It is the same on every worker. Prompts of token ids have the ids
that routers compute, in blocks of whole pieces.
"""

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from loadgen.emulator.text import CHARS_PER_TOKEN
from router.core.prefix.ids import PIECE_TOKENS, block_ids, chain, seed

_ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class Content:
    """The tokens of one prompt: text with a whole number of tokens, or token ids."""

    tokens: str | Sequence[int]

    def chain(self, block_tokens: int, salt: str, lora: str = "") -> tuple[int, ...]:
        """An id for each full block."""
        parent = seed(lora, salt)
        if isinstance(self.tokens, str):
            text, size = self.tokens, block_tokens * CHARS_PER_TOKEN
            blocks = [
                text[start : start + size].encode("utf-8", "surrogatepass")
                for start in range(0, len(text) - size + 1, size)
            ]
        elif block_tokens % PIECE_TOKENS == 0:
            return tuple(array("Q", block_ids(chain(self.tokens, parent), block_tokens)))
        else:
            ids, size = _packed(self.tokens), block_tokens * _ID_BYTES
            blocks = [ids[start : start + size] for start in range(0, len(ids) - size + 1, size)]
        told = array("Q")
        for block in blocks:
            parent = blake2b(block, digest_size=_ID_BYTES, key=parent).digest()
            told.frombytes(parent)
        return tuple(told)

    def ids(self, start: int, end: int) -> list[int]:
        """Token ids; those of a text are made up."""
        if not isinstance(self.tokens, str):
            return list(self.tokens[start:end])
        text = self.tokens
        places = range(start * CHARS_PER_TOKEN, end * CHARS_PER_TOKEN, CHARS_PER_TOKEN)
        return [
            zlib.crc32(text[place : place + CHARS_PER_TOKEN].encode("utf-8", "surrogatepass"))
            for place in places
        ]


def whole_tokens(text: str) -> str:
    """The text with blanks up to a whole number of tokens, at least one."""
    return text + " " * (-len(text) % CHARS_PER_TOKEN or (0 if text else CHARS_PER_TOKEN))


def _packed(ids: Sequence[int]) -> bytes:
    try:
        return array("q", ids).tobytes()
    except OverflowError:
        return array("q", [id_ % (1 << 62) for id_ in ids]).tobytes()
