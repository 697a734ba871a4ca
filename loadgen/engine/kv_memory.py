"""KV memory of one engine: a pool of blocks that requests, kept KV and the prefix cache share."""

from collections.abc import Hashable, Sequence

from loadgen.engine.kv_handoff import KeptKv
from loadgen.engine.kv_layers import KvLayers
from loadgen.engine.prefix_cache import PrefixCache
from loadgen.engine.request import EngineRequest
from router.core.types import KvGroup


class KvMemory:
    """Blocks in use and free; the cache, if any, keeps what nobody else needs."""

    def __init__(
        self, blocks: int, layers: KvLayers, prefix_cache: PrefixCache | None, kept: KeptKv
    ) -> None:
        self.blocks = blocks
        self.layers = layers
        self.prefix_cache = prefix_cache
        # Blocks without content; below 0 when memory overflows.
        self._free = blocks
        self._kept = kept

    @property
    def available(self) -> int:
        """Blocks that may be taken; below 0 when memory overflows."""
        free = self._free - self._kept.blocks
        if self.prefix_cache is not None:
            free += self.prefix_cache.free_blocks * self.layers.full
        return free

    @property
    def kv_groups(self) -> tuple[KvGroup, ...]:
        return self.layers.kv_groups(self.blocks - self.available, self.blocks)

    def take(self, blocks: int) -> None:
        """Take blocks for running requests; negative ones come back."""
        self._free -= blocks
        self.settle()

    def settle(self) -> None:
        """Evict from the cache what memory now needs."""
        cache = self.prefix_cache
        if cache is not None:
            while self._free < self._kept.blocks and cache.free_blocks:
                cache.evict()
                self._free += self.layers.full

    def grow(self, before_tokens: int, tokens: int) -> None:
        """Take what a sequence needs beyond its blocks so far; the cache yields later."""
        self._free -= self.layers.blocks(tokens) - self.layers.blocks(before_tokens)

    def place(self, request: EngineRequest, watermark: int) -> bool:
        """Give a waiting request its memory, if that leaves ``watermark`` blocks free."""
        cache, tokens = self.prefix_cache, request.load_tokens
        blocks, found = self.layers.blocks(tokens), []
        room = self.available - watermark
        if cache is not None:
            found = cache.find(request.chain, self._most_hits(tokens))
            room += self.layers.full * sum(block.holders > 0 for block in found)
        if blocks > room:
            return False
        hits = len(found) * self.layers.block_tokens
        if cache is not None:
            cache.hold(found)
            request.blocks += found
            if not request.preemptions:
                cache.queried_tokens += tokens
                cache.hit_tokens += hits
                request.cached_tokens = hits
        self.take(blocks - len(found) * self.layers.full)
        request.prefill_left = tokens - hits
        return True

    def store(self, request: EngineRequest) -> None:
        """Cache the blocks of known content that are computed by the end of the step."""
        if self.prefix_cache is None:
            return
        full = (request.load_tokens - request.prefill_left) // self.layers.block_tokens
        ids = request.chain[len(request.blocks) : full]
        if ids:
            self.prefix_cache.store(request.id, request.blocks, ids)

    def release(self, request: EngineRequest, held_tokens: int) -> None:
        """Free the memory of a request that holds so many tokens."""
        self._free += self._own_blocks(request, held_tokens)
        if request.blocks:
            assert self.prefix_cache is not None
            self.prefix_cache.release(request.blocks)
            request.blocks = []

    def keep(self, request: EngineRequest, held_tokens: int, now_s: float) -> None:
        """Keep the memory of a request that ends with so many tokens, for another engine.

        The memory that is in use stays the same: what others hold too counts once, as before.
        """
        own, cached = self._own_blocks(request, held_tokens), request.blocks
        request.blocks = []
        self._free += own
        self._kept.keep(request.id, held_tokens, now_s, blocks=own, cached=cached)

    def hit_tokens(self, ids: Sequence[Hashable], prompt_tokens: int) -> int:
        if self.prefix_cache is None:
            return 0
        found = self.prefix_cache.find(ids, self._most_hits(prompt_tokens))
        return len(found) * self.layers.block_tokens

    def held_blocks(self, ids: Sequence[Hashable], tokens: int) -> int:
        """Blocks of a waiting request that running ones hold."""
        if self.prefix_cache is None or not ids:
            return 0
        found = self.prefix_cache.find(ids, self._most_hits(tokens))
        return self.layers.full * sum(block.holders > 0 for block in found)

    def forget_cached(self) -> bool:
        if self.prefix_cache is None or self.available < self.blocks:
            return False
        self._free += self.prefix_cache.clear() * self.layers.full
        return True

    def _own_blocks(self, request: EngineRequest, held_tokens: int) -> int:
        """Blocks of a request that are not in the cache."""
        return self.layers.blocks(held_tokens) - len(request.blocks) * self.layers.full

    def _most_hits(self, tokens: int) -> int:
        """Blocks that may be found: the last token is always computed."""
        return (tokens - 1) // self.layers.block_tokens
