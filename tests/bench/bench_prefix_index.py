"""What the index of prefix blocks costs: memory, blocks stored and removed, looks at long prompts.

    python tests/bench/bench_prefix_index.py [--workers 32 256] [--tokens 1000000] [--json FILE]

Every worker holds as many tokens of prompts of 100,000 tokens, all different, in blocks of 16, 64
or 512: the worst case. Prompts are stored by chunks of 2,048 tokens, the workers' in turn, as ranks
compute them; then blocks leave from a prompt's end and others come. In the last part 2,048 requests
wait that share a prompt of 100,000 tokens, and a worker computes it. Times are this process's CPU;
those of looks are the best of five runs.
"""

import argparse
import gc
import json
import os
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from typing import TypeVar

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from loadgen.report.origin import Engines, origin
from router.core.prefix.block_index import BlockIndex
from router.core.prefix.ids import block_ids
from router.core.prefix.prefixes import Prefixes
from router.core.types import Content, Request, Snapshot
from tests.support.core import snapshot, token
from tests.support.figure_files import write_figures

CODE = ("router/core/prefix", "tests/bench/bench_prefix_index.py")
PROMPT_TOKENS, CHUNK_TOKENS = 100_000, 2048
BATCHES = (1, 16, 128, 500)
RUNS, LOOKS = 5, 80
WAITING = 2048

T = TypeVar("T")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--workers", type=int, nargs="*", default=[32, 256])
    options.add_argument("--tokens", type=int, default=1_000_000)
    options.add_argument("--blocks", type=int, nargs="*", default=[16, 64, 512])
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    header = origin(Engines.SIMULATED, CODE)
    rows, loads = [], [os.getloadavg()[0]]
    for workers, block_tokens in product(given.workers, given.blocks):
        rows.append(of_blocks(workers, given.tokens, block_tokens))
        print(json.dumps(rows[-1], indent=1), flush=True)
        loads.append(os.getloadavg()[0])
    flood = hot_prefix(max(given.workers))
    print(json.dumps(flood, indent=1), flush=True)
    if given.json:
        figures = {"load_averages": loads, "index": rows, "hot_prefix": flood}
        write_figures(given.json, figures, header)


def of_blocks(workers: int, tokens: int, block_tokens: int) -> dict[str, object]:
    """One size of blocks."""
    rng = np.random.default_rng(0)
    length, chunk = PROMPT_TOKENS // block_tokens, CHUNK_TOKENS // block_tokens
    prompts = tokens // PROMPT_TOKENS
    chains = [[_ids(rng, length) for _ in range(prompts)] for _ in range(workers)]
    gc.collect()
    before = _resident_bytes()
    index = BlockIndex()
    numbers = [index.join() for _ in range(workers)]

    def fill() -> int:
        for prompt in range(prompts):
            # Chunks of a prompt do not begin where the index expects it.
            for start in range(-(chunk // 3), length, chunk):
                part = slice(8 * max(0, start), 8 * (start + chunk))
                for number in numbers:
                    index.store(number, chains[number][prompt][part])
        return len(index)

    stored, stored_s = _timed(fill)
    memory = _resident_bytes() - before
    runs = [
        [_look(index, chains[at % workers][at % prompts]) for at in range(LOOKS)]
        for _ in range(RUNS)
    ]
    looks = min(runs, key=median)
    churned = {str(size): round(_churn(index, rng, chains, size), 2) for size in BATCHES}
    index.clear(numbers[0])
    cleared_s = _timed(index.settle)[1]
    return {
        "workers": workers,
        "tokens": tokens,
        "block_tokens": block_tokens,
        "blocks": stored,
        "memory_mb": round(memory / 1e6),
        "counted_memory_mb": round(index.memory_bytes / 1e6),
        "stored_us": round(1e6 * stored_s / stored, 2),
        "stored_or_removed_us_by_batch": churned,
        "look_us": round(median(looks), 1),
        "look_p90_us": round(quantiles(looks, n=10)[-1], 1),
        "worker_cleared_ms": round(1e3 * cleared_s, 1),
    }


def _churn(
    index: BlockIndex, rng: np.random.Generator, chains: Sequence[Sequence[bytes]], size: int
) -> float:
    """Microseconds for each block that leaves or comes, in calls of so many."""
    calls = max(20, 8000 // size)
    changes = []
    for call in range(calls):
        worker, held = call % len(chains), chains[call % len(chains)][-1]
        end = len(held) - 8 * size * (call // len(chains))
        changes.append((worker, held[max(0, end - 8 * size) : max(0, end)], _ids(rng, size)))
    blocks = sum(len(gone) + len(come) for _, gone, come in changes) // 8

    def change() -> None:
        for worker, gone, come in changes:
            index.remove(worker, gone)
            index.store(worker, come)
        index.settle()

    return 1e6 * _timed(change)[1] / blocks


def _look(index: BlockIndex, chain: bytes) -> float:
    counts, seconds = _timed(lambda: index.leading(chain))
    assert counts.max() == len(chain) // 8
    return 1e6 * seconds


def hot_prefix(workers: int) -> dict[str, object]:
    """A step of all workers while requests wait whose common prefix one of them computes."""
    rng = np.random.default_rng(1)
    shared, names = _ids(rng, PROMPT_TOKENS // 16), tuple(map(str, range(workers)))
    prefixes = Prefixes()
    for name in names:
        full = structs.replace(snapshot("full", 1), cache_block=16)
        prefixes.heard(name, full, 1.0)
    waiting = [
        Request(
            token(number), "", PROMPT_TOKENS + 400, content=Content(pieces=shared + _ids(rng, 25))
        )
        for number in range(WAITING)
    ]
    first_s = _timed(lambda: _hits(prefixes, waiting, names))[1]
    heard, asked, unchanged = [], [], []
    for step in range(40):
        computed = block_ids(shared, 16)[8 * 128 * step : 8 * 128 * (step + 1)]
        told = [
            structs.replace(snapshot("delta", step + 2), cache_block=16, blocks_stored=ids)
            for ids in (computed, *(_ids(rng, 16) for _ in names[1:]))
        ]

        def hear(told: Sequence[Snapshot] = told) -> None:
            for name, message in zip(names, told, strict=True):
                prefixes.heard(name, message, 1.0)

        heard.append(_timed(hear)[1])
        matrix, seconds = _timed(lambda: _hits(prefixes, waiting, names))
        assert (matrix[:, 0] == 2048 * (step + 1)).all()
        asked.append(seconds)
        unchanged.append(_timed(lambda: _hits(prefixes, waiting, names))[1])
    return {
        "workers": workers,
        "waiting": WAITING,
        "first_look_us": round(1e6 * first_s / WAITING, 1),
        "step_heard_ms": round(1e3 * median(heard), 2),
        "all_asked_ms": round(1e3 * median(asked), 2),
        "all_asked_again_ms": round(1e3 * median(unchanged), 2),
    }


def _hits(
    prefixes: Prefixes, waiting: Sequence[Request], names: Sequence[str]
) -> NDArray[np.int64]:
    """As the plan for prompts asks for them."""
    return np.array([prefixes.hits(request, names) for request in waiting])


def _timed(call: Callable[[], T]) -> tuple[T, float]:
    start = time.process_time()
    result = call()
    return result, time.process_time() - start


def _ids(rng: np.random.Generator, count: int) -> bytes:
    return rng.integers(1, 1 << 64, count, dtype=np.uint64).tobytes()


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


if __name__ == "__main__":
    main()
