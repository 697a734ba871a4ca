"""Whether requests that would be refused for their targets would indeed have missed them.

    python tests/bench/bench_refusals.py [--trace mooncake-synthetic] [--rate 3.8] [--requests 400]
        [--workers 4] [--slots 128] [--time-scale 2] [--targets 0.5,1,3] [--seed 0] [--json FILE]

Emulated engines that compute prompts, behind one barrier, and real HTTP. The router refuses
nothing: it notes when each first token was expected, and when it came. Seconds are the engines'.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

from loadgen.report.origin import EMULATION, SERVING, Engines, origin
from loadgen.run.child_processes import Child
from router.cli import main as evenstep
from router.core.state.first_token import expected_s
from router.core.types import Request
from router.dispatch.group_queue import SURELY_LATE, GroupQueue
from tests.support.figure_files import write_part
from tests.support.fleet import running_fleet, worker_flags
from tests.support.server import free_port, running

CODE = (*SERVING, *EMULATION, "loadgen/replay", "tests/bench/bench_refusals.py")
_NOTES = "BENCH_REFUSALS_NOTES"
_COST = "5e-3,9.5e-8,0,5e-5"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--trace", default="mooncake-synthetic")
    options.add_argument("--rate", type=float, default=3.8)
    options.add_argument("--requests", type=int, default=400)
    options.add_argument("--workers", type=int, default=4)
    options.add_argument("--slots", type=int, default=128)
    options.add_argument("--time-scale", type=float, default=2.0)
    options.add_argument("--targets", default="0.5,1,3")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--json", type=Path, help="file for what was measured")
    given = options.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        notes = run(given, Path(name))
    expected, came = np.array(notes).T / given.time_scale
    print(f"{len(notes)} requests expected by costs; mean time to first token {came.mean():.2f} s")
    print("target, s  late  refused  of these in time  share of late ones refused")
    for target in map(float, given.targets.split(",")):
        late, refused = came > target, expected > SURELY_LATE * target
        caught = (refused & late).sum() / max(1, late.sum())
        in_time = (refused & ~late).sum()
        print(f"{target:9g}  {late.sum():4}  {refused.sum():7}  {in_time:16}  {caught:26.0%}")
        row = {"late": late.sum(), "refused": refused.sum(), "in_time": in_time}
        rows.append({"target_s": target} | {name: int(number) for name, number in row.items()})
    if given.json:
        part = {"requests": len(notes), "rate": given.rate, "targets": rows}
        write_part(given.json, given.trace, part, origin(Engines.EMULATED, CODE))


def run(given: argparse.Namespace, folder: Path) -> list[list[float]]:
    """Wall seconds to the first token of each request, expected and as they were."""
    scale, notes, port = f"{given.time_scale:g}", folder / "notes", free_port()
    engines = (
        *("--workers", str(given.workers), "--slots", str(given.slots), "--step-time", _COST),
        *("--kv-tokens", "1000000", "--time-scale", scale),
    )
    os.environ[_NOTES] = str(notes)
    with running_fleet(folder, *engines) as fleet:
        router = [sys.executable, __file__, "serve", "--port", str(port), *worker_flags(fleet)]
        router += ["--queue-timeout", "3600", "--pool-size", "10000"]
        with running(router, port, folder / "router.log", ready_s=180.0) as server:
            replay = [
                *("replay", "--url", server.url, "--trace", given.trace),
                *("--requests", str(given.requests), "--arrivals", f"poisson:{given.rate:g}"),
                *("--time-scale", scale, "--seed", str(given.seed)),
            ]
            with Child(replay, folder / "replay.log") as client:
                client.finish(3600)
    return [json.loads(line) for line in notes.read_text().splitlines()]


def serve() -> None:
    """The router, which notes instead of refusing."""
    file = Path(os.environ[_NOTES]).open("a", buffering=1, encoding="utf-8")  # noqa: SIM115
    expected: dict[str, float | None] = {}
    began = GroupQueue.began

    def note_expected(self: GroupQueue, newcomer: Request) -> None:
        ahead = self.pool.ahead_of(newcomer)
        found = expected_s(newcomer, self.group, self.decider.dispatch, *ahead)
        expected[newcomer.first_id] = found and found.seconds

    def note_came(self: GroupQueue, request: Request, now_s: float) -> None:
        if (before := expected.pop(request.first_id, None)) is not None:
            file.write(f"{json.dumps([before, now_s - request.arrival_s])}\n")
        began(self, request, now_s)

    GroupQueue._refuse_late = note_expected  # type: ignore[method-assign]
    GroupQueue.began = note_came  # type: ignore[method-assign]
    evenstep()


if __name__ == "__main__":
    serve() if sys.argv[1:2] == ["serve"] else main()
