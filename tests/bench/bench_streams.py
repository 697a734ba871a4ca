"""What very many clients cost: 10,000 that are only connected, and 2,000 that read a stream.

    python tests/bench/bench_streams.py [--plane splice] [--idle 10000] [--streams 2000]

8 engines compute nothing and make a step a second, spread evenly: 2,000 events a second, 250 at
once. The router has one core, engines and clients have the other. Half a minute for a data plane.

Printed while all streams run: how late a timer of the router's loop was, every 2 ms, and how long
the loop was busy between two of them (a stall of the router's own; on a shared machine only this
counts); memory per idle connection and per stream with its engine's connection (differences of PSS,
without the kernel's buffers); CPU.
"""

import argparse
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from loadgen.report.origin import SERVING, Engines, origin
from router.http.port import DataPlane
from tests.support.figure_files import write_figures
from tests.support.router_bench.targets import (
    OTHER_CORE,
    ROUTER_CORE,
    cpu_s,
    memory_mb,
    pinned,
)
from tests.support.server import Server, free_port, starting, wait_ready, wait_until

CODE = (*SERVING, "router/serve", "tests/support/router_bench", "tests/bench/bench_streams.py")

ENGINES = 8
STEP_MS = 1000
# Listeners, state streams, the log, and what libraries open.
OTHER_FILES = 300
PLANES = [str(plane) for plane in DataPlane]
Figures = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--plane",
        choices=PLANES,
        action="append",
        help="data plane, may be repeated: both",
    )
    parser.add_argument("--idle", type=int, default=10_000, help="connections (10,000)")
    parser.add_argument("--streams", type=int, default=2_000, help="of an event a second (2,000)")
    parser.add_argument("--seconds", type=float, default=12.0, help="that are measured (12)")
    parser.add_argument("--json", type=Path, help="file for what was measured")
    options = parser.parse_args()
    idle = allowed(options.idle, options.streams)
    planes = options.plane or PLANES
    told = {plane: measured(plane, idle, options.streams, options.seconds) for plane in planes}
    print(f"{idle:,} idle connections, {options.streams:,} streams of an event a second")
    for plane, row in told.items():
        print(
            f"{plane:7} loop late {shown(row, 'late')}; busy {shown(row, 'busy')}; "
            f"{row['idle_kb']:.1f} kB an idle connection, {row['stream_kb']:.1f} kB a stream; "
            f"{row['memory_mb']:.0f} MB in all, {100 * row['cpu']:.0f} % of a core; "
            f"{row['events']:,.0f} events, {row['errors']:.0f} errors, "
            f"{row['lost']:.0f} connections lost"
        )
    if options.json is not None:
        write_figures(options.json, told, origin(Engines.EMULATED, CODE))


def allowed(idle: int, streams: int) -> int:
    """Idle connections that the limit of open files allows; a stream takes two."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard == resource.RLIM_INFINITY:
        return idle
    room = hard - 2 * streams - OTHER_FILES
    if room < idle:
        print(f"{hard:,} open files are allowed: {room:,} idle connections (raise ulimit -Hn)")
    return max(0, min(idle, room))


def measured(plane: str, idle: int, streams: int, seconds: float) -> Figures:
    """One router, with all of its clients."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        folder = Path(scratch)
        router = stack.enter_context(running(folder, plane, idle + streams, streams))
        pids = [router.process.pid]
        warm(router.port)
        crowd = stack.enter_context(gathering(router.port, idle, streams))
        said, hears = cast(IO[str], crowd.stdout), cast(IO[str], crowd.stdin)
        before_mb = memory_mb(pids)
        expect(said, "idle")
        idle_mb = memory_mb(pids)
        tell(hears)
        expect(said, "streaming")
        beats(router, folder)
        used_s, began_s = cpu_s(pids), time.monotonic()
        time.sleep(seconds)
        cpu = (cpu_s(pids) - used_s) / (time.monotonic() - began_s)
        late = beats(router, folder)
        streaming_mb = memory_mb(pids)
        tell(hears)
        seen = json.loads(said.readline())
    return {
        **{f"{what}_{share}_ms": ms for what, of in late.items() for share, ms in of.items()},
        "idle_kb": 1024 * (idle_mb - before_mb) / max(1, idle),
        "stream_kb": 1024 * (streaming_mb - idle_mb) / max(1, streams),
        "memory_mb": streaming_mb,
        "cpu": cpu,
        "events": seen["events"],
        "errors": seen["errors"],
        "lost": idle - seen["idle"] + streams - seen["streams"],
    }


