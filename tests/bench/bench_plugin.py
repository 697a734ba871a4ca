"""What the vLLM plug-in costs a step.

    python tests/bench/bench_plugin.py [--steps 200] [--engine]

vLLM's own schedulers, without a model: every slot is busy, requests make 200 tokens on average, and
a router reads. A scheduler with the plug-in and one without take turns. CPU time of the engine's
thread, medians, the least of five runs; limits: 50 us a step at 32 running, 150 us at 256. The last
column, what a million additions take, tells how fast the machine is.

``--engine``: two whole engines take turns step by step, 32 running, a random model of 16 layers;
medians, the least of five runs; limit: 1 %.

Needs the CPU engine (`make engine`); does nothing without it.
"""

from __future__ import annotations

import argparse

from tests.support.engine import Installation, installation
from tests.support.engine_python import real_engines, real_schedulers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="of each run")
    parser.add_argument("--engine", action="store_true", help="whole engines, with a model")
    arguments = parser.parse_args()
    engine = installation()
    if engine is None:
        print("no engine: run `make engine` first")
    elif arguments.engine:
        print_engines(engine, arguments.steps)
    else:
        print_schedulers(engine, arguments.steps)


def print_schedulers(engine: Installation, steps: int) -> None:
    print(
        "scheduler       running  hook us   p90  wall us  step us  without  bytes a step  loop ms"
    )
    for name, row in real_schedulers(engine, "bench", steps).items():
        kind, running = name.split()
        print(
            f"{kind:15} {running:>7} {row['hook_us']:8.1f} {row['hook_p90_us']:5.0f} "
            f"{row['hook_wall_us']:8.1f} {row['step_us']:8.1f} {row['step_without_us']:8.1f} "
            f"{row['bytes']:13.0f} {row['loop_ms']:8.0f}"
        )


def print_engines(engine: Installation, steps: int) -> None:
    print("median step    with us   without   difference")
    row = real_engines(engine, "steps", steps)
    for clock, name in (("wall", "by the clock"), ("cpu", "CPU time")):
        on, off = row[f"{clock}_on_us"], row[f"{clock}_off_us"]
        print(f"{name:12} {on:9.0f} {off:9.0f} {on - off:6.0f} us, {on / off - 1:.2%}")


if __name__ == "__main__":
    main()
