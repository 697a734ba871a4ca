"""What recording costs a router: CPU per step and per request, and bytes of the file.

python tests/bench/bench_recording.py [--workers 64] [--running 64] [--steps 2000]
    [--json FILE]
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

from loadgen.report.origin import Engines, origin
from router.core.events import Arrived, Dispatched, Ended, Event, SnapshotReceived, WorkerUp
from router.core.state.cluster import Cluster
from router.core.types import Outcome, WorkerSpec
from router.recording.recorder import Recorder, Setting
from tests.support.core import request, running, snapshot
from tests.support.figure_files import write_figures

CODE = (
    *("router/core/state", "router/recording", "tests/support/core.py"),
    "tests/bench/bench_recording.py",
)
REQUESTS = 5000


def cluster_of(workers: int, running_each: int) -> Cluster:
    """All workers up and busy."""
    specs = [WorkerSpec(str(rank), f"http://{rank}", rank=rank) for rank in range(workers)]
    cluster = Cluster(specs)
    for spec in specs:
        told = [running(f"{spec.id}-{n}", 500 + n, 1) for n in range(running_each)]
        cluster.apply(WorkerUp(spec.id))
        cluster.apply(SnapshotReceived(spec.id, snapshot("full", 1, *told), 0.0))
    return cluster


def steps(workers: int, count: int) -> list[Event]:
    """Every worker tells these steps."""
    messages = [snapshot("delta", step, step_s=0.03) for step in range(2, count + 2)]
    return [SnapshotReceived(str(w), said, 0.0) for said in messages for w in range(workers)]


def requests(workers: int) -> Iterator[tuple[Event, ...]]:
    """Requests that come, are sent and end."""
    for number in range(REQUESTS):
        new = request(number)
        worker = str(number % workers)
        yield Arrived(new), Dispatched(new.id, worker), Ended(new.id, Outcome.COMPLETED)


def cpu_s(cluster: Cluster, events: list[Event]) -> float:
    """Of applying these."""
    began_s = time.process_time()
    for event in events:
        cluster.apply(event)
    return time.process_time() - began_s


def measure(options: argparse.Namespace, *, recording: bool) -> tuple[float, float, float, float]:
    """Microseconds and bytes of a step, and of a request."""
    cluster = cluster_of(options.workers, options.running)
    recorder = Recorder(cluster, Setting("serve", "bfio", "pool"), time.monotonic, 0.0)
    listener = recorder.listen(1 << 30) if recording else None
    step_us = 1e6 * cpu_s(cluster, steps(options.workers, options.steps)) / options.steps
    step_bytes = len(listener.take()) / options.steps if listener else 0.0
    events = [event for each in requests(options.workers) for event in each]
    request_us = 1e6 * cpu_s(cluster, events) / REQUESTS
    return step_us, request_us, step_bytes, len(listener.take()) / REQUESTS if listener else 0.0


def main() -> None:
    """Print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--json", type=Path, help="file for what was measured")
    options = parser.parse_args()
    rounds = [
        (measure(options, recording=False), measure(options, recording=True)) for _ in range(5)
    ]
    off = [min(row[0][column] for row in rounds) for column in range(2)]
    on = [min(row[1][column] for row in rounds) for column in range(2)]
    bytes_each = rounds[0][1][2:]
    print(f"{options.workers} workers, {options.running} requests on each; best of {len(rounds)}")
    rows = {}
    for what, without, with_it, size in zip(
        ("a step", "a request"), off, on, bytes_each, strict=True
    ):
        print(
            f"{what}: {without:.1f} us of the cluster's own, {with_it - without:+.1f} us recorded, "
            f"{size:.0f} bytes"
        )
        rows[what] = {"us": round(with_it - without, 2), "bytes": round(size)}
    if options.json:
        figures = {"workers": options.workers, "running": options.running, **rows}
        write_figures(options.json, figures, origin(Engines.EMULATED, CODE))


if __name__ == "__main__":
    main()