@contextlib.contextmanager
def running(folder: Path, plane: str, connections: int, streams: int) -> Iterator[Server]:
    """A router with a heartbeat, before engines that compute nothing."""
    ports, snapshots, port = free_port(ENGINES), free_port(2 * ENGINES), free_port()
    slots = str(-(-streams // ENGINES) + 8)
    engines = [*pinned(OTHER_CORE), sys.executable, "-m", "tests.support.router_bench.engines"]
    engines += ["--port", str(ports), "--workers", str(ENGINES), "--slots", slots]
    engines += ["--snapshots", str(snapshots), "--step-ms", str(STEP_MS)]
    workers = [
        f"--worker=http://127.0.0.1:{ports + number},slots={slots}"
        f",snapshots=tcp://127.0.0.1:{snapshots + 2 * number}"
        for number in range(ENGINES)
    ]
    router = [*pinned(ROUTER_CORE), sys.executable, "-m", "tests.support.router_bench.heartbeat"]
    router += [str(folder / "beats.json"), "serve", "--port", str(port), *workers]
    router += ["--data-plane", plane, "--max-connections", str(connections + 100)]
    router += ["--keep-alive-timeout", "600", "--log-level", "warning"]
    with (
        starting(engines, ports, folder / "engines.log") as first,
        starting(router, port, folder / "router.log") as server,
    ):
        wait_ready(first, 30)
        wait_ready(server, 180)
        yield server


def warm(port: int) -> None:
    """Run short streams, so that everything is loaded."""
    command = [*pinned(OTHER_CORE), sys.executable, "-m", "tests.support.router_bench.load"]
    flags = ("--clients", "200", "--events", "1", "--seconds", "1")
    subprocess.run(
        [*command, "--port", str(port), *flags], check=True, timeout=60, capture_output=True
    )


@contextlib.contextmanager
def gathering(port: int, idle: int, streams: int) -> Iterator[subprocess.Popen[str]]:
    """All clients, in a process that reads and writes lines."""
    command = [*pinned(OTHER_CORE), sys.executable, "-m", "tests.support.router_bench.crowd"]
    command += ["--port", str(port), "--idle", str(idle), "--streams", str(streams)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def expect(said: IO[str], word: str) -> None:
    """Wait for a line of the clients.

    Raises:
        RuntimeError: they ended before.
    """
    if (line := said.readline().strip()) != word:
        raise RuntimeError(f"the clients said {line!r} instead of {word!r}")


def tell(hears: IO[str]) -> None:
    """Have the clients go on."""
    hears.write("\n")
    hears.flush()


def shown(row: Figures, what: str) -> str:
    """Milliseconds of the loop."""
    shares = ("p50", "p99", "p99.9", "longest")
    return ", ".join(f"{share} {row[f'{what}_{share}_ms']:.1f}" for share in shares) + " ms"


def beats(router: Server, folder: Path) -> dict[str, Figures]:
    """Lateness and busy time of the loop since the last call, in milliseconds."""
    file = folder / "beats.json"
    file.unlink(missing_ok=True)
    os.kill(router.process.pid, signal.SIGUSR1)
    wait_until(file.exists, 30, "the heartbeat is told")
    told: dict[str, Figures] = json.loads(file.read_text())
    return told


if __name__ == "__main__":
    main()
