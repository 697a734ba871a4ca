"""What a gateway with `evenstep pick` costs, beside `evenstep serve`.

    python tests/bench/bench_pick.py [--rounds 3] [--seconds 7] [--json FILE]

Engines, clients, cores and alternation are those of bench_router.py. CPU seconds are told apart:
those of Envoy (one worker thread), and those of the picker or router.

unary    64 clients, answers at once, as many requests as they can
stream   128 streams of 300 events, 20 ms apart

pick-http, pick-ext-proc   Envoy before `evenstep pick`, asked by ext_authz, by ext_proc
minimal                    Envoy before the least picker over grpc.aio, which decides nothing
"""

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from loadgen.report.origin import SERVING, Engines, origin
from tests.bench import bench_router
from tests.support.figure_files import write_figures
from tests.support.router_bench.targets import TARGETS, Fleet, Target, cpu_s
from tests.support.server import free_port

CODE = (
    *SERVING,
    "deploy/envoy",
    "router/access",
    "router/pick",
    "tests/support/router_bench",
    "tests/bench/bench_router.py",
    "tests/bench/bench_pick.py",
)
TESTS = {
    "unary": ("--clients", "64"),
    "stream": ("--clients", "128", "--events", "300", "--stagger-ms", "2"),
}


def gateway(form: str) -> Callable[[int, int, Fleet, Path], list[str]]:
    """Envoy, and what it asks."""

    def command(port: int, other: int, fleet: Fleet, folder: Path) -> list[str]:
        grpc, engines = free_port(), ",".join(map(str, fleet.ports))
        if form == "minimal":
            module = "tests.support.router_bench.minimal_picker"
            picker = [sys.executable, "-m", module, "--port", str(grpc), "--engines", engines]
        else:
            serve = TARGETS["evenstep"].command(other, port, fleet, folder)
            at = serve.index("serve")
            picker = [*serve[:at], "pick", *serve[at + 1 :], "--grpc-port", str(grpc)]
        launch = [sys.executable, "-m", "tests.support.router_bench.gateway", "--form", form]
        ports = ("--port", str(port), "--http", str(other), "--grpc", str(grpc))
        return [*launch, *ports, "--engines", engines, "--folder", str(folder), "--", *picker]

    return command


COMPARED = {
    "evenstep": TARGETS["evenstep"],
    "pick-http": Target("Envoy, evenstep pick by ext_authz", gateway("http")),
    "pick-ext-proc": Target("Envoy, evenstep pick by ext_proc", gateway("ext_proc")),
    "minimal": Target("Envoy, a picker over grpc.aio that decides nothing", gateway("minimal")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=7.0, help="of each run, then it drains")
    parser.add_argument("--tests", default=",".join(TESTS), help="which, with commas")
    parser.add_argument("--targets", default=",".join(COMPARED), help="which, with commas")
    parser.add_argument("--json", type=Path, help="file for what was measured")
    options = parser.parse_args()
    names, tests = options.targets.split(","), options.tests.split(",")
    TARGETS.update(COMPARED)
    loads = [os.getloadavg()[0]]
    rows: dict[str, dict[str, list[dict[str, float]]]] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        fleet = stack.enter_context(bench_router.engines(Path(scratch)))
        for turn in range(options.rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                with bench_router.started(name, fleet, Path(scratch)) as target:
                    for test in tests:
                        rows[test][name].append(one(test, target, options.seconds))
            print(f"round {turn + 1} of {options.rounds}", flush=True)
    loads.append(os.getloadavg()[0])
    medians = {test: {n: median(each) for n, each in of.items()} for test, of in rows.items()}
    show(medians)
    if options.json is not None:
        told = {
            "rounds": options.rounds,
            "seconds": options.seconds,
            "load_averages": bench_router.rounded(
                dict(zip(("before", "after"), loads, strict=True))
            ),
        }
        what = {name: COMPARED[name].what for name in names}
        shown = {"targets": what, "medians": bench_router.rounded(medians), **told}
        write_figures(options.json, shown, origin(Engines.EMULATED, CODE))


def one(test: str, target: bench_router.Running, seconds: float) -> dict[str, float]:
    """CPU of each part, in microseconds a request."""
    envoys = [pid for pid in target.pids if "envoy" in Path(f"/proc/{pid}/comm").read_text()]
    others = [pid for pid in target.pids if pid not in envoys]
    before = cpu_s(envoys), cpu_s(others)
    row = bench_router.ask(target, TESTS[test], seconds)
    used = cpu_s(envoys) - before[0], cpu_s(others) - before[1]
    each = 1e6 / max(1.0, row["requests"])
    parts = {"envoy_us": used[0] * each, "router_us": used[1] * each, "both_us": sum(used) * each}
    kept = ("requests", "events", "errors", "lost", "unended", "first_p50_ms", "transit_p99_ms")
    return {**parts, **{key: row[key] for key in kept}}


def median(rows: list[dict[str, float]]) -> dict[str, float]:
    """Of several runs, key by key."""
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def show(medians: dict[str, dict[str, dict[str, float]]]) -> None:
    """Print the tables."""
    for test, rows in medians.items():
        print(f"\n{test:14} CPU us a request: Envoy   router     both   requests  errors  first ms")
        for name, row in rows.items():
            print(
                f"{name:14} {row['envoy_us']:24.0f} {row['router_us']:8.0f} {row['both_us']:8.0f} "
                f"{row['requests']:10.0f} {row['errors'] + row['lost']:7.0f} "
                f"{row['first_p50_ms']:9.2f}"
            )


if __name__ == "__main__":
    main()
