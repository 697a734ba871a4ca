"""What a worker that does not tell its cache may have cached: parts of the prompts sent there.

A guess: other clients' prompts and answers fill the cache too, and the engine may be without one.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from router.core.prefix.ids import ID_BYTES, PIECE_TOKENS, block_ids
from router.core.prefix.text_chunks import PART_END
from router.core.types import Content

MOST_TOKENS = 500_000
"""Most tokens of a worker while its KV memory is unknown: as an 8B model leaves on 80 GB."""

KEPT_S = 600.0
"""A part not computed for so long counts no more: prompts of others may have taken its place."""

PART_TOKENS = 8 * PIECE_TOKENS
"""Of a prompt of token ids: as much as a chunk of text has, about."""


def parts(content: Content) -> bytes:
    """Ids of a prompt's parts; each stands for all before it. A session is a single one."""
    return content.session or content.chunks or block_ids(content.pieces, PART_TOKENS)


def ends(content: Content, prompt_tokens: int) -> NDArray[np.float64]:
    """Tokens of a prompt up to the end of each part; a text's by their share of the bytes."""
    if content.session:
        return np.array([prompt_tokens], np.float64)
    if not content.chunks:
        count = len(parts(content)) // ID_BYTES
        return np.arange(1, count + 1, dtype=np.float64) * PART_TOKENS
    sizes = np.frombuffer(content.sizes, np.uint32) & ~np.uint32(PART_END)
    upto: NDArray[np.float64] = np.cumsum(sizes, dtype=np.float64)
    upto *= prompt_tokens / max(1.0, upto[-1])
    return upto


class SentPrompts:
    """Parts of one worker's prompts; what was not sent for the longest time goes first."""

    def __init__(self) -> None:
        self.most_tokens = MOST_TOKENS
        self._tokens = 0.0
        self._parts: dict[int, tuple[float, float]] = {}  # tokens, and when it was last sent

    def tokens_of(self, part: int) -> float:
        """Of this part alone; 0 if it is not known."""
        return self._parts.get(part, (0.0, 0.0))[0]

    def add(self, ids: bytes, upto: NDArray[np.float64], now_s: float) -> bytes:
        """A prompt goes there, with so many tokens up to the end of each part.

        Returns:
            Ids that are new.
        """
        new = array("Q")
        sizes: Sequence[float] = np.diff(upto, prepend=0.0).tolist()
        # A prompt's first part last, so that its end is forgotten before its beginning.
        for part, tokens in zip(reversed(array("Q", ids)), reversed(sizes), strict=True):
            before = self._parts.pop(part, None)
            if before is None:
                new.append(part)
            else:
                self._tokens -= before[0]
            self._parts[part] = tokens, now_s
            self._tokens += tokens
        return new.tobytes()

    def forget(self, now_s: float) -> bytes:
        """Stay within the bounds; ids that are forgotten."""
        gone = array("Q")
        while self._parts:
            part, (tokens, sent_s) = next(iter(self._parts.items()))
            if self._tokens <= self.most_tokens and now_s - sent_s <= KEPT_S:
                break
            del self._parts[part]
            self._tokens -= tokens
            gone.append(part)
        return gone.tobytes()
