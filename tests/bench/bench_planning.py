"""How long it takes to plan the chains of a large fleet, tuning over the reserved slots included.

    python tests/bench/bench_planning.py [--servers 1000] [--blocks 200] [--json FILE]

GPUs of six types at random distances, from few arrivals to more than the fleet can serve; then the
worst case, servers no two of which have one memory or speed. One core, processor time.
"""

import argparse
import time
from pathlib import Path
from random import Random

from loadgen.report.origin import Engines, origin
from router.core.placement.bounds import response_bounds
from router.core.placement.model import Model, Server, total_rate
from router.core.placement.tuning import compose
from tests.support.figure_files import write_figures
from tests.support.placements import GB, mixed_servers

CODE = ("router/core/placement", "tests/support/placements.py", "tests/bench/bench_planning.py")
TYPES = [(80, 0.016), (48, 0.024), (40, 0.020), (24, 0.031), (20, 0.035), (16, 0.040)]
LOADS = (0.01, 0.1, 0.4, 0.6, 0.8, 1.2)
BLOCK_BYTES = 800_000_000
SLOT_BYTES = 50_000_000
JOB_SERVERS = (5_000, 100_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=200)
    parser.add_argument("--json", type=Path, help="file for what was measured")
    asked = parser.parse_args()
    took_s = {}
    model = Model(asked.blocks, BLOCK_BYTES, SLOT_BYTES)
    print(f"{asked.servers} servers, {asked.blocks} blocks")
    for name, servers in (
        ("six types of GPU", mixed_servers(Random(1), asked.servers, TYPES)),
        ("all different", different_servers(Random(1), asked.servers)),
    ):
        took_s[name] = plan(name, model, servers)
    for count in JOB_SERVERS:
        bound(count)
    if asked.json:
        figures = {"servers": asked.servers, "blocks": asked.blocks, "loads": LOADS}
        write_figures(asked.json, figures | {"cpu_s": took_s}, origin(Engines.SIMULATED, CODE))


def different_servers(rng: Random, count: int) -> list[Server]:
    """Servers with memory and speed drawn between the extreme types."""
    return [
        Server(
            f"gpu{at}",
            int(rng.uniform(16, 80) * GB),
            0.02 + 0.1 * rng.random(),
            rng.uniform(0.016, 0.04),
        )
        for at in range(count)
    ]


def plan(name: str, model: Model, servers: list[Server]) -> list[float]:
    """Seconds of CPU at each load."""
    times = []
    most = total_rate(compose(model, servers, 1e9, overlapping=False).disjoint)
    for load in LOADS:
        start_s = time.process_time()
        found = compose(model, servers, load * most)
        took_s = time.process_time() - start_s
        times.append(round(took_s, 3))
        print(
            f"{name}, load {load:g}: {took_s:.2f} s; {found.reserved_slots} slots reserved, "
            f"{len(found.disjoint)} disjoint and {len(found.overlapping)} overlapping chains, "
            f"response {found.bounds.lower_s:.3f} to {found.bounds.upper_s:.3f} s"
        )
    return times


def bound(count: int) -> None:
    rates = [Random(count).uniform(0.01, 10) for _ in range(count)]
    start_s = time.process_time()
    limits = response_bounds(rates, [1] * count, 0.7 * sum(rates))
    took_s = time.process_time() - start_s
    print(
        f"bounds of {count} job servers: {took_s:.3f} s; {limits.lower_s:.4f}, {limits.upper_s:.4f}"
    )


if __name__ == "__main__":
    main()
