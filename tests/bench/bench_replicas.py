"""How soon another replica takes over, over many ends and kills of the one that decides.

    python tests/bench/bench_replicas.py [--kills 20] [--locks file,lease] [--json FILE]

Three replicas before 3 emulated workers of 6 slots behind one barrier (20 ms a step), 30 clients.
In each round the replica that decides gets SIGTERM, and while its answers go on, its successor is
killed. Both locks, with their own times. The clients ask Envoy, which reads
deploy/envoy/replicas.yaml.
"""

import argparse
import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

from loadgen.report.origin import Engines, origin
from tests.support.figure_files import write_figures
from tests.support.replica_run import PHYSICS, replicas_under_load

CODE = (
    *("router/replicas", "router/core/tenure.py"),
    *("tests/support/replica_run.py", "tests/bench/bench_replicas.py"),
)


async def measured(lock: str, kills: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        async with replicas_under_load(Path(folder), lock, envoy=True) as run:
            for _ in range(kills):
                await run.round()
    return {
        "kills": kills,
        "kill_to_first_dispatch_s": [round(seconds, 3) for seconds in sorted(run.takeovers_s)],
        "steps_to_even": sorted(run.even_steps),
        "slots_booked_twice": run.engines.booked_twice,
        "requests_that_reached_engines": len(run.engines.came_s),
        "answers_whole": run.whole,
        "answers_refused": len(run.refused),
        "answers_lost_of_killed_replicas": run.broken["killed"],
        "answers_lost_of_others": run.broken["others"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--locks", default="file,lease")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    figures = {}
    for lock in given.locks.split(","):
        figures[lock] = asyncio.run(measured(lock, given.kills))
    print(json.dumps(figures, indent=1))
    if given.json is not None:
        write_figures(given.json, figures, origin(Engines.EMULATED, CODE, PHYSICS))


if __name__ == "__main__":
    main()
