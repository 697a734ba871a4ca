"""How large a fleet one deciding process can have: CPU of snapshots, decisions, memory, traffic.

    python tests/bench/bench_scale.py [--ranks 64,256,1000] [--group 8] [--running 72]
        [--slots 72,96] [--output 200,1000] [--steps 60] [--json FILE]

One model on emulated ranks in groups of --group, each a barrier, with one queue, and --running
requests on each rank. With as many --slots all are taken, and requests wait for them; with more,
each newcomer is assigned at once. All ranks step together. Real messages of the plug-in's publisher
are decoded and applied by the router's own dispatcher, under its defaults (bfio, look-ahead). As
many requests arrive as end, one after the other. Without sockets and clients: CPU time of one
thread, of which the making of messages is left out.

``core_at`` is what one process would need at 50 steps a second, in cores, and ``ranks_a_core`` how
many ranks fill one. What a request costs besides (read, sent to a worker or told to a gateway) is
measured by bench_router.py and bench_pick.py.
"""

import argparse
import asyncio
import gc
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import zmq

from loadgen.report.origin import Engines, origin
from router.config.serve_settings import ServeSettings
from router.core.events import SnapshotReceived, WorkerUp
from router.core.state.cluster import Cluster
from router.core.types import Outcome, Request, WorkerSpec
from router.core.wire import decode
from router.dispatch.dispatcher import Dispatcher
from router.serve.router import make_dispatcher
from tests.bench.bench_ingest import Worker, _token
from tests.support.figure_files import write_figures

CODE = (
    "router/core",
    "router/dispatch",
    "engine_patches/stream",
    "tests/bench/bench_ingest.py",
    "tests/bench/bench_scale.py",
)
STEPS_PER_S = 50
WARM_UP = 10
# Rounds that wait for a barrier's last rank run within it.
ROUND_S = 0.005


class Rank(Worker):
    """An engine whose requests are those that the router sends."""

    def __init__(self, number: int, endpoint: str, context: Any, slots: int, seed: int) -> None:
        super().__init__(number, endpoint, 0, context)
        self.publisher.message.slots = slots
        self.messages: list[bytes] = []
        self.publisher._send = lambda message, _: self.messages.append(message)
        self.messages.append(self.publisher._full())
        self._entering: list[str] = []
        self.ended: list[str] = []

    def enter(self, request_id: str, prompt_tokens: int, output_tokens: int) -> None:
        id_ = f"cmpl-{request_id}-0-1a2b3c4d"
        self._tokens[id_] = [prompt_tokens, 0]
        self._entering.append(id_)
        self._ends.append((self._step + output_tokens, id_))

    def step(self) -> None:
        self._step += 1
        self._places.settle()
        entering, self._entering = self._entering, []
        gained = {id_: 1 for id_ in self._tokens if id_ not in set(entering)}
        for id_ in self._tokens:
            self._tokens[id_][1] += 1
        growths = self._places.growths(gained, set())
        ended = [id_ for end, id_ in self._ends if end <= self._step]
        self._ends = [pair for pair in self._ends if pair[0] > self._step]
        rows = [self._row(id_) for id_ in entering if id_ not in set(ended)]
        for id_ in ended:
            del self._tokens[id_]
            self._places.leave(id_)
        self.ended = [id_.removeprefix("cmpl-").split("-0-")[0] for id_ in ended]
        publisher = self.publisher
        with publisher.lock:
            publisher.message.step = self._step
            publisher.message.step_s = 1 / STEPS_PER_S
            publisher.message.time_s = time.time()
            publisher.publish_changes(rows, ended, (), idle=False, growths=growths)


class Fleet:
    """Ranks, and the router's dispatcher with their requests."""

    def __init__(self, folder: Path, ranks: int, group: int, slots: int, output: int) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, 4 * ranks + 16)
        self.ranks = [Rank(n, f"ipc://{folder}/{n}", self.context, slots, n) for n in range(ranks)]
        specs = tuple(
            WorkerSpec(f"w{n}", f"http://w{n}", f"g{n // group}", rank=n % group, slots=slots)
            for n in range(ranks)
        )
        settings = ServeSettings(workers=specs, pool_size=ranks * (slots + 2))
        self.dispatcher = make_dispatcher(settings, Cluster(specs))
        for spec in specs:
            self.dispatcher.apply(WorkerUp(spec.id))
        names = list(dict.fromkeys(spec.group for spec in specs))
        self.dispatcher.share([names], {"model": names[0]})
        self.home, self.output, self.serial = names[0], output, 0
        self.requests: dict[str, Request] = {}
        self.rank_of = {f"w{n}": rank for n, rank in enumerate(self.ranks)}
        self.asked: list[tuple[Request, asyncio.Future[WorkerSpec]]] = []
        self.rng = random.Random(1)

    async def ask(self, count: int) -> None:
        """So many new requests, one after the other, BurstGPT-like lengths of a fixed mean."""
        for _ in range(count):
            self.serial += 1
            id_, prompt = _token(9, self.serial), 200 + 37 * self.serial % 2000
            request = Request(id_, self.home, prompt, arrival_s=time.monotonic(), model="model")
            self.requests[id_] = request
            self.asked.append((request, self.dispatcher.submit(request)))
            await asyncio.sleep(0)

    def send(self) -> int:
        """What has been assigned enters its rank; how many."""
        there = [pair for pair in self.asked if pair[1].done()]
        self.asked = [pair for pair in self.asked if not pair[1].done()]
        for request, waiter in there:
            length = 1 + self.rng.randrange(2 * self.output)
            rank = self.rank_of[waiter.result().id]
            rank.enter(request.id, request.prompt_tokens, length)
        return len(there)

    def end(self) -> None:
        """The clients' side: answers of requests that the engines have ended are whole."""
        for id_ in [id_ for rank in self.ranks for id_ in rank.ended]:
            self.dispatcher.end(self.requests.pop(id_), Outcome.COMPLETED)

    def apply(self, dispatcher: Dispatcher) -> tuple[int, int]:
        """Take in what the ranks have published; messages and bytes."""
        count = size = 0
        for worker_id, rank in self.rank_of.items():
            for message in rank.messages:
                told = decode(message)
                dispatcher.apply(SnapshotReceived(worker_id, told, time.monotonic()))
                count, size = count + 1, size + len(message)
        return count, size


