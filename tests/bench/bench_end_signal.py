"""What the end signal knows of coming ends, beside the survival curve: Brier skill.

    python tests/bench/bench_end_signal.py [--steps 2000] [--model FOLDER]

A real engine samples at temperature 1, 32 requests at a time, until they end by themselves. Both
signals read what a router reads and are scored as there: 1 is an oracle, 0 the base rate. **The
default model has random weights and knows nothing of ends: no skill is expected or claimed.** Name
a folder with trained weights instead. Needs the CPU engine (`make engine`).
"""

import argparse
from dataclasses import replace
from pathlib import Path

from tests.support.engine import installation
from tests.support.engine_python import real_engines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--model", type=Path, help="a checkpoint; default: random weights")
    arguments = parser.parse_args()
    engine = installation()
    if engine is None:
        print("no engine: run `make engine` first")
        return
    if arguments.model is not None:
        engine = replace(engine, model=arguments.model)
    report = real_engines(engine, "skill", arguments.steps)
    print(f"weights: {arguments.model or 'random (no skill is claimed)'}")
    for name in ("reported", "survival"):
        skill = report[name]
        print(f"{name:9} skill " + ("unknown: too few ends" if skill is None else f"{skill:.3f}"))
    print(f"{report['ended']} requests ended; {report['bytes']:.0f} bytes a step")


if __name__ == "__main__":
    main()
