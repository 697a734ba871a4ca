"""Blocks of a prefix cache as the messages of a stream tell them: what changed since the last one.

The vLLM plug-in and the emulator use ``CachedBlocks``.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from router.core.prefix.ids import PIECE_TOKENS
from router.core.types import PromptChain

MOST_BLOCKS = 1 << 18
"""Most blocks of a cache that is told: a full snapshot of them takes 2 MiB of the 4 MiB allowed.

Nothing is told of a larger one (``cache_block`` 0): a part of it would be no answer to the question
what it holds. It has room for 4 million tokens in blocks of 16; larger blocks tell more.
"""

_MOST_CHAIN_BYTES = 1 << 19


def is_told(block_tokens: int, blocks: int) -> bool:
    """Whether a cache's blocks have ids, and are few enough."""
    return block_tokens % PIECE_TOKENS == 0 and blocks <= MOST_BLOCKS


class Changes(NamedTuple):
    """Fields of a message; see ``Snapshot``."""

    cache_block: int = 0
    blocks_stored: bytes = b""
    blocks_removed: bytes = b""
    blocks_cleared: bool = False
    chains: Sequence[PromptChain] = ()


_NOTHING = Changes()


class CachedBlocks:
    """One prefix cache.

    One thread notes what happens, without a lock. ``take`` and ``held`` are called under the
    publisher's lock. Ids are those of ``router.core.prefix.ids``, as numbers. With
    ``block_tokens`` of 0 nothing is told.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        # Blocks stored, the complements of those removed, and None where all went.
        self._events: deque[int | None] = deque()
        self._chains: deque[PromptChain] = deque()
        # Blocks of each content, as of the last message.
        self._copies: dict[int, int] = {}

    def stored(self, ids: Iterable[int]) -> None:
        """Note blocks that entered the cache; one content may be there several times."""
        self._events.extend(ids)

    def removed(self, id_: int) -> None:
        self._events.append(~id_)

    def cleared(self) -> None:
        self._events.append(None)

    def entered(self, request: str, ids: array[int]) -> None:
        """Note the blocks of a request's prompt, even if they are none."""
        self._chains.append(PromptChain(request, 0, ids.tobytes()))

    def left(self, request: str, prompt_blocks: int, ids: array[int]) -> None:
        """Note the blocks that an answer has filled."""
        if ids:
            self._chains.append(PromptChain(request, prompt_blocks, ids.tobytes()))

    def end(self) -> None:
        """Tell nothing any more."""
        self.block_tokens = 0

    def held(self) -> bytes:
        """Ids of all blocks in it, as of the last message."""
        return array("Q", self._copies).tobytes() if self.block_tokens else b""

    def take(self) -> Changes:
        """What happened since the last call.

        Chains of many long prompts come in several messages: each stays within what is read.
        """
        if not self.block_tokens:
            return _NOTHING
        chains, chain_bytes = [], 0
        while self._chains and chain_bytes < _MOST_CHAIN_BYTES:
            chains.append(self._chains.popleft())
            chain_bytes += len(chains[-1].blocks)
        before, cleared = self._apply()
        copies = self._copies
        stored = [id_ for id_, count in before.items() if not count and id_ in copies]
        removed = [id_ for id_, count in before.items() if count and id_ not in copies]
        if len(stored) + len(removed) > MOST_BLOCKS:
            stored, removed, cleared = [*copies], [], True
        told = array("Q", stored).tobytes(), array("Q", removed).tobytes()
        return Changes(self.block_tokens, *told, cleared, chains)

    def _apply(self) -> tuple[dict[int, int], bool]:
        """Count copies; return the ids concerned with their copies before, and if all went."""
        copies, events = self._copies, self._events
        before: dict[int, int] = {}
        cleared = False
        while events:
            event = events.popleft()
            if event is None:
                copies.clear()
                before.clear()
                cleared = True
                continue
            id_ = event if event >= 0 else ~event
            count = copies.get(id_, 0)
            if id_ not in before:
                before[id_] = count
            if event >= 0:
                copies[id_] = count + 1
            elif count > 1:
                copies[id_] = count - 1
            else:
                copies.pop(id_, None)
        return before, cleared
