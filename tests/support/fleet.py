"""An emulated fleet as a process of its own, with its fault port."""

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.support.server import Server, free_port, running


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
            f"{self.control_url}/workers/{rank}/fault", json={"kind": kind, **parameters}
        )
        assert answer.is_success, answer.text

    def restore(self, rank: int) -> None:
        """Let it behave again."""
        assert httpx.post(f"{self.control_url}/workers/{rank}/restore").is_success

    def state(self) -> dict[str, Any]:
        """What the fleet says of itself."""
        state: dict[str, Any] = httpx.get(f"{self.control_url}/fleet").json()
        return state

    def unfinished(self) -> int:
        """Engine requests that run or wait in any worker."""
        return sum(worker["running"] + worker["waiting"] for worker in self.state()["workers"])


@contextlib.contextmanager
def running_fleet(folder: Path, *flags: str) -> Iterator[Fleet]:
    """Run ``evenstep emulate`` with these flags until the block ends."""
    port = free_port(64)
    started = folder / f"fleet-{port}.json"
    command = [sys.executable, "-m", "router.cli", "emulate", "--port", str(port)]
    command += ["--json", str(started), *flags]
    with running(command, port, folder / f"fleet-{port}.log") as server:
        deadline_s = time.monotonic() + 60
        while not started.exists() and time.monotonic() < deadline_s:
            time.sleep(0.01)  # it answers a moment before it has written
        said = json.loads(started.read_text())
        workers = tuple(worker["spec"] for worker in said["workers"])
        yield Fleet(server, said["control"], workers)


def worker_flags(fleet: Fleet) -> list[str]:
    """``--worker`` once for each worker."""
    return [part for spec in fleet.workers for part in ("--worker", spec)]
