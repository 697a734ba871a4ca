"""What the plug-in tells of a prefix cache, on a block pool with vLLM's names."""

import logging
from array import array
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from engine_patches.plugin.compat import EngineView
from engine_patches.plugin.compat_cache import open_cache
from engine_patches.plugin.prefixes import CachedPrefixes
from engine_patches.stream.cached_blocks import MOST_BLOCKS
from router.core.prefix.ids import PIECE_TOKENS, block_ids, chain, seed
from router.core.types import PromptChain
from tests.support.core import token
from tests.support.plugin_engine import (
    BlockPool,
    Coordinator,
    FakeScheduler,
    FullAttentionManager,
    LoRARequest,
    MultiModalFeatureSpec,
    PlaceholderRange,
    Request,
    SlidingWindowManager,
)

pytestmark = pytest.mark.usefixtures("vllm")

ROUTED = f"cmpl-{token(1)}-0"


class Cache:
    """An engine's prefix cache, and what is told of it."""

    def __init__(self, block_tokens: int = 16) -> None:
        self.size = block_tokens
        self.pool = BlockPool()
        self.scheduler = scheduler(manager(self.pool, block_tokens))
        self.moves: list[Any] = []
        offloading = SimpleNamespace(take_events=lambda: iter(self.moves))
        self.scheduler.connector = SimpleNamespace(
            connector_scheduler=SimpleNamespace(manager=offloading)
        )
        self._offloading = offloading
        opened = open_cache(self.scheduler, EngineView(self.scheduler).memory.groups)
        assert opened is not None
        self.prefixes = CachedPrefixes(opened)

    def request(self, tokens: list[int], id_: str = ROUTED, **more: Any) -> Request:
        request = Request(id_, len(tokens))
        request.all_token_ids = tokens
        request.block_hashes = [
            repr(tokens[:end]).encode() for end in range(16, len(tokens) + 1, 16)
        ]
        vars(request).update(more)
        self.prefixes.arrived(request)
        return request

    def store(self, request: Request, numbers: range, first: int = 0, group: int = 3) -> None:
        """The request's blocks have these numbers; all from ``first`` on enter the cache."""
        blocks = [self.pool.blocks[number] for number in numbers]
        self.pool.cache_full_blocks(
            request=request,
            blocks=blocks,
            num_cached_blocks=first,
            num_full_blocks=len(blocks),
            block_size=self.size,
            kv_cache_group_id=group,
        )

    def move(self, *keys: bytes, removed: bool = False, medium: object = "CPU") -> None:
        """Blocks enter or leave the memory of the CPU; vLLM takes the events of each step."""
        self.moves = [SimpleNamespace(keys=[*keys], removed=removed, medium=medium)]
        assert [*self._offloading.take_events()] == self.moves

    def told(self) -> tuple[bytes, bytes, bool]:
        self.prefixes.stepped([])
        return self.prefixes.cached.take()[1:4]


def manager(pool: BlockPool, block_tokens: int = 16) -> FullAttentionManager:
    return FullAttentionManager(block_tokens, block_pool=pool, kv_cache_group_id=3)


def scheduler(*managers: FullAttentionManager) -> FakeScheduler:
    made = FakeScheduler()
    made.kv_cache_manager.coordinator = Coordinator(*managers)
    return made


def of(tokens: list[int], block_tokens: int = 16, parent: bytes | None = None) -> bytes:
    return block_ids(chain(tokens, seed() if parent is None else parent), block_tokens)


@pytest.mark.parametrize("block_tokens", [16, 32])
def test_blocks_have_the_ids_of_their_tokens(block_tokens: int) -> None:
    cache, tokens = Cache(block_tokens), list(range(100))
    request = cache.request(tokens)
    blocks = len(tokens) // block_tokens
    cache.store(request, range(blocks - 1))
    cache.store(request, range(blocks), blocks - 1)
    assert cache.told() == (of(tokens, block_tokens), b"", False)


def test_an_answer_that_fills_a_block() -> None:
    cache, tokens = Cache(), list(range(30))
    request = cache.request(tokens)
    cache.store(request, range(1))
    cache.prefixes.admitted(ROUTED)
    tokens += [9, 9]
    request.block_hashes.append(b"second")
    cache.store(request, range(2), 1)
    cache.prefixes.stepped([ROUTED, "unknown"])
    told = cache.prefixes.cached.take()
    assert told.blocks_stored == of(tokens)
    prompt, answer = of(tokens)[:8], of(tokens)[8:]
    assert told.chains == [PromptChain(ROUTED, 0, prompt), PromptChain(ROUTED, 1, answer)]


