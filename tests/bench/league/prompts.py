"""Prompts as emulated engines count and number their tokens, for choosers behind the relay."""

import numpy as np
from numpy.typing import NDArray

from loadgen.emulator.generation import (
    Generation,
    Limits,
    RejectedError,
    parse_chat,
    parse_completion,
)
from loadgen.emulator.prompt_content import Content
from loadgen.emulator.text import CHARS_PER_TOKEN
from tests.bench.league.relay import Asked

_LONGEST = 1 << 40
_ONES = np.uint32(0xFFFFFFFF)


def _crc_table() -> NDArray[np.uint32]:
    """Of CRC-32, byte by byte."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, np.uint32(0xEDB88320), np.uint32(0)) ^ (table >> 1)
    return table


_CRC = _crc_table()


class Reader:
    """Reads requests as emulated engines do."""

    def __init__(self, model: str) -> None:
        self._limits = Limits(model, _LONGEST, seed=0)

    def parsed(self, asked: Asked) -> Generation | None:
        """None: an engine would refuse it."""
        parse = parse_chat if asked.path.startswith("/v1/chat/") else parse_completion
        try:
            return parse(asked.body, self._limits)
        except RejectedError:
            return None


def token_ids(parsed: Generation) -> list[int]:
    """Of the prompt; several prompts count as one after the other."""
    pairs = zip(parsed.contents, parsed.prompt_tokens, strict=True)
    return [id_ for content, tokens in pairs for id_ in _ids(content, tokens)]


def _ids(content: Content, tokens: int) -> list[int]:
    """As ``Content.ids``; the ids of plain text at once, else choosers would seem slow."""
    text = content.tokens
    if not isinstance(text, str) or not text.isascii():
        return content.ids(0, tokens)
    bytes_ = np.frombuffer(text.encode(), np.uint8).reshape(-1, CHARS_PER_TOKEN)
    crc = np.full(len(bytes_), _ONES, np.uint32)
    for column in range(CHARS_PER_TOKEN):
        crc = _CRC[(crc ^ bytes_[:, column]) & 0xFF] ^ (crc >> 8)
    ids: list[int] = (crc ^ _ONES)[:tokens].tolist()
    return ids
