"""What one request costs on the decision side, from its arrival to its end.

    python tests/bench/bench_dispatch.py [--workers 8] [--slots 128] [--running 64] [--seconds 2]

The dispatcher is that of `evenstep serve` (bfio with look-ahead, two tenants, breakers, request
log), alone on its event loop, without HTTP. Snapshots show --running requests on each worker. CPU
time of a request and of its parts, for requests that come alone and 64 at a time. Then alone in a
service under way, with 16 and 64 running on each worker: bfio looks --horizon steps ahead, and one
worker after the other steps between two requests. --json FILE writes the figures.
"""

import argparse
import gc
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import count
from pathlib import Path

import uvloop

from loadgen.report.origin import Engines, origin, write_figures
from router.config.serve_settings import ServeSettings
from router.core.events import PromptCounted, SnapshotReceived, WorkerUp
from router.core.state.breaker import BreakerSettings
from router.core.state.cluster import Cluster
from router.core.types import Outcome, Request, RunningRequest, Snapshot, WorkerSpec
from router.dispatch.dispatcher import Dispatcher
from router.proxy.request_log import RequestLog, follow
from router.serve.router import make_dispatcher

CODE = ("router/core", "router/dispatch", "router/serve", "tests/bench/bench_dispatch.py")

TENANTS = "bench", "other"
Figures = dict[str, float]

ROUNDS_OF = 1, 64
UNDER_WAY = 16, 64  # running on each worker


class Load:
    """Requests and their events."""

    def __init__(self, dispatcher: Dispatcher, log: RequestLog) -> None:
        self._dispatcher = dispatcher
        self._log = log
        self._serial = 0
        self.spent_s: defaultdict[str, float] = defaultdict(float)

    async def round(self, number: int) -> None:
        """Requests that come together, from arrival to end."""
        requests = [self._request() for _ in range(number)]
        scopes = [{"method": "POST", "path": "/v1/completions"} for _ in requests]
        for scope, request in zip(scopes, requests, strict=True):
            self._log.begin(scope)
            follow(scope, request, "bench", request.id)
        began_s = time.process_time()
        waiters = [self._dispatcher.submit(request) for request in requests]
        submitted_s = time.process_time()
        sent = [await waiter for waiter in waiters]
        decided_s = time.process_time()
        for request, worker in zip(requests, sent, strict=True):
            self._answer(request, worker)
        answered_s = time.process_time()
        for request in requests:
            self._dispatcher.end(request, Outcome.COMPLETED)
        ended_s = time.process_time()
        for scope in scopes:
            self._log.end(scope)
        self.spent_s["submit"] += submitted_s - began_s
        self.spent_s["round"] += decided_s - submitted_s
        self.spent_s["answer"] += answered_s - decided_s
        self.spent_s["end"] += ended_s - answered_s

    def _request(self) -> Request:
        self._serial += 1
        return Request(
            id=f"es-{self._serial:020x}",
            group="default",
            prompt_tokens=60 + self._serial * 37 % 900,
            max_tokens=256,
            arrival_s=time.monotonic(),
            text_bytes=240,
            tenant=TENANTS[self._serial % len(TENANTS)],
        )

    def _answer(self, request: Request, worker: WorkerSpec) -> None:
        self._dispatcher.began(request, worker.id, time.monotonic())
        self._dispatcher.apply(PromptCounted(request.id, 60, 9))


def made(
    workers: int, slots: int, running: int, horizon: int | None = None
) -> tuple[Dispatcher, RequestLog]:
    """A dispatcher with workers that are up and have reported."""
    specs = tuple(WorkerSpec(f"http://w{i}", f"http://w{i}", slots=slots) for i in range(workers))
    settings = ServeSettings(workers=specs, policy="bfio", horizon=horizon)
    cluster = Cluster(specs, breakers=settings.of(BreakerSettings))
    dispatcher = make_dispatcher(settings, cluster)
    log = RequestLog(time.monotonic)
    cluster.watchers.append(log)
    for number, spec in enumerate(specs):
        dispatcher.apply(WorkerUp(spec.id))
        parts = tuple(
            RunningRequest(f"cmpl-{number}-{i}", 50 + (number * 131 + i * 71) % 1900, i)
            for i in range(running)
        )
        told = Snapshot("full", "default", "w", number, "e", 1, 1, 0.0, 0.02, running=parts)
        dispatcher.apply(SnapshotReceived(spec.id, told, time.monotonic()))
    return dispatcher, log


class Steps:
    """Workers that step one after the other."""

    def __init__(self, dispatcher: Dispatcher, workers: int) -> None:
        self._dispatcher = dispatcher
        self._turns = ((number, sequence) for sequence in count(2) for number in range(workers))

    def next(self) -> None:
        """Report a step of the next worker."""
        number, sequence = next(self._turns)
        told = Snapshot("delta", "default", "w", number, "e", sequence, sequence, 0.0, 0.02)
        self._dispatcher.apply(SnapshotReceived(f"http://w{number}", told, time.monotonic()))


async def timed(load: Load, number: int, seconds: float, between: Callable[[], None]) -> Figures:
    """CPU microseconds per request and part, in rounds of ``number``."""
    for _ in range(200):
        await load.round(number)
    load.spent_s.clear()
    gc.collect()
    gc.freeze()
    requests, until_s = 0, time.monotonic() + seconds
    while time.monotonic() < until_s:
        between()
        await load.round(number)
        requests += number
    parts = {part: 1e6 * spent_s / requests for part, spent_s in load.spent_s.items()}
    return {"": sum(parts.values())} | {f"{part}_": each for part, each in parts.items()}


async def measure(arguments: argparse.Namespace) -> Figures:
    """CPU microseconds per request, for each size of a round, and with a look-ahead."""
    figures: Figures = {}
    for number in ROUNDS_OF:
        load = Load(*made(arguments.workers, arguments.slots, arguments.running))
        parts = await timed(load, number, arguments.seconds, lambda: None)
        figures |= {f"{number}_{part}us": each for part, each in parts.items()}
    for running in UNDER_WAY:
        dispatcher, log = made(arguments.workers, arguments.slots, running, arguments.horizon)
        steps = Steps(dispatcher, arguments.workers)
        parts = await timed(Load(dispatcher, log), 1, arguments.seconds, steps.next)
        figures |= {f"ahead_{running}_{part}us": each for part, each in parts.items()}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--running", type=int, default=64, help="requests on each worker")
    parser.add_argument("--horizon", type=int, default=12, help="steps looked ahead")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each case")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures = uvloop.run(measure(arguments))
    for name, value in figures.items():
        print(f"{name:20} {value:8.2f}")
    if arguments.json:
        write_figures(arguments.json, figures, origin(Engines.EMULATED, CODE))


if __name__ == "__main__":
    main()
