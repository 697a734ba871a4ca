"""Router with its page, emulated fleet and Prometheus as processes here, until Ctrl-C.

    python -m deploy.local.up                    # everything on free ports of 127.0.0.1
    python -m deploy.local.up --port 8000 --policy round_robin

Nothing is installed: states and logs go to a temporary folder. Without a Prometheus, Debian's is
unpacked beside the engine. If that fails, the rest goes on and a message explains how to get it.
"""

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from deploy.prometheus.install import ADVICE, lay
from loadgen.demo.run import EMULATED_POWER
from loadgen.run.child_processes import Child, free_ports, signals_as_interrupts
from router.core.errors import EvenstepError

RULES = Path(__file__).resolve().parents[1] / "prometheus" / "rules.yml"
READY_S = 180.0  # At its very first start the router compiles its solver.


class Stack(contextlib.ExitStack):
    """The processes by name, in the order of their start; they end with the context."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.parts: dict[str, Child] = {}

    def start(
        self, name: str, arguments: Sequence[str], url: str, program: str | None = None
    ) -> None:
        """Start a process and wait until its URL answers; else EvenstepError."""
        child = self.enter_context(Child(arguments, self.folder / f"{name}.log", program))
        self.parts[name] = child
        child.until(lambda: _answers(url) or None, READY_S)


def up(options: argparse.Namespace, stack: Stack) -> None:
    """Start everything and print the URLs; EvenstepError if a part does not run."""
    fleet = start_fleet(options, stack)
    port = options.port or free_ports(1)
    workers = [part for worker in fleet["workers"] for part in ("--worker", worker["spec"])]
    url = f"http://127.0.0.1:{port}"
    page = options.admin_port or free_ports(1)
    ports = ("--port", str(port), "--admin-port", str(page))
    serve = ("serve", *ports, "--policy", options.policy)
    stack.start("router", (*serve, *EMULATED_POWER, *workers), f"{url}/health")
    engines = [worker["url"].removeprefix("http://") for worker in fleet["workers"]]
    prometheus = _start_prometheus(stack, f"127.0.0.1:{port}", engines)
    print(f"router      {url}  (metrics: {url}/metrics)")
    print(f"page        http://127.0.0.1:{page}/")
    print(f"fleet       {len(engines)} emulated workers, fault port {fleet['control']}")
    print(f"prometheus  {prometheus or f'not found: {ADVICE}'}")
    print("dashboards  import dashboards/*.json into a Grafana that reads this Prometheus")
    print(f"logs        {stack.folder}")
    print("\nSend traffic, in another terminal:")
    # More clients than slots, so that requests wait and the policy has a choice.
    print(f"  .venv/bin/evenstep replay --url {url} --arrivals closed:400 --requests 50000")
    print("\nCtrl-C ends everything.", flush=True)


def start_fleet(options: argparse.Namespace, stack: Stack) -> dict[str, Any]:
    """Start emulated workers; what they say of themselves."""
    # Two ports per worker for its stream, one for its HTTP, one for faults.
    port = free_ports(3 * options.workers + 1)
    started = stack.folder / "fleet.json"
    flags = ("--port", str(port), "--workers", str(options.workers), "--json", str(started))
    stack.start("fleet", ("emulate", *flags), f"http://127.0.0.1:{port}/health")
    # The fleet answers a moment before it has written the file.
    stack.parts["fleet"].until(lambda: started.exists() or None, READY_S)
    said: dict[str, Any] = json.loads(started.read_text(encoding="utf-8"))
    return said


def _start_prometheus(stack: Stack, router: str, engines: Sequence[str]) -> str | None:
    """None if there is no Prometheus."""
    program = lay("prometheus")
    if program is None:
        return None
    config = stack.folder / "prometheus.yml"
    targets = {"evenstep": [router], "engines": list(engines)}
    settings = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "5s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": addresses}]}
            for job, addresses in targets.items()
        ],
    }
    config.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
    address = f"127.0.0.1:{free_ports(1)}"
    flags = (f"--config.file={config}", f"--web.listen-address={address}")
    states = f"--storage.tsdb.path={stack.folder / 'prometheus'}"
    stack.start("prometheus", (*flags, states), f"http://{address}/-/ready", program)
    return f"http://{address}"


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2, trust_env=False).is_success
    except httpx.TransportError:
        return False


def _run(start: Callable[[Stack], None], stack: Stack) -> int:
    try:
        start(stack)
        while True:
            time.sleep(0.5)
            for child in stack.parts.values():
                child.check()
    except KeyboardInterrupt:
        print("\nending ...", flush=True)
        return 0
    except EvenstepError as error:
        print(f"up: {error}", file=sys.stderr)
        return 1
    finally:
        # A second Ctrl-C must not leave processes behind.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def main(arguments: Sequence[str]) -> int:
    """Start everything, wait for Ctrl-C or SIGTERM, end everything."""
    parser = argparse.ArgumentParser(
        prog="python -m deploy.local.up", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--workers", type=int, default=4, help="emulated workers [4]")
    parser.add_argument("--policy", default="bfio", help="of the router [bfio]")
    parser.add_argument("--port", type=int, default=0, help="of the router [any free one]")
    parser.add_argument("--admin-port", type=int, default=0, help="of the page [any free one]")
    return run_until_interrupt(partial(up, parser.parse_args(arguments)))


def run_until_interrupt(start: Callable[[Stack], None]) -> int:
    """Start processes, wait for Ctrl-C or SIGTERM, end all; the exit status."""
    with (
        tempfile.TemporaryDirectory(prefix="evenstep-up-", ignore_cleanup_errors=True) as folder,
        signals_as_interrupts(),
        Stack(Path(folder)) as stack,
    ):
        status = _run(start, stack)
    print(f"ended: {', '.join(stack.parts)}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
