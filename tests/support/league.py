"""An entrant of the league that needs no other product: evenstep by its defaults."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import httpx

from loadgen.run.child_processes import Child, free_ports
from tests.bench.league.entrant import Engines, Entrant, Running
from tests.support.router_bench.targets import processes

READY_S = 120.0


@contextlib.contextmanager
def _start(engines: Engines, folder: Path) -> Iterator[Running]:
    port = free_ports(1)
    url = f"http://127.0.0.1:{port}"

    def up() -> bool | None:
        try:
            health = httpx.get(f"{url}/health", timeout=5.0, trust_env=False).json()
        except httpx.TransportError:
            return None
        heard = [
            worker["up"] and worker["snapshots"] in ("fresh", "none")
            for group in health["groups"].values()
            for worker in group["workers"]
        ]
        return True if len(heard) == len(engines.urls) and all(heard) else None

    before = set(processes(os.getpid()))
    workers = (word for worker in engines.workers for word in ("--worker", worker))
    serve = ["serve", "--port", str(port), "--log-level", "warning", *workers]
    with Child(serve, folder / "router.log") as child:
        child.until(up, READY_S)
        pids = [pid for pid in processes(os.getpid()) if pid not in before]
        yield Running(url, lambda: pids)


EVENSTEP = Entrant("evenstep", "evenstep", "", "assigns waiting requests by loads", _start)
