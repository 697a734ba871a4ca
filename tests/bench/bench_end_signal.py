"""What the end signal knows of coming ends, beside the survival curve: Brier skill.

    python tests/bench/bench_end_signal.py [--steps 2000] [--model FOLDER]

A real engine samples at temperature 1 until its requests end by themselves, 32 at a time; both
signals see what a router reads, and are scored as the router scores them: 1 is an oracle, 0 no
better than the base rate. **The default model has random weights: it knows nothing of ends, so no
skill can be claimed from it, and none is expected.** With trained weights, name their folder. Needs
the CPU engine (`make engine`); does nothing without it.
"""

from __future__ import annotations

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
