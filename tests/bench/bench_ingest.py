"""What it costs the router to take in all state streams: the share of one core.

    python tests/bench/bench_ingest.py [--workers 256] [--steps 50] [--running 72] [--seconds 20]
    python tests/bench/bench_ingest.py --workers 8 --spread  # engines that share no barrier
    python tests/bench/bench_ingest.py --gains 1-4           # with drafts
    python tests/bench/bench_ingest.py --loop [--json tests/data/plugin/ingest.json]

Publishers in other processes send real deltas over ZMQ, --steps a second for each worker with
--running requests of 200 tokens on average, half of them the router's own. In a step each gains one
token, or a number of --gains at random. The router receives, decodes and applies the messages as
`evenstep serve` does, with bfio and its look-ahead; nothing waits. CPU time of this process and its
ZMQ thread; limit: 25 % of a core. --json FILE writes the figures.

--loop: one worker's messages decoded and applied in a loop, without sockets: CPU time and bytes of
a snapshot (median and mean, the least of five runs), for batches of 32 to 1,024 that gain one
token, two, or one to four; limit at 256: 60 us, 3 kB. Listed: as plug-ins of 0.1 send drafts, each
request a row.
"""

import argparse
import asyncio
import gc
import heapq
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import uvloop
import zmq

from engine_patches.stream.publisher import SnapshotPublisher, StepReport
from engine_patches.stream.rows import PlacedRow, Places
from loadgen.report.origin import Engines, origin
from router.config.serve_settings import ServeSettings
from router.core.events import Arrived, Dispatched, SnapshotReceived, WorkerUp
from router.core.state.cluster import Cluster
from router.core.types import KvGroup, Request, WorkerSpec
from router.core.wire import decode
from router.engines.snapshots import SnapshotClient
from router.serve.router import make_dispatcher
from tests.support.figure_files import write_figures

CODE = (
    "router/core",
    "router/dispatch",
    "router/engines",
    "engine_patches/stream",
    "tests/bench/bench_ingest.py",
)

LOOPS = {"1": (1, 1), "2": (2, 2), "1 to 4": (1, 4)}
LOOP_RUNNING = (32, 256, 1024)
RUNS = 5

PUBLISHERS = 4
MEAN_OUTPUT = 200
FIRST_WAIT_S = 10.0


class Worker:
    """One engine's requests and its stream of changes, as the plug-in publishes it.

    Args:
        gains: fewest and most tokens that a request gains in a step.
        listed: whether each request is a row of every message, as older plug-ins send drafts.
    """

    def __init__(
        self,
        number: int,
        endpoint: str,
        running: int,
        context: zmq.Context[zmq.Socket[bytes]],
        gains: tuple[int, int] = (1, 1),
        *,
        listed: bool = False,
    ) -> None:
        self._number = number
        self._gains = gains
        self._listed = listed
        self._rng = random.Random(number)
        self._serial = 0
        self._step = 0
        self._tokens: dict[str, list[int]] = {}  # prompt, generated
        self._places = Places()
        self._ends: list[tuple[int, str]] = []
        for _ in range(running):
            self._arrive(self._rng.randrange(MEAN_OUTPUT))
        self.publisher = SnapshotPublisher(
            endpoint,
            group="default",
            worker=f"default-{number}",
            rank=number,
            initial=StepReport(0, 0.0, 0.0, slots=running),
            context=context,
            rows=self._rows,
        )
        self.publisher.message.kv_groups = (KvGroup(16, 5000, 10000),)
        self.publisher.message.scheduled_decode_tokens = running

    def _rows(self) -> list[PlacedRow]:
        return [self._row(id_) for id_ in self._tokens]

    def _row(self, id_: str) -> PlacedRow:
        return (id_, *self._tokens[id_], 0, 0, None, self._places.take(id_))  # type: ignore[return-value]

    def _arrive(self, generated: int) -> str:
        self._serial += 1
        id_ = f"cmpl-{_token(self._number, self._serial)}-0-1a2b3c4d"
        self._tokens[id_] = [self._rng.randint(10, 3000), generated]
        mean_steps = 2 * MEAN_OUTPUT / sum(self._gains)
        left = 1 + int(self._rng.expovariate(1 / mean_steps))
        heapq.heappush(self._ends, (self._step + left, id_))
        return id_

    def step(self) -> None:
        """Let each request grow, or end and be replaced."""
        self._step += 1
        self._places.settle()
        fewest, most = self._gains
        gained = {id_: self._rng.randint(fewest, most) for id_ in self._tokens}
        for id_, tokens in gained.items():
            self._tokens[id_][1] += tokens
        growths = b"" if self._listed else self._places.growths(gained, set())
        rows = self._rows() if self._listed else []
        ended = []
        while self._ends[0][0] <= self._step:
            ended.append(heapq.heappop(self._ends)[1])
        for id_ in ended:
            del self._tokens[id_]
            self._places.leave(id_)
        rows += [self._row(self._arrive(1)) for _ in ended]
        publisher = self.publisher
        with publisher.lock:
            publisher.message.step = self._step
            publisher.message.step_s = 0.02
            publisher.message.time_s = time.time()
            publisher.publish_changes(rows, ended, (), idle=False, growths=growths)


