"""KV memory in blocks: how many of a worker's pool a request takes, as vLLM counts them.

The KV groups of a model share one pool. For n tokens a group takes ceil((n + ahead) / block), up to
a bound: behind a sliding window blocks become free again, and Mamba keeps one state. A prompt
enters with the tokens of whole steps beside its window, so its bound on entry is larger.
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
    ahead_tokens: int
    most_entering: int
    most_held: int


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
            )
            for group in groups
        )
        return _of(tuple(kinds.items()))

    @classmethod
    def plain(cls, block_tokens: int = 1) -> KvBlocks:
        """One group that keeps every token."""
        return cls(((_Kind(block_tokens, 0, _UNBOUNDED, _UNBOUNDED), 1),))

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
        """``entering`` of each, elementwise."""
        blocks = np.zeros_like(tokens)
        for kind, groups in self.kinds:
            taken = -(-(tokens + kind.ahead_tokens) // kind.block_size)
            blocks += groups * np.minimum(taken, kind.most_entering)
        return blocks

    def each_held(self, tokens: Ints) -> Ints:
        """``held`` of each, elementwise."""
        blocks = np.zeros_like(tokens)
        for kind, groups in self.kinds:
            taken = -(-(tokens + kind.ahead_tokens) // kind.block_size)
            blocks += groups * np.minimum(taken, kind.most_held)
        return blocks

    def shared(self, tokens: int) -> int:
        """Blocks that two requests have in common for good if they begin with the same tokens.

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
        if len(self.kinds) == 1:
            kind, groups = self.kinds[0]
            if kind.most_entering == _UNBOUNDED:
                return max(0, blocks // groups * kind.block_size - kind.ahead_tokens)
        most = blocks * max((kind.block_size for kind, _ in self.kinds), default=1)
        return bisect_right(range(1, max(0, most) + 1), blocks, key=self.entering)


@lru_cache(maxsize=64)
def _of(kinds: tuple[tuple[_Kind, int], ...]) -> KvBlocks:
    """One object for all workers that count alike, so that a round compares them at once."""
    return KvBlocks(kinds)
