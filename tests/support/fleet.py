"""An emulated fleet as a process of its own, with its fault port."""

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.support.server import Server, free_port, running, wait_until

_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """Emulated workers.

    Attributes:
        server: the process; answers as the first worker.
        control_url: the fault port.
        workers: specs for ``evenstep serve --worker``.
    """

    server: Server
    control_url: str
    workers: tuple[str, ...]

    def fault(self, rank: int, kind: str, **parameters: Any) -> None:
        """Let one worker misbehave."""
        answer = httpx.post(
            f"{self.control_url}/workers/{rank}/fault",
            json={"kind": kind, **parameters},
            timeout=_WAIT_S,
        )
        assert answer.is_success, answer.text

    def slow_down(self, factor: float) -> None:
        """Let steps of all workers take so many times as long: what runs does not end meanwhile."""
        for rank in range(len(self.workers)):
            self.fault(rank, "slow", factor=factor)

    def restore(self, *ranks: int) -> None:
        """Let these behave again, by default all."""
        for rank in ranks or range(len(self.workers)):
            url = f"{self.control_url}/workers/{rank}/restore"
            assert httpx.post(url, timeout=_WAIT_S).is_success

    def state(self) -> dict[str, Any]:
        """What the fleet says of itself."""
        state: dict[str, Any] = httpx.get(f"{self.control_url}/fleet", timeout=_WAIT_S).json()
        return state

    def unfinished(self) -> int:
        """Engine requests that run or wait in any worker."""
        return sum(worker["running"] + worker["waiting"] for worker in self.state()["workers"])


@contextlib.contextmanager
def running_fleet(folder: Path, *flags: str, program: str = "router.cli") -> Iterator[Fleet]:
    """Run ``emulate`` of a program with these flags until the block ends."""
    port = free_port(64)
    started = folder / f"fleet-{port}.json"
    command = [sys.executable, "-m", program, "emulate", "--port", str(port)]
    command += ["--json", str(started), *flags]
    with running(command, port, folder / f"fleet-{port}.log") as server:
        # It answers a moment before it has written.
        wait_until(started.exists, _WAIT_S, "the fleet has said what runs")
        said = json.loads(started.read_text())
        workers = tuple(worker["spec"] for worker in said["workers"])
        yield Fleet(server, said["control"], workers)


def worker_flags(fleet: Fleet) -> list[str]:
    """``--worker`` once for each worker."""
    return [part for spec in fleet.workers for part in ("--worker", spec)]
