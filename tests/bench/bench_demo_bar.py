"""The bar of the demo's decode world: what its ratios are at the least, even on a busy machine.

    python tests/bench/bench_demo_bar.py [--runs 20] [--tries 40] [--busy 2] [--json FILE]

Runs the demo in its bar's form beside busy loops, again and again. A bar is the mean less four
standard deviations (plus four for the imbalance, where less is better). Runs of which the demo says
that they are not measured are counted, and made again. The file is written after each run; a second
call goes on with the runs that are missing, unless the code has changed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from docs.stale_figures import changed
from loadgen.report.origin import EMULATION, KEY, SERVING, Document, Engines, origin
from tests.support.busy import busy_loops
from tests.support.figure_files import write_figures

CODE = (
    *(*SERVING, *EMULATION, "loadgen/replay", "loadgen/traces"),
    *("loadgen/demo/run.py", "loadgen/demo/figures.py", "tests/bench/bench_demo_bar.py"),
)
FORM = (
    *("--worlds", "decode", "--policies", "least_tokens,bfio"),
    *("--requests", "4000", "--time-scale", "3"),
)
# Standard deviations, and whether more is better.
DEVIATIONS = 4
BETTER = {"throughput": 1, "imbalance": -1}


def one_run() -> tuple[Document, Document]:
    """Figures of a run of the demo, and the header of its summary."""
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "router.cli", "demo", *FORM, "--out", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found: Any = json.loads((Path(folder) / "summary.json").read_text(encoding="utf-8"))
    world = found["decode"]
    ratios = world["comparison"]
    return {
        **{name: ratios and ratios[f"{name}_ratio"] for name in BETTER},
        "steps": [run["steps_steady"]["steps"] for run in world["runs"]],
        "lateness_p50": [run["steps_steady"]["lateness_p50"] for run in world["runs"]],
        "lateness_p99": [run["steps_steady"]["lateness_p99"] for run in world["runs"]],
        "seconds": round(time.monotonic() - start_s, 1),
        "load_average": os.getloadavg()[0],
    }, world[KEY]


def bars(runs: list[Document]) -> Document:
    """Mean, standard deviation and bar of each ratio; none of a single run."""
    found: Document = {}
    if len(runs) < 2:
        return found
    for name, sign in BETTER.items():
        values = [run[name] for run in runs]
        mean, deviation = fmean(values), stdev(values)
        found[name] = {
            "mean": mean,
            "deviation": deviation,
            "bar": mean - sign * DEVIATIONS * deviation,
        }
    return found


def measured(runs: list[Document]) -> list[Document]:
    return [run for run in runs if run["throughput"] is not None]


def kept_runs(file: Path) -> list[Document]:
    if not file.exists():
        return []
    kept: Document = json.loads(file.read_text(encoding="utf-8"))
    return [] if changed(kept[KEY]) else list(kept["runs"])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--runs", type=int, default=20)
    options.add_argument("--tries", type=int, default=40, help="runs of this call at the most")
    options.add_argument("--busy", type=int, default=2, help="busy loops beside the demo")
    options.add_argument("--json", type=Path, default=Path("tests/data/demo/bar.json"))
    given = options.parse_args()
    runs = kept_runs(given.json)
    with busy_loops(given.busy):
        for _ in range(given.tries):
            if len(measured(runs)) >= given.runs:
                break
            run, header = one_run()
            runs.append(run)
            print(run, flush=True)
            figures = {
                "form": " ".join(FORM),
                "busy_loops": given.busy,
                "deviations": DEVIATIONS,
                **bars(measured(runs)),
                "runs": runs,
            }
            write_figures(given.json, figures, origin(Engines.EMULATED, CODE, header["physics"]))
    print(json.dumps(bars(measured(runs)), indent=1))


if __name__ == "__main__":
    main()
