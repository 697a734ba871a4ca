"""An emulated fleet of three speeds behind a router, and the same chains in the simulator."""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loadgen.chains.chain_simulation import simulate_chains
from loadgen.chains.work import Work, draw_work
from router.core.placement.model import Chain, total_rate
from router.core.types import Dispatch
from tests.support.fleet import Fleet, running_fleet
from tests.support.replays import replay_command
from tests.support.server import running_router

SPEEDS = (0.25, 1.0, 0.5)
SLOTS = 4
STEP_S = 0.02
MEAN_TOKENS = 25
# A step takes as long whatever runs in it, so each slot completes at its worker's rate.
CHAINS = tuple(
    Chain((at,), (1,), STEP_S * MEAN_TOKENS / speed, SLOTS) for at, speed in enumerate(SPEEDS)
)
FLEET_FLAGS = (
    *("--workers", str(len(SPEEDS)), "--slots", str(SLOTS), "--no-barrier"),
    *("--speed", ",".join(map(str, SPEEDS)), "--step-time", f"{STEP_S},0"),
    *("--stream-interval", "50"),
)


@dataclass(frozen=True)
class Rule:
    """A policy as it is run; ``planned``: the router is told the workers' rates."""

    policy: str
    dispatch: Dispatch
    planned: bool = True

    def __str__(self) -> str:
        return self.policy if self.planned else f"{self.policy}, rates learned"


RULES = (
    Rule("jffc", Dispatch.POOL),
    Rule("jffc", Dispatch.POOL, planned=False),
    Rule("sed", Dispatch.INSTANT),
    Rule("sa_jsq", Dispatch.INSTANT),
    Rule("jiq", Dispatch.INSTANT),
    Rule("jsq", Dispatch.INSTANT),
    Rule("round_robin", Dispatch.INSTANT),
    Rule("random", Dispatch.INSTANT),
)


@dataclass(frozen=True)
class Response:
    """Mean seconds from arrival to end, of the same requests."""

    rule: Rule
    simulated_s: float
    live_s: float


def drawn(load: float, requests: int, seed: int) -> Work:
    """Poisson arrivals at a share of what the fleet completes, exponential lengths."""
    return draw_work(load * total_rate(CHAINS), requests, seed)


def specs(fleet: Fleet, *, planned: bool) -> list[str]:
    """``--worker`` for each worker, with its rate if that is planned."""
    rates = [f",service_rate={chain.service_rate}" if planned else "" for chain in CHAINS]
    named = [spec + rate for spec, rate in zip(fleet.workers, rates, strict=True)]
    return [part for spec in named for part in ("--worker", spec)]


def respond(rule: Rule, load: float, requests: int, seed: int, folder: Path) -> Response:
    """Serve requests over HTTP and in virtual time."""
    work = drawn(load, requests, seed)
    tokens = [max(1, round(size * MEAN_TOKENS)) for size in work.size]
    sizes = Work(work.arrival_s, np.array(tokens) / MEAN_TOKENS)
    simulated = simulate_chains(CHAINS, rule.policy, sizes, rule.dispatch, seed)
    folder.mkdir(parents=True)
    rows = zip(work.arrival_s.tolist(), tokens, strict=True)
    lines = [f"{arrival_s:.6f},8,{length}\n" for arrival_s, length in rows]
    (folder / "trace.csv").write_text(
        "Timestamp,Request tokens,Response tokens\n" + "".join(lines), encoding="utf-8"
    )
    with running_fleet(folder, *FLEET_FLAGS, "--seed", str(seed)) as fleet:
        flags = ("--policy", rule.policy, "--dispatch", rule.dispatch.value, "--seed", str(seed))
        workers = specs(fleet, planned=rule.planned)
        with running_router(folder, *workers, *flags, "--queue-timeout", "600") as router:
            live_s = _replayed(router.url, folder)
    return Response(rule, float(simulated.response_s.mean()), live_s)


def _replayed(url: str, folder: Path) -> float:
    """Mean response time of the trace's requests, all of which are to complete."""
    report = folder / "report.json"
    flags = ("--trace", str(folder / "trace.csv"), "--arrivals", "trace")
    command = replay_command(url, report, *flags)
    subprocess.run(command, check=True, capture_output=True, timeout=1200)
    return float(json.loads(report.read_bytes())["mean_e2el_ms"]) / 1000


def out_of_order(responses: Sequence[Response], margin: float) -> list[tuple[str, str]]:
    """Pairs whose first is faster by more than a margin in the simulator, and is not over HTTP."""
    return [
        (str(one.rule), str(other.rule))
        for one in responses
        for other in responses
        if one.simulated_s * (1 + margin) < other.simulated_s and one.live_s >= other.live_s
    ]