def test_a_prompt_is_told_once_and_only_to_routers() -> None:
    cache, tokens = Cache(), list(range(40))
    cache.request(tokens)
    cache.request(tokens, "somebody else's")
    for _ in "again":  # it lost its slot, and got one
        cache.prefixes.admitted(ROUTED)
        cache.prefixes.admitted("somebody else's")
    cache.prefixes.stepped([ROUTED, "somebody else's"])
    assert cache.prefixes.cached.take().chains == [PromptChain(ROUTED, 0, of(tokens))]


def test_the_next_input_of_a_session_is_told_with_what_came_before() -> None:
    """vLLM keeps the session's first request."""
    cache, tokens = Cache(), list(range(20))
    session = cache.request(tokens)
    cache.prefixes.admitted(ROUTED)
    tokens += range(20)
    session.num_prompt_tokens = len(tokens)
    cache.prefixes.arrived(session)
    cache.prefixes.admitted(ROUTED)
    cache.prefixes.stepped([ROUTED])
    told = cache.prefixes.cached.take().chains
    assert told == [PromptChain(ROUTED, 0, of(tokens[:16])), PromptChain(ROUTED, 0, of(tokens))]


def test_ids_of_cached_blocks_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, tokens = Cache(32), list(range(128))
    cache.store(cache.request(tokens, "first"), range(3))
    cache.told()
    computed: list[int] = []

    def counted(tokens: list[int], *more: Any) -> bytes:
        computed.append(len(tokens))
        return chain(tokens, *more)

    monkeypatch.setattr("engine_patches.plugin.prefixes.chain", counted)
    cache.request(tokens)
    cache.prefixes.admitted(ROUTED)
    assert cache.prefixes.cached.take().chains[0].blocks == of(tokens, 32)
    assert computed == [32]
    cache.request(tokens[:96], other := f"cmpl-{token(2)}-0")
    cache.prefixes.admitted(other)
    assert cache.prefixes.cached.take().chains[0].blocks == of(tokens[:96], 32)
    assert computed == [32]


def test_evictions_and_copies() -> None:
    cache, tokens = Cache(), list(range(32))
    for id_, numbers in (("a", range(2)), ("b", range(2, 4))):
        cache.store(cache.request(tokens, id_), numbers)
    assert cache.told()[0] == of(tokens)
    cache.pool.evict(cache.pool.blocks[1])
    cache.pool.evict(cache.pool.blocks[9])  # it has no content
    assert cache.told() == (b"", b"", False)
    cache.pool.evict(cache.pool.blocks[3])
    assert cache.told() == (b"", of(tokens)[8:], False)


class Medium(Enum):
    """As newer versions of vLLM name it."""

    CPU = "CPU"
    STORAGE = "STORAGE"


def test_blocks_in_the_memory_of_the_cpu_stay_told() -> None:
    cache, tokens = Cache(), list(range(48))
    cache.store(cache.request(tokens), range(3))
    keys = [cache.pool.blocks[number].block_hash or b"" for number in range(3)]
    cache.move(keys[0], medium=Medium.CPU)
    cache.move(keys[0], keys[1], b"unknown")
    cache.move(keys[2], medium=Medium.STORAGE)
    assert cache.told() == (of(tokens), b"", False)
    for number in range(3):
        cache.pool.evict(cache.pool.blocks[number])
    assert cache.told() == (b"", of(tokens)[16:], False), "it can load the others"
    cache.move(keys[2])
    cache.move(*keys, removed=True)
    told = cache.told()
    assert {*array("Q", told[1])} == {*array("Q", of(tokens)[:16])}


def test_a_reset_forgets_the_memory_of_the_cpu() -> None:
    cache, tokens = Cache(), list(range(16))
    cache.store(cache.request(tokens), range(1))
    key = cache.pool.blocks[0].block_hash or b""
    cache.move(key)
    assert cache.pool.reset_prefix_cache()
    assert cache.told() == (b"", b"", True)
    cache.move(key, removed=True)
    assert cache.told() == (b"", b"", False)


def test_what_a_step_stores_and_evicts_is_not_told() -> None:
    """As when a request is preempted in the step that has let it in."""
    cache, tokens = Cache(), list(range(32))
    request = cache.request(tokens)
    cache.store(request, range(2))
    cache.pool.evict(cache.pool.blocks[1])
    assert cache.told() == (of(tokens)[:8], b"", False)
    cache.store(request, range(2), 1)
    assert cache.told() == (of(tokens)[8:], b"", False)


def test_a_reset() -> None:
    cache, tokens = Cache(), list(range(32))
    request = cache.request(tokens)
    cache.store(request, range(2))
    cache.told()
    cache.pool.resets = False
    assert not cache.pool.reset_prefix_cache()
    assert cache.told() == (b"", b"", False)
    cache.store(cache.request(tokens, "fresh"), range(2, 4))
    cache.pool.resets = True
    assert cache.pool.reset_prefix_cache()
    cache.store(request, range(5, 6))
    assert cache.told() == (of(tokens)[:8], b"", True)


