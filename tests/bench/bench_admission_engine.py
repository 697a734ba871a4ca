"""Real vLLM under KV pressure: preemptions and throughput by who enters.

    python tests/bench/bench_admission_engine.py [--requests 800] [--repeats 3] [--json FILE]

One tiny model on the CPU for each way, all of them up; the ways take turns. Each time the engine
gets chat70b's lengths (16,512 KV tokens in blocks of 32, 256 slots) all at once, and nobody is told
where they end: but for memory_checked, to whom the requests' hints tell it. Preemptions and tokens
are the engine's own counts; throughput is taken while requests wait. Two cores: no latencies to go
by. Needs the CPU engine (`make engine`); does nothing without it.
"""

import argparse
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loadgen.report.intervals import paired
from loadgen.report.origin import Engines, origin
from tests.support.admission_engines import VLLM, WAYS, Pressed, engines, press
from tests.support.engine import installation
from tests.support.figure_files import write_figures

CODE = (
    "engine_patches",
    "tests/support/admission_engines.py",
    "tests/bench/bench_admission_engine.py",
)

HEAD = (
    "| way | preemptions (each repeat) | tokens/s while requests wait | beside vLLM's order "
    "| until the last answer, s |\n| --- | --- | --- | --- | --- |"
)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--requests", type=int, default=800)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    where = installation()
    if where is None:
        print("no engine: run `make engine` first")
        return
    loads = [os.getloadavg()[0]]
    runs: dict[str, list[Pressed]] = {way: [] for way in WAYS}
    with (
        tempfile.TemporaryDirectory(prefix="evenstep-") as folder,
        engines(where, Path(folder), list(WAYS)) as servers,
    ):
        for repeat in range(given.repeats):
            for way in WAYS:
                runs[way].append(press(servers[way], given.requests, repeat))
                print(f"{way}: {runs[way][-1]}", flush=True)
    loads.append(os.getloadavg()[0])
    print(HEAD)
    for way in WAYS:
        print(row(way, runs))
    if given.json is not None:
        found = {
            "load_averages": [round(load, 1) for load in loads],
            "runs": {way: [asdict(each) for each in some] for way, some in runs.items()},
        }
        write_figures(given.json, found, origin(Engines.REAL, CODE, vllm=where.vllm))


def row(way: str, runs: dict[str, list[Pressed]]) -> str:
    each = runs[way]
    mean = sum(run.throughput_tok_s for run in each) / len(each)
    cells: list[Any] = [way, ", ".join(str(run.preemptions) for run in each), f"{mean:,.0f}"]
    more = paired(
        [run.throughput_tok_s for run in each], [run.throughput_tok_s for run in runs[VLLM]]
    )
    interval = "" if more.half_width is None else f" ± {more.half_width:.1%}"
    cells.append(f"{more.mean:+.1%}{interval}")
    cells.append(", ".join(f"{run.whole_s:.1f}" for run in each))
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    main()
