"""What an engine's prefix cache holds, by ids that are alike on all engines; see ``ids``.

vLLM tells blocks apart by hashes that differ from engine to engine. A request's ids are computed
from its tokens, once per block: those of its prompt when a first block is cached or it gets a slot.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine_patches.plugin.compat_cache import (
    BlockCache,
    beside,
    has_ids,
    of_cpu,
    seed_of,
    tokens,
)
from engine_patches.plugin.harmless import harmless
from engine_patches.stream.cached_blocks import MOST_BLOCKS, CachedBlocks
from router.core.prefix.ids import block_ids, chain
from router.core.wire import request_token

# A snapshot has room for so many beside those of the largest cache that is told.
_MOST_OFFLOADED = MOST_BLOCKS // 2
_ends_prefixes = harmless("routers are not told any more what the prefix cache holds")


@dataclass(slots=True, eq=False)
class _Chain:
    """Ids of a request's blocks so far; ``told``: those of its prompt, -1 before its first slot."""

    request: Any
    ids: array[int] = field(default_factory=lambda: array("Q"))
    told: int = -1


class CachedPrefixes:
    """The blocks of one engine's prefix cache, and of its requests; a fault ends it alone."""

    def __init__(self, cache: BlockCache) -> None:
        self.cached = CachedBlocks(cache.block_tokens)
        self._cache = cache
        self._size = cache.block_tokens
        self._chains: dict[str, _Chain] = {}
        # Ids of cached blocks, by their number in the pool.
        self._ids: dict[int, int] = {}
        # Blocks without ids yet: all of a step together take half the time.
        self._fresh: dict[int, tuple[_Chain, int]] = {}
        # Ids of blocks in the CPU's memory by their key: each is a further copy.
        self._offloaded: dict[bytes, int] = {}
        cache.watch(self._stored, self._removed, self._cleared)
        cache.watch_offloaded(self._moved)

    @property
    def failed(self) -> bool:
        return not self.cached.block_tokens

    @failed.setter
    def failed(self, _: bool) -> None:
        self.cached.end()
        for held in (self._chains, self._ids, self._fresh, self._offloaded):
            held.clear()

    @_ends_prefixes
    def arrived(self, request: Any) -> None:
        """Note a request, as vLLM has it: the next input of a session makes its prompt longer."""
        if has_ids(request):
            self._chains.setdefault(request.request_id, _Chain(request))

    @_ends_prefixes
    def admitted(self, id_: str) -> None:
        """Tell the blocks of a router's request that gets a slot with a new prompt."""
        one = self._chains.get(id_)
        if one is None or request_token(id_) is None:
            return
        blocks = self._prompt_blocks(one)
        if blocks != one.told:
            one.told = blocks
            self._extend(one, blocks)
            self.cached.entered(id_, one.ids[:blocks])

    @_ends_prefixes
    def stepped(self, ended: Iterable[str]) -> None:
        """Tell what a step has cached, and the blocks that answers have filled."""
        self._settle()
        for id_ in ended:
            one = self._chains.pop(id_, None)
            if one is not None and one.told >= 0:
                self.cached.left(id_, one.told, one.ids[one.told :])

    @_ends_prefixes
    def _stored(self, request: Any, blocks: Sequence[Any], first: int, last: int) -> None:
        one = self._chains.get(request.request_id)
        if one is None:
            return
        for position in range(first, last):
            block = blocks[position]
            if block.block_hash is not None and block.block_id not in self._ids:
                self._fresh[block.block_id] = one, position

    @_ends_prefixes
    def _removed(self, block: Any) -> None:
        id_ = self._ids.pop(block.block_id, None)
        if id_ is not None:
            self.cached.removed(id_)
        else:
            self._fresh.pop(block.block_id, None)

    @_ends_prefixes
    def _cleared(self) -> None:
        self._ids.clear()
        self._fresh.clear()
        self._offloaded.clear()
        self.cached.cleared()

    @_ends_prefixes
    def _moved(self, event: Any) -> None:
        """Blocks have entered or left the CPU's memory, from where the engine loads them."""
        keys, gone = of_cpu(event)
        self._settle()
        for key in keys:
            if gone:
                if (id_ := self._offloaded.pop(key, None)) is not None:
                    self.cached.removed(id_)
            elif key not in self._offloaded and len(self._offloaded) < _MOST_OFFLOADED:
                block = self._cache.held(key)
                if block is not None and (id_ := self._ids.get(block.block_id)) is not None:
                    self._offloaded[key] = id_
                    self.cached.stored((id_,))

    def _settle(self) -> None:
        """Compute the ids of fresh blocks."""
        if not self._fresh:
            return
        fresh, self._fresh = self._fresh, {}
        stored = []
        for number, (one, position) in fresh.items():
            if len(one.ids) <= position:
                self._extend(one, max(position + 1, self._prompt_blocks(one)))
            id_ = self._ids[number] = one.ids[position]
            stored.append(id_)
        self.cached.stored(stored)

    def _prompt_blocks(self, one: _Chain) -> int:
        return int(one.request.num_prompt_tokens) // self._size

    def _extend(self, one: _Chain, blocks: int) -> None:
        """Compute its ids up to so many blocks, as far as no cached block has them."""
        ids, request = one.ids, one.request
        # A single one is computed as fast as it is looked up.
        if blocks - len(ids) > 1:
            self._find(one, blocks)
        first, last = len(ids) * self._size, blocks * self._size
        if first < last:
            parent = ids[-1:].tobytes() or seed_of(request)
            pieces = chain(tokens(request, first, last), parent, beside(request, first))
            ids.frombytes(block_ids(pieces, self._size))

    def _find(self, one: _Chain, blocks: int) -> None:
        """Take the ids of its leading blocks from those that are cached."""
        while len(one.ids) < blocks:
            block = self._cache.found(one.request, len(one.ids))
            id_ = None if block is None else self._ids.get(block.block_id)
            if id_ is None:
                break
            one.ids.append(id_)
