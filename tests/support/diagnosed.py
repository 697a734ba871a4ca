"""Emulated clusters under load behind a real router, and what ``evenstep diagnose`` says."""

import contextlib
import csv
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np

from loadgen.replay.router_counters import parse_metrics
from tests.support.fleet import Fleet, running_fleet, worker_flags
from tests.support.replays import replay_command
from tests.support.round_robin import round_robin
from tests.support.server import (
    Server,
    free_port,
    running,
    running_router,
    starting,
    wait_until,
)

# Prompts of very different lengths, outputs whose ends nobody can foresee.
PROMPT_TOKENS, SIGMA, OUTPUT_TOKENS = 800, 0.7, 40
ROWS = 20_000
ENOUGH_REQUESTS = 60_000


@dataclass(frozen=True)
class Emulated:
    """A fleet and its load; requests are kept in the system by clients that each wait.

    Attributes:
        step_time: of the engines, ``C,t_l``.
        trace: of the requests, a bundled one; None: made, of lengths as above.
        flags: further ones of ``evenstep emulate``.
        warm_steps: before the recording begins.
    """

    workers: int = 4
    slots: int = 16
    clients: int = 96
    time_scale: float = 2.0
    step_time: str = "2e-3,5e-7"
    trace: str | None = None
    flags: tuple[str, ...] = ()
    warm_steps: int = 300

    def fleet_flags(self) -> list[str]:
        return [
            *("--workers", str(self.workers), "--slots", str(self.slots)),
            *("--step-time", self.step_time, "--time-scale", f"{self.time_scale:g}"),
            *("--stream-interval", "16", *self.flags),
        ]


def made_trace(folder: Path, seed: int = 0) -> Path:
    """Lengths as a file."""
    rng = np.random.default_rng(seed)
    mu = np.log(PROMPT_TOKENS) - SIGMA**2 / 2
    prompts = np.clip(rng.lognormal(mu, SIGMA, ROWS), 1, 20_000).astype(int)
    outputs = rng.geometric(1 / OUTPUT_TOKENS, ROWS)
    file = folder / "lengths.csv"
    with file.open("w", newline="") as text:
        rows = csv.writer(text)
        rows.writerow(["Request tokens", "Response tokens"])
        rows.writerows(zip(prompts.tolist(), outputs.tolist(), strict=True))
    return file


def made_conversations(folder: Path, rounds: int) -> Path:
    """Turns that repeat all turns before them, of 24 conversations at a time, as a trace."""
    rng, ids, rows = random.Random(0), count(), list[str]()
    for _ in range(rounds):
        talks = [[next(ids)] for _ in range(24)]
        for _ in range(6):
            rng.shuffle(talks)
            for talk in talks:
                talk += islice(ids, rng.randint(1, 3))
                tokens = {
                    "input_length": 512 * len(talk) - rng.randrange(512),
                    "output_length": 1 + int(rng.expovariate(1 / OUTPUT_TOKENS)),
                }
                rows.append(json.dumps({"timestamp": len(rows), **tokens, "hash_ids": talk}))
    file = folder / "conversations.jsonl"
    file.write_text("\n".join(rows))
    return file


@contextlib.contextmanager
def under_load(
    folder: Path, fleet: Fleet, cluster: Emulated, *flags: str, seed: int = 0
) -> Iterator[str]:
    """A router with these flags before the fleet, under load; yields the URL of its admin port."""
    admin = free_port()
    arguments = [*worker_flags(fleet), "--admin-port", str(admin), "--log-level", "warning"]
    with (
        running_router(folder, *arguments, *flags) as router,
        sending(folder, router.url, cluster, seed) as client,
    ):
        yield steady(Server(admin, router.process, router.log), client, cluster)


@contextlib.contextmanager
def observed(folder: Path, fleet: Fleet, cluster: Emulated, seed: int = 0) -> Iterator[str]:
    """An observer beside a plain proxy that balances, under load; yields its admin port's URL."""
    admin, first = free_port(), fleet.server.port
    command = [sys.executable, "-m", "router.cli", "observe", *worker_flags(fleet)]
    command += ["--admin-port", str(admin)]
    with (
        running(command, admin, folder / "observe.log") as observer,
        round_robin(range(first, first + cluster.workers)) as url,
        sending(folder, url, cluster, seed) as client,
    ):
        yield steady(observer, client, cluster)


@contextlib.contextmanager
def sending(folder: Path, url: str, cluster: Emulated, seed: int) -> Iterator[Server]:
    """Clients that send more requests there than anybody waits for."""
    command = replay_command(
        url,
        folder / "replay.json",
        *("--trace", cluster.trace or str(made_trace(folder, seed))),
        *("--arrivals", f"closed:{cluster.clients}", "--max-tokens", "400"),
        *("--requests", str(ENOUGH_REQUESTS)),
        *("--time-scale", f"{cluster.time_scale:g}", "--seed", str(seed)),
    )
    with starting(command, 0, folder / "replay.log") as client:
        yield client


def steady(server: Server, client: Server, cluster: Emulated) -> str:
    """Wait until the load is; returns the URL of what counts the steps."""

    def warm() -> bool:
        assert client.alive, client.log_tail()
        groups = parse_metrics(server.get("/metrics").text)
        steps = sum(totals.steps for pools in groups.values() for totals in pools.values())
        return steps >= cluster.warm_steps

    wait_until(warm, 60, "the load is steady")
    return server.url


def diagnose(folder: Path, *flags: str) -> tuple[dict[str, Any], str]:
    """The command's report, and what it printed."""
    file = folder / "diagnosis.json"
    done = subprocess.run(
        [sys.executable, "-m", "router.cli", "diagnose", "--json", str(file), *flags],
        check=False,
        timeout=300,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(file.read_text())
    return report, done.stdout


def diagnosed(
    folder: Path, cluster: Emulated, seconds: float, *flags: str, seed: int = 0
) -> tuple[dict[str, Any], str]:
    """A fresh fleet behind a router with these flags, listened to for so many wall seconds."""
    with (
        running_fleet(folder, *cluster.fleet_flags()) as fleet,
        under_load(folder, fleet, cluster, *flags, seed=seed) as admin,
    ):
        return listen(folder, admin, cluster, seconds)


def listen(
    folder: Path, admin: str, cluster: Emulated, seconds: float, *flags: str
) -> tuple[dict[str, Any], str]:
    """What it says of the router whose admin port this is."""
    scale = f"{cluster.time_scale:g}"
    return diagnose(
        folder, "--url", admin, "--seconds", f"{seconds:g}", "--time-scale", scale, *flags
    )
