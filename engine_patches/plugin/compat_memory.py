"""vLLM's KV memory: its groups, as its own managers count, and prefixes found; see ``compat``."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache
from itertools import takewhile
from typing import Any

from msgspec.structs import replace

from router.core.kv_blocks import KvBlocks
from router.core.types import KvGroup

log = logging.getLogger("vllm.evenstep")

# vLLM's classes of managers, the most special first.
_KINDS = (
    ("SlidingWindowManager", "sliding"),
    ("ChunkedLocalAttentionManager", "chunked"),
    ("MambaManager", "mamba"),
    ("CrossAttentionManager", "cross"),
    ("FullAttentionManager", "full"),
)
_OTHER = "other"
_PROBE = "evenstep"


class KvMemory:
    """The memory of a scheduler, after the scheduler's own constructor."""

    def __init__(self, scheduler: Any) -> None:
        self._manager = manager = scheduler.kv_cache_manager
        # Of the pool that all groups share; one block is a placeholder that no request gets.
        self.blocks_total = int(manager.block_pool.num_gpu_blocks) - 1
        # Number of these that admission leaves free while requests run.
        self.watermark = int(getattr(manager, "watermark_blocks", 0))
        self._longest = int(scheduler.max_model_len)
        # Steps scheduled before the results of one are known.
        self.steps_ahead = steps_ahead = int(scheduler.vllm_config.max_concurrent_batches) - 1
        # Most tokens of a decoding request whose steps have not ended.
        self.in_flight = steps_ahead * (1 + int(scheduler.num_spec_tokens))
        self._managers = manager.coordinator.single_type_managers
        # The model's KV groups, with nothing in use; ``kv``: their arithmetic.
        self.groups = tuple(
            self._group(one, int(scheduler.num_lookahead_tokens)) for one in self._managers
        )
        self.kv = KvBlocks.of(self.groups)
        # Asked for in each step, mostly with a number that was there before.
        self.tokens, self.used = lru_cache(4096)(self.kv.tokens), lru_cache(4096)(self._used)
        # Whether Mamba's states are cached.
        self.caches_states = manager.enable_caching and "mamba" in {one.kind for one in self.groups}

    @property
    def hashed_tokens(self) -> int:
        """Tokens of each hash of a prefix."""
        return int(self._manager.block_pool.hash_block_size)

    @property
    def blocks_free(self) -> int:
        return self._manager.block_pool.get_num_free_blocks()  # type: ignore[no-any-return]

    def _used(self, blocks: int) -> tuple[KvGroup, ...]:
        """The groups with this many blocks of the pool in use."""
        return tuple(replace(group, blocks_used=blocks) for group in self.groups)

    def growth_of(self, request: Any) -> int:
        """Blocks that a decoding request takes in the next step, less those that it frees then.

        For one that has just computed its prompt: it frees what is behind its window at once.
        """
        grown = 0
        processed = request.num_computed_tokens - request.num_in_flight_tokens
        for manager, group in zip(self._managers, self.groups, strict=True):
            blocks = manager.req_to_blocks.get(request.request_id, ())
            tokens = request.num_computed_tokens + 1 + group.ahead_tokens
            grown += max(0, -(-tokens // group.block_size) - len(blocks))
            behind = max(0, manager.get_num_skipped_tokens(processed)) // group.block_size
            grown -= len([*takewhile(_is_kept, reversed(blocks[:behind]))])
            state = getattr(manager, "last_state_block_idx", {}).get(request.request_id)
            if state is not None and behind <= state < -(-processed // group.block_size) - 1:
                grown -= _is_kept(blocks[state])
        return grown

    def prefix(self, request: Any) -> Sequence[Hashable]:
        """Hashes of the blocks that are full now, if others' blocks may serve it."""
        if not self._manager.enable_caching or request.skip_reading_prefix_cache:
            return ()
        return tuple(request.block_hashes)  # vLLM's own list grows with the answer

    def blocks_found(self, request: Any) -> int:
        """Blocks that a waiting request with a prefix does not take, since running ones hold them.

        Blocks that only the cache still has are free for others, so they do not count. Below 0 if
        it needs more, as Mamba does, which goes on from a copy of the state that it finds.
        """
        coordinator, tokens = self._manager.coordinator, min(request.num_tokens, self._longest)
        found, hit, *_ = coordinator.find_longest_cache_hit(
            request.block_hashes, request.num_tokens - 1
        )
        needed = coordinator.get_num_blocks_to_allocate(
            request.request_id, tokens, found, 0, hit, hit, tokens, apply_admission_cap=True
        )
        # For a state that the last step has computed, Mamba's manager asks for all blocks.
        return 0 if needed > self.blocks_total else self.kv.entering(request.num_tokens) - needed

    def _group(self, manager: Any, lookahead: int) -> KvGroup:
        """A group as its manager counts; one that counts otherwise keeps every token here."""
        names, size = {base.__name__ for base in type(manager).__mro__}, int(manager.block_size)
        kind = next((kind for name, kind in _KINDS if name in names), _OTHER)
        told = {tokens: _asked(manager, tokens) for tokens in _samples(size, self._longest)}
        # Mamba has blocks for speculation beside its state, and none for tokens that may follow.
        beside = max(0, told[1] - 1) * size
        ahead = beside + (0 if kind == "mamba" else lookahead)
        most = max(told.values())
        bound = most if most * size < self._longest + beside else 0
        window, held = _window(manager, kind), bound
        if window:
            held = -(-(window + self.in_flight + ahead + size - 1) // size)
        group = KvGroup(size, 0, self.blocks_total, kind, window, ahead, bound, held)
        counted = KvBlocks.of([group])
        if most and all(counted.entering(tokens) >= blocks for tokens, blocks in told.items()):
            return group
        log.warning(
            "evenstep: %s counts KV blocks in a way that is not known here: its group of blocks of "
            "%d tokens counts as one that keeps every token",
            type(manager).__name__,
            size,
        )
        return KvGroup(size, 0, self.blocks_total, _OTHER, ahead_tokens=ahead)


def _is_kept(block: Any) -> bool:
    return not block.is_null


def _window(manager: Any, kind: str) -> int:
    """Last tokens whose blocks a request keeps; 0: all."""
    if kind == "sliding":
        return int(manager.sliding_window) + int(getattr(manager, "extra_retained_tokens", 0))
    if kind == "chunked":
        return int(manager.attention_chunk_size)
    # The state before the latest token's is kept until the step after.
    return 2 if kind == "mamba" else 0


def _asked(manager: Any, tokens: int) -> int:
    """Blocks with which a new request enters, by vLLM's own manager."""
    try:
        return int(
            manager.get_num_blocks_to_allocate(
                _PROBE, tokens, (), 0, 0, tokens, apply_admission_cap=True
            )
        )
    finally:
        manager.req_to_blocks.pop(_PROBE, None)


def _samples(size: int, longest: int) -> Iterator[int]:
    yield 1
    tokens = size
    while tokens < longest:
        yield tokens
        yield tokens + 1
        tokens *= 2
    yield longest
