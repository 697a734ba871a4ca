"""KV blocks that a sequence takes, and tokens that attention reads, by kinds of layers."""

from dataclasses import dataclass

from router.core.types import KvGroup


@dataclass(frozen=True, slots=True)
class KvLayers:
    """Groups of layers with equal blocks, in one pool, as in vLLM's hybrid models."""

    block_tokens: int = 1
    full: int = 1  # groups that keep and read every token
    sliding: int = 0  # groups that keep and read the last ``window_tokens`` tokens
    window_tokens: int = 0
    drafts: int = 0  # further tokens of each sequence that its blocks have room for

    def __post_init__(self) -> None:
        assert (self.sliding > 0) == (self.window_tokens > 0), "a window is of sliding layers"

    @property
    def groups(self) -> int:
        return self.full + self.sliding

    @property
    def window_blocks(self) -> int:
        """Blocks of a window, which straddles one more than it fills."""
        return -(-(self.window_tokens + self.drafts) // self.block_tokens) + 1

    @property
    def reach_tokens(self) -> int:
        """Tokens of a sequence beyond which sliding layers take no further block."""
        return self.window_blocks * self.block_tokens - self.drafts if self.sliding else 0

    def blocks(self, tokens: int) -> int:
        """Blocks of a sequence; ``KvBlocks.held`` of the groups that ``kv_groups`` shows."""
        blocks = -(-(tokens + self.drafts) // self.block_tokens)
        if not self.sliding:
            return self.full * blocks
        return self.full * blocks + self.sliding * min(blocks, self.window_blocks)

    def read(self, tokens: int) -> int:
        """Tokens that attention reads of a sequence, summed over the groups."""
        if not self.sliding:
            return self.full * tokens
        return self.full * tokens + self.sliding * min(tokens, self.window_tokens)

    def kv_groups(self, used_blocks: int, total_blocks: int) -> tuple[KvGroup, ...]:
        """The groups as a snapshot shows them."""
        pool = (self.block_tokens, used_blocks, total_blocks)
        full = KvGroup(*pool, ahead_tokens=self.drafts)
        held = self.window_blocks
        sliding = KvGroup(*pool, "sliding", self.window_tokens, self.drafts, held, held)
        return (full,) * self.full + (sliding,) * self.sliding
