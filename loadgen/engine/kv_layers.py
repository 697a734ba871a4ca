"""KV blocks that a sequence takes, and tokens that attention reads, by kinds of layers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvLayers:
    """Groups of layers with equal blocks, in one pool, as in vLLM's hybrid models.

    Attributes:
        full: groups that keep and read every token.
        sliding: groups that keep and read the last ``window_tokens`` tokens.
        drafts: further tokens of each sequence that its blocks have room for.

    """

    block_tokens: int = 1
    full: int = 1
    sliding: int = 0
    window_tokens: int = 0
    drafts: int = 0

    def __post_init__(self) -> None:
        assert (self.sliding > 0) == (self.window_tokens > 0), "a window is of sliding layers"

    @property
    def groups(self) -> int:
        return self.full + self.sliding

    def blocks(self, tokens: int) -> int:
        """Blocks of a sequence; a window takes one more once it moves, as it straddles blocks."""
        size, drafts = self.block_tokens, self.drafts
        blocks = self.full * -(-(tokens + drafts) // size)
        if self.sliding:
            kept = min(tokens, self.window_tokens) + drafts
            blocks += self.sliding * (-(-kept // size) + (tokens > self.window_tokens))
        return blocks

    def read(self, tokens: int) -> int:
        """Tokens that attention reads of a sequence, summed over the groups."""
        if not self.sliding:
            return self.full * tokens
        return self.full * tokens + self.sliding * min(tokens, self.window_tokens)
