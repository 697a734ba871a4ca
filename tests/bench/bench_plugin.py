"""What the vLLM plug-in costs a step.

    python tests/bench/bench_plugin.py [--steps 200] [--engine | --cache] [--json FILE]

vLLM's own schedulers without a model: all slots are busy, requests make 200 tokens on average, one
in a step, two, or one to four at random (drafts), a router reads. A scheduler with the plug-in and
one without take turns. CPU time of the engine's thread, medians, the least of five runs; limits: 50
us a step at 32 running, 150 us at 256. The last column, a million additions, shows the machine's
speed.

``--engine``: two whole engines (a random model of 16 layers, 32 running) take turns step by step,
and so does the plug-in between them. Medians of the difference of their steps; limit: 1 %.

``--cache``: what it costs to tell the prefix cache, with 256 decoding requests and blocks of 16
tokens, and for a prompt, seen before or not. CPU time of the hooks; what vLLM's own hashes of the
prompt cost, and its whole step, stand beside it.

``--json`` replaces one part of the file. Needs the CPU engine (`make engine`); does nothing
without it.
"""

import argparse
import os
from pathlib import Path
from typing import Any

from loadgen.report.origin import Engines, origin
from tests.support.engine import Installation, installation
from tests.support.engine_python import real_engines, real_schedulers
from tests.support.figure_files import write_part

CODE = (
    "engine_patches",
    "tests/support/real_engines.py",
    "tests/support/real_schedulers.py",
    "tests/support/cache_bench.py",
    "tests/bench/bench_plugin.py",
)

RUNNING = (32, 256)
CLOCKS = {"wall": "by the clock", "cpu": "CPU time"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="of each run")
    parser.add_argument("--engine", action="store_true", help="whole engines, with a model")
    parser.add_argument("--json", type=Path, help="file for what was measured")
    parser.add_argument("--cache", action="store_true", help="what the prefix cache costs")
    arguments = parser.parse_args()
    engine = installation()
    if engine is None:
        print("no engine: run `make engine` first")
        return
    name = "engine" if arguments.engine else "cache" if arguments.cache else "schedulers"
    measure = MEASURES[name]
    loads = [os.getloadavg()[0]]
    measured = measure(engine, arguments.steps)
    loads.append(os.getloadavg()[0])
    if arguments.json is not None:
        part = {"steps": arguments.steps, "load_averages": [round(one, 1) for one in loads]}
        header = origin(Engines.REAL, CODE, vllm=engine.vllm)
        write_part(arguments.json, name, part | measured, header)


def measure_schedulers(engine: Installation, steps: int) -> dict[str, Any]:
    measured = real_schedulers(engine, {"bench": steps, "bench_large": steps // 5})
    rows = measured["bench"] | measured["bench_large"]
    print("scheduler, running, tokens     hook us   p90  wall us  step us  without  bytes  loop ms")
    for name, row in rows.items():
        print(
            f"{name:28} {row['hook_us']:8.1f} {row['hook_p90_us']:5.0f} "
            f"{row['hook_wall_us']:8.1f} {row['step_us']:8.1f} {row['step_without_us']:8.1f} "
            f"{row['bytes']:6.0f} {row['loop_ms']:8.0f}"
        )
    exact = {name: {key: round(row[key], 2) for key in row} for name, row in rows.items()}
    return {"rows": exact}


def measure_cache(engine: Installation, steps: int) -> dict[str, Any]:
    rows = real_schedulers(engine, {"bench_cache": steps})["bench_cache"]
    for name, row in rows.items():
        print(f"{name:24}", ", ".join(f"{key} {value:.0f}" for key, value in row.items()))
    return {name: {key: round(row[key], 2) for key in row} for name, row in rows.items()}


def measure_engines(engine: Installation, steps: int) -> dict[str, Any]:
    print("median step   without us   more with it, us   each run's, us")
    measured = real_engines(engine, "steps", steps)
    for clock, name in CLOCKS.items():
        row = measured[clock]
        print(f"{name:12} {row['without_us']:11.0f} {share(row)} {row['runs_us']}")
    return measured


def share(row: dict[str, Any]) -> str:
    """What a step takes more, as the page says it."""
    return f"{row['more_us']:.0f} us ({row['more_us'] / row['without_us']:.1%})".replace("%", " %")


MEASURES = {"schedulers": measure_schedulers, "engine": measure_engines, "cache": measure_cache}


if __name__ == "__main__":
    main()
