"""Token ids of texts as emulated engines tell them in KV events, all of a prompt at once.

``Content.ids`` makes them token by token, which takes milliseconds for a long prompt: routers that
need ids, and the emulator where it gives them, would seem slow.
"""

import numpy as np
from numpy.typing import NDArray

from loadgen.emulator.prompt_content import Content
from loadgen.emulator.text import CHARS_PER_TOKEN

_ONES = np.uint32(0xFFFFFFFF)


def _crc_table() -> NDArray[np.uint32]:
    """Of CRC-32, byte by byte."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, np.uint32(0xEDB88320), np.uint32(0)) ^ (table >> 1)
    return table


_CRC = _crc_table()


def ids_of(content: Content, tokens: int) -> list[int]:
    """The first ids, as ``Content.ids``; text that is not plain is slow."""
    text = content.tokens
    if not isinstance(text, str) or not text.isascii():
        return content.ids(0, tokens)
    bytes_ = np.frombuffer(text.encode(), np.uint8).reshape(-1, CHARS_PER_TOKEN)
    crc = np.full(len(bytes_), _ONES, np.uint32)
    for column in range(CHARS_PER_TOKEN):
        crc = _CRC[(crc ^ bytes_[:, column]) & 0xFF] ^ (crc >> 8)
    ids: list[int] = (crc ^ _ONES)[:tokens].tolist()
    return ids
