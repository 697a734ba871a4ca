"""What the vLLM plug-in costs a step: vLLM's own schedulers, without a model.

    python tests/bench/bench_plugin.py [--steps 200]

Every slot is busy, requests make 200 tokens on average, and a router reads. A scheduler with the
plug-in and one without take turns. CPU time of the engine's thread, medians, the least of five
runs; limits: 50 us a step at 32 running, 150 us at 256. The last column tells how fast the machine is:
what a million additions take. Needs the CPU engine (`make engine`); does nothing without it.
"""

from __future__ import annotations

import argparse

from tests.support.engine import installation
from tests.support.engine_python import real_schedulers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="of each run")
    arguments = parser.parse_args()
    engine = installation()
    if engine is None:
        print("no engine: run `make engine` first")
        return
    print(
        "scheduler       running  hook us   p90  wall us  step us  without  bytes a step  loop ms"
    )
    for name, row in real_schedulers(engine, "bench", arguments.steps).items():
        kind, running = name.split()
        print(
            f"{kind:15} {running:>7} {row['hook_us']:8.1f} {row['hook_p90_us']:5.0f} "
            f"{row['hook_wall_us']:8.1f} {row['step_us']:8.1f} {row['step_without_us']:8.1f} "
            f"{row['bytes']:13.0f} {row['loop_ms']:8.0f}"
        )


if __name__ == "__main__":
    main()
