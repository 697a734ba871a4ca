"""What a scrape of the router costs: CPU in all, and the longest that it keeps others waiting.

    python tests/bench/bench_metrics.py [--workers 256] [--scrapes 50] [--json FILE]

A group whose workers have all reported a step. CPU time of one thread; asked: 20 ms a scrape at 256
workers, and no more than 2 ms between two turns of the event loop.
"""

import argparse
import asyncio
import time
from pathlib import Path

from loadgen.report.origin import Engines, origin
from router.core.events import WorkerUp
from router.core.types import WorkerSpec
from tests.support.figure_files import write_figures
from tests.support.scraped import Bench

CODE = (
    *("router/metrics", "router/core/state", "tests/support/scraped.py"),
    "tests/bench/bench_metrics.py",
)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--workers", type=int, default=256)
    options.add_argument("--scrapes", type=int, default=50)
    options.add_argument("--json", type=Path, help="file for what was measured")
    given = options.parse_args()
    specs = [
        WorkerSpec(f"w{n}", f"http://h:{n}", group="g", rank=n, slots=64, snapshots=f"tcp://h:{n}")
        for n in range(given.workers)
    ]
    bench = Bench(specs)
    for spec in specs:
        bench.dispatcher.apply(WorkerUp(spec.id))
    for step in (1, 2):
        bench.step(step, **{spec.id: 100 * step for spec in specs})
    found = sorted(asyncio.run(_scrape(bench)) for _ in range(given.scrapes))
    whole_ms, turn_ms = found[len(found) // 2]
    print(f"{given.workers} workers, {len(bench.text().splitlines()):,} lines")
    print(f"CPU of a scrape, median: {whole_ms:.1f} ms; longest turn in that one: {turn_ms:.2f} ms")
    longest_ms = max(turn for _, turn in found)
    print(f"longest turn of all: {longest_ms:.2f} ms")
    if given.json:
        figures = {
            "workers": given.workers,
            "scrapes": given.scrapes,
            "cpu_ms": round(whole_ms, 2),
            "turn_ms": round(turn_ms, 2),
            "longest_turn_ms": round(longest_ms, 2),
        }
        write_figures(given.json, figures, origin(Engines.EMULATED, CODE))


async def _scrape(bench: Bench) -> tuple[float, float]:
    """Milliseconds of CPU: total, and longest without a turn of another task."""
    scrape = asyncio.create_task(bench.metrics.render())
    began = last = time.thread_time()
    longest = 0.0
    while not scrape.done():
        await asyncio.sleep(0)
        now = time.thread_time()
        longest, last = max(longest, now - last), now
    return (last - began) * 1e3, longest * 1e3


if __name__ == "__main__":
    main()
