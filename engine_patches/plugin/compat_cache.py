"""vLLM's prefix cache: its blocks as they come and go, and what requests are; see ``compat``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

from engine_patches.plugin.compat_names import has
from engine_patches.stream.cached_blocks import MOST_BLOCKS, is_told
from router.core.prefix.ids import PIECE_TOKENS, seed
from router.core.types import KvGroup

log = logging.getLogger("vllm.evenstep")

CACHE = "cache_full_blocks"
REMOVE = "_remove_cached_block_hashes"
RESET = "reset_prefix_cache"
# Of an OffloadingConnector, or it is not looked at: blocks enter and leave the memory of the CPU.
OFFLOADED = "connector_scheduler.manager.take_events"
_GROUP_BYTES = 4
_NOTHING: Mapping[int, bytes] = {}


class BlockCache:
    """The prefix cache of one KV group."""

    def __init__(self, manager: Any, block_tokens: int, connector: Any) -> None:
        self.block_tokens = block_tokens
        self._connector = connector
        self._pool = manager.block_pool
        self._group = int(manager.kv_cache_group_id)
        self._hashes = block_tokens // int(self._pool.hash_block_size)

    def watch(
        self,
        stored: Callable[[Any, Sequence[Any], int, int], None],
        removed: Callable[[Any], None],
        cleared: Callable[[], None],
    ) -> None:
        """Call these from now on: they must not raise.

        Args:
            stored: takes a request, its blocks, and which of them are cached now.
            removed: takes a block that is about to lose its content, if it has any.
            cleared: the whole cache is empty.
        """
        pool, group = self._pool, self._group
        cache, remove, reset = (getattr(pool, name) for name in (CACHE, REMOVE, RESET))

        @wraps(cache)
        def cache_full_blocks(
            request: Any,
            blocks: Any,
            num_cached_blocks: int,
            num_full_blocks: int,
            block_size: int,
            kv_cache_group_id: int,
            *more: Any,
            **named: Any,
        ) -> Any:
            given = request, blocks, num_cached_blocks, num_full_blocks
            done = cache(*given, block_size, kv_cache_group_id, *more, **named)
            if kv_cache_group_id == group and num_cached_blocks < num_full_blocks:
                stored(*given)
            return done

        @wraps(remove)
        def remove_cached_block_hashes(block: Any) -> Any:
            removed(block)
            return remove(block)

        @wraps(reset)
        def reset_prefix_cache() -> Any:
            done = reset()
            if done:
                cleared()
            return done

        setattr(pool, CACHE, cache_full_blocks)
        setattr(pool, REMOVE, remove_cached_block_hashes)
        setattr(pool, RESET, reset_prefix_cache)

    def watch_offloaded(self, moved: Callable[[Any], None]) -> None:
        """Call this with what vLLM notes of offloaded blocks (``of_cpu``): it must not raise."""
        if not has(self._connector, OFFLOADED):
            return
        offloading = self._connector.connector_scheduler.manager
        take = offloading.take_events

        @wraps(take)
        def take_events() -> Iterator[Any]:
            for event in take():
                moved(event)
                yield event

        offloading.take_events = take_events

    def found(self, request: Any, position: int) -> Any | None:
        """A cached block with the content of a request's block at this position."""
        number = (position + 1) * self._hashes - 1
        if number >= len(request.block_hashes):
            return None
        return self.held(request.block_hashes[number] + self._group.to_bytes(_GROUP_BYTES, "big"))

    def held(self, key: bytes) -> Any | None:
        """A cached block with this key."""
        return self._pool.cached_block_hash_to_block.get_one_block(key)


def open_cache(scheduler: Any, groups: Sequence[KvGroup]) -> BlockCache | None:
    """The cache of the first KV group that keeps every token; None, with a line in the log: none.

    ``groups`` as ``KvMemory`` has them.
    """
    reason = _reason(scheduler, groups)
    if reason:
        log.warning("evenstep: routers are not told what the prefix cache holds: %s", reason)
        return None
    number = _first_full(groups)
    manager = scheduler.kv_cache_manager.coordinator.single_type_managers[number]
    return BlockCache(manager, groups[number].block_size, scheduler.connector)


def of_cpu(event: Any) -> tuple[Sequence[bytes], bool]:
    """Keys of blocks that enter the CPU's memory, or have left it (True)."""
    medium = getattr(event.medium, "value", event.medium)
    return (event.keys if medium == "CPU" else ()), event.removed


def tokens(request: Any, first: int, last: int) -> Sequence[int]:
    """Prompt and output tokens by position."""
    return request.all_token_ids[first:last]  # type: ignore[no-any-return]


def has_ids(request: Any) -> bool:
    """Whether its tokens tell its content: prompts given as embeddings have none."""
    return request.prompt_embeds is None


def seed_of(request: Any) -> bytes:
    """Parent of its first piece."""
    lora = request.lora_request
    return seed("" if lora is None else lora.lora_name, request.cache_salt or "")


def beside(request: Any, first_token: int) -> Mapping[int, bytes]:
    """Multimodal content, by the piece in which it begins, counted from this token on."""
    if not request.mm_features:
        return _NOTHING
    told: dict[int, bytes] = {}
    for feature in request.mm_features:
        piece = (feature.mm_position.offset - first_token) // PIECE_TOKENS
        told[piece] = told.get(piece, b"") + str(feature.identifier).encode()
    return told


def _reason(scheduler: Any, groups: Sequence[KvGroup]) -> str:
    """Why the cache cannot be told; empty if it can."""
    if not scheduler.kv_cache_manager.enable_caching:
        return "prefix caching is off"
    number = _first_full(groups)
    if number < 0:
        return "no KV group of the model keeps whole prompts"
    size, blocks = groups[number].block_size, groups[number].blocks_total
    if not is_told(size, blocks):
        return (
            f"it has {blocks} blocks of {size} tokens; at most {MOST_BLOCKS} are told, of a "
            f"multiple of {PIECE_TOKENS} tokens (--block-size)"
        )
    return ""


def _first_full(groups: Sequence[KvGroup]) -> int:
    return next((number for number, group in enumerate(groups) if group.kind == "full"), -1)
