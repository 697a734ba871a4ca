"""What it costs to tell the prefix cache, in vLLM's scheduler; a task of ``real_schedulers``."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from engine_patches.plugin.prefixes import CachedPrefixes
from engine_patches.stream.cached_blocks import CachedBlocks
from tests.support.real_schedulers import Driver, Reader, Schedulers
from tests.support.scheduler_bench import loop_s

RUNNING = 256
BLOCK_TOKENS = 16
PROMPTS = (2_000, 20_000)
BLOCKS = 8_000
"""Few enough that each block that fills takes another's place."""


def bench_cache(make: Schedulers, steps: int) -> dict[str, Any]:
    """CPU time of the hooks in a step of decoding requests, and for a prompt; bytes of a step."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
    sizes: dict[str, Any] = {"blocks": BLOCKS, "caching": True, "block_tokens": BLOCK_TOKENS}
    with metered() as spent_s:
        scheduler = make.make("EvenstepScheduler", slots=RUNNING, longest=32_768, **sizes)
        driver, rng = Driver(scheduler, 0, hasher), random.Random(1)
        reader = Reader(scheduler.evenstep.endpoint)

        def step() -> None:
            driver.step()
            reader.until(scheduler.evenstep._publisher.sequence)

        def prompt(tokens: int) -> list[int]:
            return [rng.randrange(200) for _ in range(tokens)]

        report: dict[str, Any] = {}
        for tokens in PROMPTS:
            content = prompt(tokens)
            for name in ("new", "cached"):
                began_s = time.thread_time()
                driver.submit(content, 1)
                arrived_s = time.thread_time() - began_s
                spent_s.clear()
                while scheduler.requests:
                    step()
                row = {"hook_us": sum(spent_s) * 1e6, "vllm_hashes_us": arrived_s * 1e6}
                report[f"prompt of {tokens}, {name}"] = row
        for _ in range(RUNNING):
            driver.submit(prompt(rng.randrange(16, 128)), 2 * steps + 100)
        while any(one.num_output_tokens < 2 for one in scheduler.requests.values()):
            step()
        for _ in range(2 * BLOCK_TOKENS):
            step()
        hooks_us, steps_us, reader.bytes, told = [], [], 0, 0
        for _ in range(steps):
            spent_s.clear()
            began_s = time.thread_time()
            driver.step()
            steps_us.append((time.thread_time() - began_s) * 1e6)
            hooks_us.append(sum(spent_s) * 1e6)
            last = reader.until(scheduler.evenstep._publisher.sequence)
            told += len(last.blocks_stored) + len(last.blocks_removed)
        report[f"{RUNNING} decoding"] = {
            "hook_us": statistics.median(hooks_us),
            "hook_p90_us": statistics.quantiles(hooks_us, n=10)[-1],
            "step_us": statistics.median(steps_us),
            "bytes": reader.bytes / steps,
            "block_bytes": told / steps,
            "loop_ms": loop_s() * 1e3,
        }
        assert not scheduler.evenstep.failed
        scheduler.shutdown()
        reader.close()
    return report


@contextmanager
def metered() -> Iterator[list[float]]:
    """Seconds of CPU time in the hooks, as they end."""
    spent_s: list[float] = []
    names = ("_stored", "_removed", "admitted", "stepped", "arrived")
    hooks: list[tuple[type, str]] = [(CachedPrefixes, name) for name in names]
    hooks.append((CachedBlocks, "take"))

    def around(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def run(*arguments: Any) -> Any:
            began_s = time.thread_time()
            done = method(*arguments)
            spent_s.append(time.thread_time() - began_s)
            return done

        return run

    before = [getattr(owner, name) for owner, name in hooks]
    for owner, name in hooks:
        setattr(owner, name, around(getattr(owner, name)))
    yield spent_s
    for (owner, name), method in zip(hooks, before, strict=True):
        setattr(owner, name, method)
