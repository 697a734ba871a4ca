"""Sockets that systemd has opened: they are served, and outlive the router."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.support.chaos import body
from tests.support.fleet import running_fleet, worker_flags

# Becomes the router, with the files that it is given as the third and those that follow.
_ACTIVATE = """
import os, sys
count = int(sys.argv[1])
given = [os.dup2(int(fd), 100 + place) for place, fd in enumerate(sys.argv[2 : 2 + count])]
for place, fd in enumerate(given):
    os.dup2(fd, 3 + place)
os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(sys.executable, [sys.executable, "-m", "router.cli", "serve", *sys.argv[2 + count :]])
"""


@contextlib.contextmanager
def activated(
    listeners: Mapping[str, socket.socket], log: Path, *flags: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A router that gets these sockets by their names; it has ended when the block does."""
    fds = [listener.fileno() for listener in listeners.values()]
    given = {"LISTEN_FDS": str(len(fds)), "LISTEN_FDNAMES": ":".join(listeners)}
    given["NOTIFY_SOCKET"] = str(log.with_suffix(".notify"))
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", _ACTIVATE, str(len(fds)), *map(str, fds), *flags],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **given},
            pass_fds=fds,
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def url(listener: socket.socket, path: str) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}{path}"


def complete(listener: socket.socket) -> int:
    answer = httpx.post(
        url(listener, "/v1/completions"), content=body(3), timeout=120, trust_env=False
    )
    return answer.status_code


def refused(log: Path, listeners: Mapping[str, socket.socket], *flags: str) -> tuple[int, str]:
    with activated(listeners, log, *flags) as process:
        return process.wait(timeout=60), log.read_text()


def test_connections_wait_while_the_router_is_restarted(tmp_path: Path) -> None:
    with (
        running_fleet(tmp_path, "--slots", "4") as fleet,
        socket.create_server(("127.0.0.1", 0)) as http,
        socket.create_server(("127.0.0.1", 0)) as admin,
        ThreadPoolExecutor() as threads,
    ):
        flags = ("--policy", "least_tokens", *worker_flags(fleet))
        listeners = {"http": http, "admin": admin}
        early = threads.submit(complete, http)
        with activated(listeners, tmp_path / "one.log", *flags) as router:
            assert early.result() == 200
            page = httpx.get(url(admin, "/"), timeout=60, trust_env=False)
            assert (page.status_code, page.headers["content-type"][:9]) == (200, "text/html")
        assert router.returncode == 0
        early = threads.submit(complete, http)
        with activated(listeners, tmp_path / "two.log", *flags):
            assert early.result() == 200


def test_systemd_is_told_how_the_service_does(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as http,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told,
    ):
        told.bind(str(tmp_path / "router.notify"))
        told.settimeout(120)
        flags = ("--policy", "least_tokens", "--worker", "http://127.0.0.1:9")
        with activated({"http": http}, tmp_path / "router.log", *flags) as router:
            assert told.recv(100) == b"READY=1"
            router.send_signal(signal.SIGHUP)
            assert [told.recv(100) for _ in range(2)] == [b"RELOADING=1", b"READY=1"]
        assert told.recv(100) == b"STOPPING=1"
        assert router.returncode == 0


def test_sockets_that_cannot_be_used_are_said_in_one_line(tmp_path: Path) -> None:
    flags: Sequence[str] = ("--worker", "http://127.0.0.1:9")
    with (
        socket.create_server(("127.0.0.1", 0)) as http,
        socket.socket() as silent,
        socket.create_server(("", 0)) as other,
    ):
        code, said = refused(tmp_path / "one", {"http": http, "metrics": other}, *flags)
        assert (code, said.count("\n")) == (2, 1)
        assert "sockets called http:metrics: give each its own FileDescriptorName=" in said
        code, said = refused(tmp_path / "two", {"http": silent}, *flags)
        assert (code, said.count("\n")) == (2, 1)
        assert "systemd's socket http does not listen on a TCP port" in said
        code, said = refused(tmp_path / "three", {"http": http, "admin": other}, *flags)
        assert (code, said.count("\n")) == (2, 1)
        assert "0.0.0.0 can be reached from other machines, and no keys guard the admin" in said
