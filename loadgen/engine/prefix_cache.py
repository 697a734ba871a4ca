"""Prefix cache of one engine, as vLLM's block pool (0.33).

A block with known content is in the cache from the step that computes it on, while its memory is
not used again. Two requests that compute the same block each keep their own. Blocks that nobody
holds stay cached and are evicted in the order in which they were freed; of one request the last
goes first.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Block:
    """A computed block with known content."""

    id: Hashable
    holders: int = 1


@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive blocks of a request that entered the cache."""

    request: str
    ids: tuple[Hashable, ...]
    parent: Hashable | None  # id of the block before the first; None: none
    first: int  # position of the first in the request's chain


@dataclass(frozen=True, slots=True)
class Removed:
    """A block that left the cache."""

    id: Hashable


@dataclass(frozen=True, slots=True)
class Cleared:
    """All blocks left the cache."""


class PrefixCache:
    """Computed blocks by content; with ``events`` it notes what is stored and removed."""

    def __init__(self, *, events: bool = False) -> None:
        self.queried_tokens = 0  # prompt tokens that were looked up
        self.hit_tokens = 0  # those of them that were found
        self._cached: dict[Hashable, list[Block]] = {}
        # Held by nobody; the next to be evicted first.
        self._free: OrderedDict[Block, None] = OrderedDict()
        self._events: list[Stored | Removed | Cleared] | None = [] if events else None

    @property
    def free_blocks(self) -> int:
        """Cached blocks that nobody holds."""
        return len(self._free)

    def find(self, chain: Sequence[Hashable], limit: int) -> list[Block]:
        """The leading blocks of a chain that are computed, at most ``limit``."""
        found = []
        for id_ in chain[:limit]:
            blocks = self._cached.get(id_)
            if blocks is None:
                break
            found.append(blocks[0])
        return found

    def hold(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if not block.holders:
                del self._free[block]
            block.holders += 1

    def store(self, request: str, blocks: list[Block], ids: Sequence[Hashable]) -> None:
        """Cache further blocks of a request, which holds them; appends them to ``blocks``."""
        first = len(blocks)
        for id_ in ids:
            block = Block(id_)
            self._cached.setdefault(id_, []).append(block)
            blocks.append(block)
        if self._events is not None:
            parent = blocks[first - 1].id if first else None
            self._events.append(Stored(request, tuple(ids), parent, first))

    def release(self, blocks: Sequence[Block]) -> None:
        """Blocks of one request, in their order."""
        for block in reversed(blocks):
            block.holders -= 1
            if not block.holders:
                self._free[block] = None

    def evict(self) -> None:
        """Remove the block that was freed first."""
        block, _ = self._free.popitem(last=False)
        same = self._cached[block.id]
        same.remove(block)
        if not same:
            del self._cached[block.id]
        if self._events is not None:
            self._events.append(Removed(block.id))

    def clear(self) -> int:
        """Forget everything, while nobody holds a block; return how many there were."""
        blocks = len(self._free)
        self._free.clear()
        self._cached.clear()
        if self._events is not None:
            self._events.append(Cleared())
        return blocks

    def take_events(self) -> list[Stored | Removed | Cleared]:
        """What happened since the last call, in order."""
        events = self._events
        if not events:
            return []
        self._events = []
        return events