def _token(worker: int, serial: int) -> str:
    return f"es-{worker:08x}{serial:012x}"


def publish(
    endpoints: dict[int, str],
    running: int,
    gains: tuple[int, int],
    steps: float,
    begins_s: Sequence[float],
    stop: Event,
) -> None:
    """Step workers at a rate, each with its own offset, until ``stop``."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4 * len(endpoints) + 16)
    workers = [Worker(i, endpoint, running, context, gains) for i, endpoint in endpoints.items()]
    due_s = time.monotonic()
    while not stop.is_set():
        for worker, begin_s in zip(workers, begins_s, strict=True):
            time.sleep(max(0.0, due_s + begin_s - time.monotonic()))
            worker.step()
            worker.publisher.poll()
        due_s += 1 / steps
    context.destroy(linger=0)


async def ingest(
    endpoints: dict[int, str], running: int, seconds: float, *, awaited: bool
) -> dict[str, float]:
    """Take in the streams; figures after the first seconds."""
    specs = tuple(
        WorkerSpec(f"w{number}", f"http://w{number}", rank=number, snapshots=endpoint)
        for number, endpoint in endpoints.items()
    )
    settings = ServeSettings(workers=specs, policy="bfio")
    cluster = Cluster(specs)
    dispatcher = make_dispatcher(settings, cluster)
    client = SnapshotClient(
        specs,
        dispatcher.apply,
        lambda i: cluster.worker(i).full_wanted,
        time.monotonic,
        awaited=lambda: awaited,
    )
    for number, spec in zip(endpoints, specs, strict=True):
        dispatcher.apply(WorkerUp(spec.id))
        for serial in range(1, running + 1, 2):
            request = Request(_token(number, serial), "default", 100)
            dispatcher.apply(Arrived(request))
            dispatcher.apply(Dispatched(request.id, spec.id))
    client.start()
    gc.freeze()  # as the server does
    await asyncio.sleep(FIRST_WAIT_S)
    before = client.received, client.received_bytes, time.process_time(), time.monotonic()
    gaps = sum(cluster.worker(spec.id).gaps for spec in specs)
    await asyncio.sleep(seconds)
    after = client.received, client.received_bytes, time.process_time(), time.monotonic()
    received, size, cpu_s, wall_s = (b - a for a, b in zip(before, after, strict=True))
    lost = sum(feed.gaps for spec in specs if (feed := cluster.worker(spec.id).feed)) - gaps
    client.close()
    return {
        "workers": len(specs),
        "snapshots_per_s": received / wall_s,
        "bytes_per_snapshot": size / received,
        "cpu_us_per_snapshot": cpu_s / received * 1e6,
        "cpu_share": cpu_s / wall_s,
        "cpu_share_at_asked_rate": 0.0,
        "lost": lost,
        "failures": client.failures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=256)
    parser.add_argument("--steps", type=float, default=50.0, help="of each worker in a second")
    parser.add_argument("--running", type=int, default=72, help="requests on each worker")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--gains", type=gains_of, default=(1, 1), metavar="N|FROM-TO")
    parser.add_argument("--loop", action="store_true", help="decode and apply only, in a loop")
    parser.add_argument("--awaited", action="store_true", help="as while requests wait")
    parser.add_argument("--spread", action="store_true", help="steps one worker after the other")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures: dict[str, Any]
    with tempfile.TemporaryDirectory(prefix="evenstep-") as folder:
        if arguments.loop:
            figures = {"rows": loops(Path(folder))}
        else:
            figures = dict(measure(arguments, Path(folder)))
            for name, value in figures.items():
                print(f"{name:26} {value:12.3f}")
    if arguments.json:
        write_figures(arguments.json, figures, origin(Engines.EMULATED, CODE))


def gains_of(text: str) -> tuple[int, int]:
    fewest, _, most = text.partition("-")
    return int(fewest), int(most or fewest)


def loops(folder: Path, steps: int = 200) -> dict[str, dict[str, float]]:
    """Cost of a snapshot by running requests and tokens in a step."""
    rows = {}
    print("running, tokens a step    median us   mean us   bytes")
    ways = [(name, gains, False) for name, gains in LOOPS.items()]
    for running in LOOP_RUNNING:
        for name, gains, listed in (*ways, ("2, listed", (2, 2), True)):
            runs = [
                loop(folder / str(run), running, gains, steps, listed=listed) for run in range(RUNS)
            ]
            row = {figure: min(run[figure] for run in runs) for figure in runs[0]}
            rows[f"{running}, {name}"] = row
            print(
                f"{running:>7}, {name:14} {row['median_us']:12.1f} {row['mean_us']:9.1f} "
                f"{row['bytes']:7.0f}"
            )
    return rows


def loop(
    folder: Path, running: int, gains: tuple[int, int], steps: int, *, listed: bool
) -> dict[str, float]:
    """Make the messages first, then take them in."""
    messages: list[bytes] = []
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    folder.mkdir(exist_ok=True)
    endpoint = f"ipc://{folder}/{running}-{gains}-{listed}"
    worker = Worker(0, endpoint, running, context, gains, listed=listed)
    worker.publisher._send = lambda message, _: messages.append(message)
    messages.append(worker.publisher._full())
    for _ in range(steps):
        worker.step()
    context.destroy(linger=0)
    cluster = Cluster([WorkerSpec("w", "http://w")])
    cluster.apply(WorkerUp("w"))
    for serial in range(1, running + 1, 2):
        request = Request(_token(0, serial), "default", 100)
        cluster.apply(Arrived(request))
        cluster.apply(Dispatched(request.id, "w"))
    departures = cluster.groups["default"].departures
    took_s = []
    gc.freeze()
    for message in messages:
        began_s = time.thread_time()
        cluster.apply(SnapshotReceived("w", decode(message), 0.0))
        departures.clear()
        took_s.append(time.thread_time() - began_s)
    feed = cluster.worker("w").feed
    assert feed is not None
    assert not feed.full_wanted
    assert feed.load_tokens == sum(map(sum, worker._tokens.values()))
    gc.unfreeze()
    counted = took_s[steps // 4 :]
    return {
        "median_us": round(statistics.median(counted) * 1e6, 1),
        "mean_us": round(statistics.fmean(counted) * 1e6, 1),
        "bytes": round(statistics.fmean(map(len, messages[1:]))),
    }


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Run publishers and the router's side."""
    endpoints = {number: f"ipc://{folder}/{number}" for number in range(arguments.workers)}
    spawn = multiprocessing.get_context("spawn")
    stop = spawn.Event()
    apart_s = 1 / arguments.steps / arguments.workers if arguments.spread else 0.0
    publishers = []
    for i in range(PUBLISHERS):
        share = dict(list(endpoints.items())[i::PUBLISHERS])
        begins_s = [number * apart_s for number in share]
        told = share, arguments.running, arguments.gains, arguments.steps, begins_s, stop
        publishers.append(spawn.Process(target=publish, args=told))
    for publisher in publishers:
        publisher.start()
    try:
        flags = endpoints, arguments.running, arguments.seconds
        figures = uvloop.run(ingest(*flags, awaited=arguments.awaited))
    finally:
        stop.set()
        for publisher in publishers:
            publisher.join()
    asked = arguments.workers * arguments.steps
    return {**figures, "cpu_share_at_asked_rate": figures["cpu_us_per_snapshot"] * asked / 1e6}


if __name__ == "__main__":
    main()
