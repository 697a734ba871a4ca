"""Servers that tests start: a process group each, a log file, and an end that always comes."""

import contextlib
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

# Below the ports that the demo and `make up` choose from, and those of outgoing connections.
_BLOCKS = [range(first, first + 1000) for first in range(6_000, 18_000, 1000)]
# The server gets SIGTERM when the tests are gone, even if they were killed. A `preexec_fn` would
# fork the tests' process, whose gRPC threads can hang the child.
_ENDS_WITH_PARENT = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []


@dataclass(frozen=True, slots=True)
class Server:
    """A running server.

    Attributes:
        process: leads a process group of its own.
        log: what the group has written to stdout and stderr.
    """

    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60)

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def kill(self) -> None:
        """End the server at once, as a crash would; ``stop`` ends what it leaves behind."""
        self.process.kill()
        self.process.wait(timeout=10)

    def stop(self, grace_s: float = 20.0) -> None:
        """Ask the whole group to end; kill what is left of it after ``grace_s``."""
        self._signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: not self._group_alive(), grace_s, "the group ends")
        self._signal(signal.SIGKILL)
        self.process.wait(timeout=10)

    def _signal(self, number: int) -> bool:
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return False
        return True

    def _group_alive(self) -> bool:
        self.process.poll()
        return self._signal(0)


@contextlib.contextmanager
def running(
    command: list[str],
    port: int,
    log: Path,
    environment: Mapping[str, str] | None = None,
    ready_s: float = 60.0,
    ready: str = "/health",
) -> Iterator[Server]:
    """Run a server until the block ends.

    Args:
        command: starts it on ``port``.
        port: of 127.0.0.1, free so far.
        log: file for its output.
        environment: added to the present one.
        ready_s: how long ``ready`` may take to answer 200.
        ready: path that does so when the server is.
    """
    with starting(command, port, log, environment) as server:
        wait_ready(server, ready_s, ready)
        yield server


@contextlib.contextmanager
def starting(
    command: list[str], port: int, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """As ``running``; whether the server is ready is left to ``wait_ready``."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*_ENDS_WITH_PARENT, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    server = Server(port, process, log)
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def running_router(folder: Path, *flags: str, name: str = "serve") -> Iterator[Server]:
    """Run ``evenstep serve``, or ``pick``, with these flags, on a free port."""
    port = free_port()
    command = [sys.executable, "-m", "router.cli", name, "--port", str(port), *flags]
    # At its very first start it compiles the solver.
    with running(command, port, folder / f"router-{port}.log", ready_s=180.0) as server:
        yield server


def free_port(count: int = 1) -> int:
    """A port of 127.0.0.1 that nothing listens on: the first of so many in a row.

    A rank's state stream takes two.
    """
    global _handed_out
    ports = _own_ports()[1]
    # In turn: one that is handed out, but not listened on yet, comes again after all others.
    for _ in ports:
        at = _handed_out if _handed_out + count <= len(ports) else 0
        _handed_out = at + count
        if all(map(_is_free, ports[at : at + count])):
            return ports[at]
    raise RuntimeError(f"no {count} free ports in a row in {ports}")


_handed_out = 0


@functools.cache
def _own_ports() -> tuple[socket.socket, range]:
    """Ports that no other process of tests takes, not even those of a server that is down.

    A socket on the first port of a block says whose the others are.
    """
    for block in _BLOCKS:
        guard = socket.socket()
        try:
            guard.bind(("127.0.0.1", block[0]))
        except OSError:
            guard.close()
        else:
            return guard, block[1:]
    raise RuntimeError(f"{len(_BLOCKS)} other processes run tests")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Look again and again, for ``timeout_s`` at most.

    Raises:
        TimeoutError: the condition has not come true; the message says ``what`` was awaited.
    """
    end_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(f"waited {timeout_s:.0f} s in vain: {what}")
        time.sleep(0.05)


def wait_ready(server: Server, timeout_s: float, path: str = "/health") -> None:
    """Wait until a server answers 200 to ``path``.

    Raises:
        TimeoutError: it did not in ``timeout_s``.
        RuntimeError: it has ended, or another process has its port.
    """

    def settled() -> bool:
        return not server.alive or _healthy(server, path)

    try:
        wait_until(settled, timeout_s, server.url + path)
    except TimeoutError as error:
        raise TimeoutError(f"{error}\n{server.log_tail()}") from None
    if not server.alive:
        status = server.process.returncode
        raise RuntimeError(f"the server ended with status {status}\n{server.log_tail()}")
    if not _owns_port(server):
        raise RuntimeError(f"another process answers on port {server.port}")


def _healthy(server: Server, path: str) -> bool:
    try:
        return server.get(path).status_code == 200
    except httpx.TransportError:
        return False


def _owns_port(server: Server) -> bool:
    """Whether the listening socket is open in the very process that was started."""
    wanted = {f"socket:[{inode}]" for inode in _listening(server.port)}
    return not wanted.isdisjoint(_open_files(server.process.pid))


def _open_files(pid: int) -> Iterator[str]:
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            yield str(link.readlink())


def _listening(port: int) -> Iterator[str]:
    """Inodes of the sockets that listen on a port."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]
