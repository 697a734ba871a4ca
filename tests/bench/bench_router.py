"""What a router costs per token and per request, beside the Rust routers of the registry.

    python tests/bench/bench_router.py [--rounds 3] [--seconds 5] [--json FILE]

8 engines that compute nothing make steps of 20 ms and publish 50 snapshots a second each. Engines
and clients share one core, the router has the other. Each round starts, tests and ends every target
in turn, in another order: targets that run together would share the processor's caches. CPU seconds
are those of the target's processes, kernel included; figures are medians over the rounds.

unary    64 clients, answers at once, as many requests as they can
unary1   one client
paced    64 streams of 50 events, 20 ms apart
fleet    512 streams of 75 events
first    one client, streams of 20 events: what is added to the time to the first byte

This router has keys, limits, metrics, breakers, retries and fair shares on, and decides by bfio,
except for one target. The others deal in turn (round_robin), with as short a log. On shared cores
compare within a run: CPU seconds vary less than the clock.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadgen.report.origin import SERVING, Engines, origin
from tests.support.figure_files import write_figures
from tests.support.router_bench.targets import (
    KEY,
    OTHER_CORE,
    ROUTER_CORE,
    TARGETS,
    Fleet,
    cpu_s,
    memory_mb,
    pinned,
    processes,
)
from tests.support.server import Server, free_port, starting, wait_ready, wait_until

CODE = (
    *SERVING,
    "router/access",
    "tests/support/router_bench",
    "tests/bench/bench_router.py",
)

ENGINES = 8
SLOTS = 128
TESTS = {
    "unary": ("--clients", "64"),
    "unary1": ("--clients", "1"),
    "paced": ("--clients", "64", "--events", "50", "--stagger-ms", "3"),
    "fleet": ("--clients", "512", "--events", "75", "--stagger-ms", "0.5"),
    "first": ("--clients", "1", "--events", "20"),
}
Results = dict[str, dict[str, list[dict[str, float]]]]


@dataclass(frozen=True)
class Running:
    """A running target; without ``pids`` it is an engine itself."""

    port: int
    pids: Sequence[int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run, then it drains")
    parser.add_argument("--tests", default=",".join(TESTS), help="which, with commas")
    parser.add_argument("--targets", default=",".join(TARGETS), help="which, with commas")
    parser.add_argument("--json", type=Path, help="file for what was measured")
    options = parser.parse_args()
    names = [name for name in options.targets.split(",") if name]
    tests = [name for name in options.tests.split(",") if name]
    loads = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        folder = Path(scratch)
        fleet = stack.enter_context(engines(folder))
        results, memory = measured(fleet, folder, names, tests, options.rounds, options.seconds)
    loads.append(os.getloadavg()[0])
    medians = {
        test: {name: median(rows) for name, rows in of.items()} for test, of in results.items()
    }
    show(medians, memory)
    if options.json is not None:
        what = {name: TARGETS[name].what for name in names}
        told = {"rounds": options.rounds, "seconds": options.seconds}
        told |= {"load_averages": [round(one, 2) for one in loads]}
        shown = {"targets": what, "medians": rounded(medians), "memory_mb": rounded(memory)}
        write_figures(options.json, told | shown, origin(Engines.EMULATED, CODE))


@contextlib.contextmanager
def engines(folder: Path) -> Iterator[Fleet]:
    """Engines that compute nothing."""
    port, snapshots = free_port(ENGINES), free_port(2 * ENGINES)
    fleet = Fleet(range(port, port + ENGINES), range(snapshots, snapshots + 2 * ENGINES, 2), SLOTS)
    module = "tests.support.router_bench.engines"
    flags = ("--workers", str(ENGINES), "--slots", str(SLOTS), "--snapshots", str(snapshots))
    command = [*pinned(OTHER_CORE), sys.executable, "-m", module, "--port", str(port), *flags]
    with starting(command, port, folder / "engines.log") as server:
        wait_ready(server, 30)
        yield fleet


@contextlib.contextmanager
def started(name: str, fleet: Fleet, folder: Path) -> Iterator[Running]:
    """A router before the engines, warmed up; or an engine itself."""
    if name not in TARGETS:
        yield Running(fleet.ports[0], ())
        return
    port, other = free_port(), free_port()
    command = [*pinned(ROUTER_CORE), *TARGETS[name].command(port, other, fleet, folder)]
    with starting(command, port, folder / f"{port}.log") as server:
        try:
            wait_ready(server, 180)
        except RuntimeError:
            if not server.alive:
                raise  # else a process of its own listens
        wait_until(lambda: answers(server), 60, "all engines are known")
        router = Running(port, processes(server.process.pid))
        for test in ("unary", "paced"):
            ask(router, TESTS[test], 0.7)
        yield router


def answers(server: Server) -> bool:
    """Whether a request is answered."""
    try:
        return ask(Running(server.port, ()), TESTS["unary1"], 0.1)["errors"] == 0
    except subprocess.CalledProcessError:
        return False


def measured(
    fleet: Fleet,
    folder: Path,
    names: Sequence[str],
    tests: Sequence[str],
    rounds: int,
    seconds: float,
) -> tuple[Results, dict[str, float]]:
    """All tests of all targets, and their memory at the end."""
    results: Results = defaultdict(lambda: defaultdict(list))
    memory: dict[str, float] = {}
    order = ["none", *names]
    for turn in range(rounds):
        first = turn % len(order)
        for name in order[first:] + order[:first]:
            with started(name, fleet, folder) as target:
                for test in tests:
                    results[test][name].append(one(name, test, target, seconds))
                memory[name] = memory_mb(target.pids)
        print(f"round {turn + 1} of {rounds}", flush=True)
    return results, {name: memory[name] for name in names}


def one(name: str, test: str, target: Running, seconds: float) -> dict[str, float]:
    """What a test shows of a target."""
    before_s = cpu_s(target.pids)
    row = ask(target, TESTS[test], seconds)
    row["cpu_s"] = cpu_s(target.pids) - before_s
    row["cpu_us_per_request"] = 1e6 * row["cpu_s"] / max(1.0, row["requests"])
    row["cpu_us_per_event"] = 1e6 * row["cpu_s"] / max(1.0, row["events"])
    if row["errors"] or row["lost"] or row["unended"]:
        print(
            f"{name}, {test}: {row['errors']:.0f} errors, {row['lost']:.0f} lost, "
            f"{row['unended']:.0f} unended",
            flush=True,
        )
    return row


def ask(target: Running, flags: Sequence[str], seconds: float) -> dict[str, float]:
    """Put load on a target; return its report."""
    module = "tests.support.router_bench.load"
    command = [*pinned(OTHER_CORE), sys.executable, "-m", module, "--port", str(target.port)]
    command += [*flags, "--seconds", str(seconds), "--key", KEY]
    done = subprocess.run(command, check=True, timeout=120, stdout=subprocess.PIPE)
    told: dict[str, float] = json.loads(done.stdout)
    return told


def median(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of several runs, key by key."""
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def show(medians: dict[str, dict[str, dict[str, float]]], memory: dict[str, float]) -> None:
    """Print the tables."""
    for test, rows in medians.items():
        per = "request" if test.startswith("unary") else "event"
        direct = rows["none"]
        reference = rows.get("vllm-router", {}).get(f"cpu_us_per_{per}", 0.0)
        print(
            f"\n{test:14} us/{per:8} / vllm-router  {per}s/s  first byte, ms more  transit p99, max"
        )
        for name, row in rows.items():
            cpu = row[f"cpu_us_per_{per}"]
            ratio = f"{cpu / reference:.2f}" if reference and cpu else ""
            print(
                f"{name:14} {cpu:11.1f} {ratio:>14} {row[f'{per}s_per_s']:9,.0f} "
                f"{row['first_p50_ms'] - direct['first_p50_ms']:20.3f} "
                f"{row['transit_p99_ms']:12.2f} {row['transit_max_ms']:6.1f}"
            )
    print("\nmemory after it, MB: " + ", ".join(f"{k} {v:.0f}" for k, v in memory.items()))


def rounded(value: Any) -> Any:
    """Figures with three decimals."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return round(value, 3)


if __name__ == "__main__":
    main()