def test_adapter_and_salt_keep_prompts_apart() -> None:
    cache, tokens = Cache(), list(range(48))
    request = cache.request(tokens, cache_salt="s", lora_request=LoRARequest("l"))
    cache.store(request, range(3))
    assert cache.told()[0] == of(tokens, parent=seed("l", "s"))


def test_pictures_keep_prompts_apart_from_where_they_begin() -> None:
    cache, tokens = Cache(), list(range(64))
    pictures = [MultiModalFeatureSpec(name, PlaceholderRange(20)) for name in ("x", "y")]
    request = cache.request(tokens[:48], mm_features=pictures)
    cache.store(request, range(3))
    own = chain(tokens, seed(), {1: b"xy"})
    assert cache.told()[0] == own[:24]
    request.all_token_ids = tokens
    request.block_hashes.append(b"fourth")
    cache.store(request, range(4), 3)
    assert cache.told()[0] == own[24:]
    assert own[:8] == of(tokens)[:8]
    assert own[8:16] != of(tokens)[8:16]


def test_prompts_without_tokens_and_other_groups_are_not_told() -> None:
    cache, tokens = Cache(), list(range(32))
    embedded = cache.request(tokens, prompt_embeds=object())
    cache.store(embedded, range(2))
    cache.prefixes.admitted(ROUTED)
    cache.prefixes.stepped([ROUTED])
    cache.store(cache.request(tokens, "a"), range(2, 4), group=0)
    cache.prefixes.stepped(["a"])
    assert cache.prefixes.cached.take()[1:] == (b"", b"", False, [])


def test_blocks_behind_a_window_have_no_content() -> None:
    cache, tokens = Cache(), list(range(32))
    cache.pool.blocks[0].is_null = True
    cache.store(cache.request(tokens), range(2))
    assert cache.told()[0] == of(tokens)[8:]


def test_a_block_evicted_while_a_request_has_it_does_not_matter() -> None:
    """As when KV from elsewhere could not be loaded."""
    cache, tokens = Cache(), list(range(32))
    request = cache.request(tokens)
    cache.store(request, range(1))
    cache.pool.evict(cache.pool.blocks[0])
    cache.store(request, range(2), 1)
    assert cache.told()[0] == of(tokens)[8:]


def test_a_fault_ends_this_alone(caplog: pytest.LogCaptureFixture) -> None:
    cache, tokens = Cache(), list(range(32))
    request = cache.request(tokens)
    del request.all_token_ids
    cache.store(request, range(2))
    assert cache.told() == (b"", b"", False)
    assert cache.pool.blocks[0].block_hash is not None
    assert "routers are not told any more what the prefix cache holds" in caplog.text
    assert cache.prefixes.cached.take() == (0, b"", b"", False, ())
    cache.store(cache.request(tokens), range(2, 4))
    cache.pool.evict(cache.pool.blocks[2])
    assert cache.prefixes.cached.take().cache_block == 0


def why_not(scheduler: FakeScheduler, caplog: pytest.LogCaptureFixture) -> str:
    with caplog.at_level(logging.WARNING):
        assert open_cache(scheduler, EngineView(scheduler).memory.groups) is None
    (line,) = [one.getMessage() for one in caplog.records]
    return line


def test_without_prefix_caching_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    made = scheduler(manager(BlockPool()))
    made.kv_cache_manager.enable_caching = False
    assert why_not(made, caplog).endswith("prefix caching is off")


def test_the_first_group_that_keeps_every_token_is_told(caplog: pytest.LogCaptureFixture) -> None:
    window = SlidingWindowManager(32, sliding_window=64)
    made = scheduler(window, manager(BlockPool()))
    opened = open_cache(made, EngineView(made).memory.groups)
    assert opened is not None
    assert opened.block_tokens == 16
    assert "no KV group of the model keeps whole prompts" in why_not(scheduler(window), caplog)


@pytest.mark.parametrize(("size", "blocks"), [(24, 100), (PIECE_TOKENS, MOST_BLOCKS + 1)])
def test_caches_without_ids_or_too_large_are_not_told(
    size: int, blocks: int, caplog: pytest.LogCaptureFixture
) -> None:
    made = scheduler(manager(BlockPool(), size))
    made.kv_cache_manager.block_pool.num_gpu_blocks = blocks + 1
    reason = f"it has {blocks} blocks of {size} tokens; at most 262144 are told"
    assert reason in why_not(made, caplog)
