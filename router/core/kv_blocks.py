"""KV memory in blocks: what a request takes, in blocks of the groups that share a pool, as in vLLM.

For n tokens a group takes ceil((n + ahead) / block), up to a bound: blocks behind a sliding window
become free again, and Mamba keeps one state. A prompt enters with the tokens of whole steps beside
its window, so its bound on entry is larger.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from router.core.forecast.forecast import Ints
from router.core.types import KvGroup

_UNBOUNDED = 1 << 40


class _Kind(NamedTuple):
    """What groups that take equally many blocks have in common."""

    block_size: int
    ahead_tokens: int = 0
    most_entering: int = _UNBOUNDED
    most_held: int = _UNBOUNDED
    window: int = 0
    chunked: bool = False


@dataclass(frozen=True, slots=True)
class KvBlocks:
    """Blocks that one request takes in all KV groups together.

    Attributes:
        kinds: each with its number of groups.
    """

    kinds: tuple[tuple[_Kind, int], ...]

    @classmethod
    def of(cls, groups: Iterable[KvGroup]) -> KvBlocks:
        """Arithmetic of these groups; those of an unknown kind keep every token."""
        kinds = Counter(
            _Kind(
                max(1, group.block_size),
                group.ahead_tokens,
                group.most_entering or _UNBOUNDED,
                group.most_held or _UNBOUNDED,
                group.window,
                group.kind == "chunked",
            )
            for group in groups
        )
        return _of(tuple(kinds.items()))

    @classmethod
    def plain(cls, block_tokens: int = 1) -> KvBlocks:
        """One group that keeps every token."""
        return cls(((_Kind(block_tokens), 1),))

    @property
    def windowed(self) -> bool:
        """Whether requests free blocks while they run."""
        return any(kind.window for kind, _ in self.kinds)

    def entering(self, tokens: int) -> int:
        """Blocks that a request of so many tokens needs to enter, without any found in a cache."""
        return sum(
            groups * min(-(-(tokens + kind.ahead_tokens) // kind.block_size), kind.most_entering)
            for kind, groups in self.kinds
        )

    def held(self, tokens: int) -> int:
        """Most blocks that a request holds while it decodes, up to so many tokens."""
        return sum(
            groups * min(-(-(tokens + kind.ahead_tokens) // kind.block_size), kind.most_held)
            for kind, groups in self.kinds
        )

    def each_entering(self, tokens: Ints) -> Ints:
        """``entering``, elementwise."""
        blocks = np.zeros_like(tokens)
        for kind, groups in self.kinds:
            blocks += groups * np.minimum(_blocks(tokens, kind), kind.most_entering)
        return blocks

    def each_held(self, tokens: Ints) -> Ints:
        """``held``, elementwise."""
        blocks = np.zeros_like(tokens)
        for kind, groups in self.kinds:
            blocks += groups * np.minimum(_blocks(tokens, kind), kind.most_held)
        return blocks

    def growth(self, tokens: Ints, in_flight: int = 0) -> int:
        """Blocks that decoding requests take with their latest token, less those that they free.

        ``in_flight``: computed tokens of each whose step has not ended; no window leaves them yet.
        """
        grown = 0
        for kind, groups in self.kinds:
            more = _kept(tokens, kind, in_flight) - _kept(tokens - 1, kind, in_flight)
            grown += groups * int(np.add.reduce(more))
        return grown

    def shared(self, tokens: int) -> int:
        """Blocks that requests have in common for good if they begin with the same tokens.

        Only whole blocks of groups that keep every token.
        """
        return sum(
            groups * (tokens // kind.block_size)
            for kind, groups in self.kinds
            if kind.most_held == _UNBOUNDED
        )

    @staticmethod
    def needs(kv: KvBlocks | None, prompt_tokens: Ints, slots: Ints) -> Ints:
        """``WorkerView.need`` of many requests, elementwise."""
        return slots * (prompt_tokens if kv is None else kv.each_entering(prompt_tokens))

    def tokens(self, blocks: int) -> int:
        """Most tokens with which a single request enters into so many blocks.

        If every group has a bound, as many as these blocks have room for.
        """
        endless = [one for one in self.kinds if one[0].most_entering == _UNBOUNDED]
        if len(endless) == 1:
            # Long enough for all other groups to be at their bounds?
            kind, groups = endless[0]
            rest = sum(count * one.most_entering for one, count in self.kinds if one is not kind)
            most = max(0, (blocks - rest) // groups * kind.block_size - kind.ahead_tokens)
            if self.entering(most + 1) > blocks >= self.entering(most):
                return most
        most = max(0, blocks) * max((kind.block_size for kind, _ in self.kinds), default=1)
        return bisect_right(range(1, most + 1), blocks, key=self.entering)


def _blocks(tokens: Ints, kind: _Kind) -> Ints:
    return (tokens + (kind.ahead_tokens + kind.block_size - 1)) // kind.block_size


def _kept(tokens: Ints, kind: _Kind, in_flight: int) -> Ints:
    """Blocks at the end of the step that computes the last of these tokens."""
    blocks = _blocks(tokens, kind)
    if not kind.window:
        return blocks
    left: Ints
    if kind.chunked:
        left = np.maximum(tokens - 1 - in_flight, 0) // kind.window * kind.window
    else:
        left = np.maximum(tokens - kind.window - in_flight, 0)
    return blocks - left // kind.block_size


@lru_cache(maxsize=64)
def _of(kinds: tuple[tuple[_Kind, int], ...]) -> KvBlocks:
    """One object for all workers that count alike, so that a round compares them at once."""
    return KvBlocks(kinds)
