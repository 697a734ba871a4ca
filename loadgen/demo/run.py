"""One run of the demo: a fresh emulated fleet, a fresh router and one replay, each a process."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from loadgen.emulator.record import StepRecord, read_record
from loadgen.run.child_processes import Child, free_ports
from router.core.errors import EvenstepError
from router.core.step_time import StepTime
from router.core.types import Dispatch

# At its very first start a router compiles its search.
READY_TIMEOUT_S = 180.0
HTTP_TIMEOUT_S = 2.0
# Engine seconds: some 200 steps. The router's own 5 s would span most of a run, whose averages
# would then lack the long prompts that BF-IO postpones.
STARVATION_S = 1.5
QUEUE_TIMEOUT_S = 60.0
# Levels of the emulator's power model: its workers draw the least while they wait, too.
EMULATED_POWER = ("--power-levels", "100,100,400")


@dataclass(frozen=True, slots=True)
class Fleet:
    """The fleet of every run, and the number of requests in the system."""

    workers: int = 8
    slots: int = 32
    pool: int = 64
    step_time: str = "4.95e-3,9.5e-8"  # as ``evenstep emulate`` takes it
    stream_interval: int = 16  # tokens per streamed event
    prefill_workers: int = 0  # further ones
    more: tuple[str, ...] = ()  # further options of ``evenstep emulate``

    @property
    def concurrency(self) -> int:
        return self.workers * self.slots + self.pool

    @property
    def ports(self) -> int:
        """One per worker, the fault port, two per state stream, the router's."""
        return 3 * self.ranks + 2

    @property
    def ranks(self) -> int:
        return self.workers + self.prefill_workers

    @property
    def prompt_budget(self) -> str:
        """Prompts that cost nothing would only hold their slots for longer, piece by piece."""
        return "auto" if StepTime.parse(self.step_time).per_prompt_token_s else "off"


@dataclass(frozen=True, slots=True)
class RunPlan:
    """One run, in engine seconds; without ``arrivals``, those of the fleet's closed loop."""

    policy: str
    dispatch: Dispatch
    requests: int
    cap_tokens: int
    seed: int
    time_scale: float
    warmup: float = 0.3
    starvation_s: float = STARVATION_S
    trace: str = "burstgpt"
    arrivals: str | None = None

    @property
    def name(self) -> str:
        return f"{self.policy}-{self.dispatch.value}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Output of a run, with the features of the emulated ``engines``."""

    plan: RunPlan
    report: dict[str, Any]
    record: Sequence[StepRecord]
    record_file: Path
    engines: Mapping[str, object] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return bool(self.report["completed"] == self.plan.requests)


def execute(plan: RunPlan, fleet: Fleet, folder: Path, timeout_s: float) -> Outcome:
    """Run a fleet, a router and a replay; all processes have ended on return.

    After ``timeout_s`` the replay is interrupted; its open requests count as lost. EvenstepError: a
    process did not start, or the replay reported nothing.
    """
    report_file = folder / f"{plan.name}.json"
    report_file.unlink(missing_ok=True)
    with serving(plan, fleet, folder / plan.name) as (url, engines):
        replay = replay_arguments(plan, fleet, url, report_file)
        with Child(replay, folder / f"{plan.name}.replay.log") as client:
            code = client.finish(timeout_s)
    report = _json_file(report_file)
    if report is None:
        raise EvenstepError(f"evenstep replay ended with {code} and no report: {client.last_words}")
    record_file = _record_file(folder / plan.name)
    return Outcome(plan, report, read_record(record_file), record_file, engines)


@contextlib.contextmanager
def serving(
    plan: RunPlan, fleet: Fleet, files: Path, *flags: str, program: Sequence[str] = ()
) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Start a fresh fleet behind a fresh router, yield its URL and the engines' features; end both.

    Record and logs are ``files``, with suffixes; ``flags`` are the router's, and ``program`` what
    starts it instead of ``evenstep``. EvenstepError: a process did not start.
    """
    first_port = free_ports(fleet.ports)
    record_file, ready_file = _record_file(files), files.with_name(f"{files.name}.ready")
    ready_file.unlink(missing_ok=True)
    emulate = [
        "emulate",
        *("--workers", str(fleet.workers), "--slots", str(fleet.slots), "--port", str(first_port)),
        *("--prefill-workers", str(fleet.prefill_workers)),
        *("--step-time", fleet.step_time, "--time-scale", f"{plan.time_scale:g}"),
        *("--stream-interval", str(fleet.stream_interval), "--seed", str(plan.seed)),
        *("--record", str(record_file), "--json", str(ready_file)),
        *fleet.more,
    ]
    with Child(emulate, files.with_name(f"{files.name}.fleet.log")) as workers:
        ready = workers.until(lambda: _json_file(ready_file), READY_TIMEOUT_S)
        ready_file.unlink()
        port = first_port + fleet.ports - 1
        url = f"http://127.0.0.1:{port}"
        specs = [worker["spec"] for worker in ready["workers"]]
        serve = [
            *(*program[1:], "serve", "--port", str(port), "--log-level", "warning"),
            *("--policy", plan.policy, "--dispatch", plan.dispatch.value),
            *("--seed", str(plan.seed), "--prompt-budget", fleet.prompt_budget),
            *(argument for spec in specs for argument in ("--worker", spec)),
            *("--starvation", f"{plan.starvation_s * plan.time_scale:g}"),
            *("--queue-timeout", f"{QUEUE_TIMEOUT_S * plan.time_scale:g}"),
            *flags,
        ]
        log = files.with_name(f"{files.name}.router.log")
        with Child(serve, log, program[0] if program else None) as router:
            router.until(lambda: all_up(url, fleet.ranks), READY_TIMEOUT_S)
            yield url, ready["engines"]


def _record_file(files: Path) -> Path:
    return files.with_name(f"{files.name}.csv.gz")


def replay_arguments(plan: RunPlan, fleet: Fleet, url: str, report_file: Path) -> list[str]:
    """Command line of a run's replay, after ``evenstep``."""
    return [
        "replay",
        *("--url", url, "--trace", plan.trace),
        *("--arrivals", plan.arrivals or f"closed:{fleet.concurrency}"),
        *("--requests", str(plan.requests), "--seed", str(plan.seed)),
        *("--max-tokens", str(plan.cap_tokens), "--time-scale", f"{plan.time_scale:g}"),
        *("--warmup", f"{plan.warmup:g}"),
        *("--json", str(report_file)),
    ]


def _json_file(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None


def all_up(url: str, workers: int) -> bool | None:
    """True once so many workers are up and have told their state, if they do; None before."""
    try:
        health = httpx.get(f"{url}/health", timeout=HTTP_TIMEOUT_S, trust_env=False).json()
    except httpx.TransportError:
        return None
    heard = [
        worker["up"] and worker["snapshots"] in ("fresh", "none")
        for group in health["groups"].values()
        for worker in group["workers"]
    ]
    return True if len(heard) == workers and all(heard) else None
