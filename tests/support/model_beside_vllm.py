"""The engine model beside vLLM's own scheduler, step by step; a task of ``real_schedulers``."""

import random
from typing import Any

from loadgen.engine.engine import Engine
from loadgen.engine.prefix_cache import PrefixCache
from loadgen.engine.request import EngineRequest
from tests.support.real_schedulers import BLOCK_TOKENS, Driver, Schedulers

_SLOTS = 8
_BLOCKS = 21  # one of them is vLLM's null block
_SAMPLED = 7


def check(make: Schedulers, seed: int, steps: int, step_tokens: int, blocks: int) -> dict[str, int]:
    """Random requests that share prefixes: batch, memory, hits and evictions must be alike."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256)
    rng = random.Random(seed)
    scheduler = make.make(
        "Scheduler", slots=_SLOTS, blocks=blocks, step_tokens=step_tokens, caching=True
    )
    driver = Driver(scheduler, 0, get_request_block_hasher(BLOCK_TOKENS, sha256))
    cache = PrefixCache()
    engine = Engine(
        _SLOTS,
        (blocks - 1) * BLOCK_TOKENS,
        block_tokens=BLOCK_TOKENS,
        chunk=step_tokens,
        prefix_cache=cache,
    )
    shared = [rng.randrange(10, 200) for _ in range(160)]
    seen = {"steps": 0, "preempted": 0, "aborted": 0, "queries": 0, "hits": 0}
    models: dict[str, EngineRequest] = {}
    for _ in range(steps):
        if rng.random() < 0.15:
            prompt = [*shared[: rng.randrange(1, 161)], rng.randrange(10, 200)]
            output = rng.randrange(1, 120)
            id_ = driver.submit(prompt, output)
            models[id_] = EngineRequest(id_, len(prompt), output, chain=_chain(prompt, output))
            engine.add(models[id_])
        if models and rng.random() < 0.02:
            victim = rng.choice(list(models))
            driver.abort(victim)
            seen["aborted"] += engine.abort(victim)
        seen["steps"] += 1
        _step(driver, engine, seen)
        found = (cache.queried_tokens, cache.hit_tokens)
        assert found == (seen["queries"], seen["hits"]), (seen, found)
    seen["preempted"] = engine.preemptions_total
    scheduler.shutdown()
    return seen


def _step(driver: Driver, engine: Engine, seen: dict[str, int]) -> None:
    scheduler = driver.scheduler
    mine = engine.schedule()
    output = scheduler.schedule()
    sampling = driver._sampling(output)
    assert [r.id for r in engine.running] == [r.request_id for r in scheduler.running], seen
    tokens = mine.prefill_tokens + mine.decode_tokens
    assert tokens == output.total_num_scheduled_tokens, (seen, mine, output)
    pool = scheduler.kv_cache_manager.block_pool
    used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    # vLLM takes a prompt's blocks chunk by chunk, the model at once.
    coming = sum(r.prefill_left for r in engine.running)
    assert 0 <= engine.used_tokens - used * BLOCK_TOKENS <= coming + -coming % BLOCK_TOKENS, seen
    stats = scheduler.kv_cache_manager.prefix_cache_stats  # the update takes them
    seen["queries"] += stats.queries
    seen["hits"] += stats.hits
    driver._update(output, sampling)
    engine.advance()


def _chain(prompt: list[int], output: int) -> tuple[object, ...]:
    tokens = [*prompt, *[_SAMPLED] * output]
    ends = range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS)
    return tuple(tuple(tokens[:end]) for end in ends)


def beside(make: Schedulers, steps: int) -> dict[str, Any]:
    """Whole prompts under memory pressure; chunks of prompts where memory suffices."""
    return {
        "whole": [check(make, seed, steps, 4096, _BLOCKS) for seed in range(3)],
        "chunks": [check(make, seed, steps, 64, 400) for seed in range(3, 6)],
    }