async def measured(
    folder: Path, ranks: int, group: int, running: int, slots: int, output: int, steps: int
) -> Any:
    """Means over the last steps, in CPU microseconds."""
    fleet = Fleet(folder, ranks, group, slots, output)
    wanted = ranks * (running + (running == slots))
    taken: list[float] = []
    decided: list[float] = []
    made: list[int] = []
    counted: list[tuple[int, int]] = []
    full_at = None
    while len(taken) < steps:
        began_s = time.thread_time()
        told = fleet.apply(fleet.dispatcher)
        taken_s = time.thread_time()
        fleet.end()
        await fleet.ask(min(4 * ranks, wanted - len(fleet.requests)))
        await asyncio.sleep(ROUND_S)
        done_s = time.thread_time()
        sent = fleet.send()
        if full_at is None and len(fleet.requests) == wanted and len(fleet.asked) <= 2 * ranks:
            full_at = fleet.ranks[0]._step
            gc.collect()
            gc.freeze()
        if full_at is not None and fleet.ranks[0]._step >= full_at + WARM_UP:
            taken.append(taken_s - began_s)
            decided.append(done_s - taken_s)
            made.append(sent)
            counted.append(told)
        for rank in fleet.ranks:
            rank.messages.clear()
            rank.step()
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    fleet.context.destroy(linger=0)
    messages, size = (sum(each) for each in zip(*counted, strict=True))
    step_s = statistics.fmean(t + d for t, d in zip(taken, decided, strict=True))
    cores = step_s * STEPS_PER_S
    return {
        "ranks": ranks,
        "group": group,
        "running": running,
        "slots": slots,
        "output_tokens": output,
        "us_a_snapshot": round(sum(taken) / messages * 1e6, 1),
        "bytes_a_snapshot": round(size / messages),
        "mbit_per_s": round(size / messages * ranks * STEPS_PER_S * 8 / 1e6, 1),
        "us_a_request": round(sum(decided) / max(1, sum(made)) * 1e6, 1),
        "requests_per_s": round(statistics.fmean(made) * STEPS_PER_S),
        "rounds_ms_p50": round(statistics.median(decided) * 1e3, 1),
        "rounds_ms_max": round(max(decided) * 1e3, 1),
        "memory_mb": round(memory_mb),
        "core_at": round(cores, 2),
        "ranks_a_core": round(ranks / cores),
    }


def in_a_process(given: argparse.Namespace, ranks: int, slots: int, output: int) -> Any:
    """Each size in a process of its own: memory is its peak."""
    flags = [f"--ranks={ranks}", f"--slots={slots}", f"--output={output}", "--one"]
    flags += [f"--{name}={getattr(given, name)}" for name in ("group", "running", "steps")]
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.bench_scale", *flags],
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout)


def numbers(text: str) -> Sequence[int]:
    return [int(each) for each in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=numbers, default=(64, 256, 1000))
    parser.add_argument("--slots", type=numbers, default=(72, 96))
    parser.add_argument("--output", type=numbers, default=(200, 1000))
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--running", type=int, default=72)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--one", action="store_true", help="this process measures, prints JSON")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.one:
        with tempfile.TemporaryDirectory(prefix="evenstep-") as folder:
            size = given.ranks[0], given.group, given.running, given.slots[0]
            rest = given.output[0], given.steps
            print(json.dumps(asyncio.run(measured(Path(folder), *size, *rest))))
        raise SystemExit
    rows = []
    for output, slots, ranks in product(given.output, given.slots, given.ranks):
        rows.append(in_a_process(given, ranks, slots, output))
        print(rows[-1], flush=True)
    if given.json:
        write_figures(given.json, {"rows": rows}, origin(Engines.EMULATED, CODE))


if __name__ == "__main__":
    main()
