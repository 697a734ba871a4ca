"""What one request, signal or message costs a router: its slowest /health, and its memory.

A server's processes are all those of its group, however many there are. Linux keeps the highest
memory that each has had; it is set back before.
"""

import contextlib
import http.client
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.support.server import Server, free_port, running

MIB = 1024 * 1024
# What /health may take, and a request's memory beside twice its bytes.
HEALTH_S = 0.3
SPARE_BYTES = 16 * MIB
# So long an answer never takes by chance, when what the machine gave to others is not counted.
_HUNG_S = 2.0
# An engine may be held up by what it is sent: then /health says so.
_ANSWERS = frozenset({200, 503})

# Large pieces go back to the kernel when they are freed, so that each request is seen alone.
_FRUGAL = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


@dataclass(slots=True)
class Cost:
    """What something has cost a server.

    Attributes:
        health_s: the longest that /health has taken meanwhile, and after: of time that the server
            computed, unless it hung.
        grown_bytes: by how much its processes' memory together grew at most.
    """

    health_s: float = 0.0
    grown_bytes: int = 0

    def within(self, size: int) -> bool:
        """Whether that is what something of this size may cost."""
        return self.health_s <= HEALTH_S and self.grown_bytes <= 2 * size + SPARE_BYTES


@contextlib.contextmanager
def frugal_router(folder: Path, *flags: str) -> Iterator[Server]:
    """Run ``evenstep serve`` with these flags, its memory being told apart by request."""
    port = free_port()
    command = [sys.executable, "-m", "router.cli", "serve", "--port", str(port), *flags]
    log = folder / f"router-{port}.log"
    with running(command, port, log, _FRUGAL, ready_s=180.0) as server:
        yield server


class _Engine(BaseHTTPRequestHandler):
    """Reads all that it is sent, and looks at none of it: what a giant costs is the router's."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(b'{"object":"list","data":[{"id":"tiny","object":"model"}]}')

    def do_POST(self) -> None:
        left = int(self.headers["content-length"])
        while left:
            left -= len(self.rfile.read(min(left, MIB)))
        self._answer(b'{"usage":{"prompt_tokens":3,"completion_tokens":1}}')

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@contextlib.contextmanager
def patient_engine() -> Iterator[str]:
    """The URL of an engine that takes everything, of the model ``tiny``."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Engine) as server:
        server.daemon_threads = True
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            serving.join()


@contextlib.contextmanager
def measured(server: Server) -> Iterator[Cost]:
    """Ask for /health without a pause until the block ends, and once more then."""
    cost, ended = Cost(), threading.Event()
    before = {pid: _memory(pid, "VmRSS") for pid in processes(server)}
    for pid in before:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    asking = threading.Thread(target=_ask, args=(server, cost, ended))
    asking.start()
    try:
        yield cost
    finally:
        ended.set()
        asking.join()
    after = {pid: _memory(pid, "VmHWM") for pid in processes(server)}
    cost.grown_bytes = sum(after.values()) - sum(before.values())


def processes(server: Server) -> list[int]:
    """The processes of a server's group."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(ProcessLookupError, ValueError):
            if os.getpgid(int(entry.name)) == server.process.pid:
                found.append(int(entry.name))
    return sorted(found)


def _ask(server: Server, cost: Cost, ended: threading.Event) -> None:
    last = False
    while not last:
        last = ended.is_set()
        begun_s, before = time.monotonic(), _times(server)
        try:
            status = _health(server.port)
        except OSError:
            status = 0
        took_s = held_up_s(time.monotonic() - begun_s, before, _times(server))
        cost.health_s = max(cost.health_s, took_s if status in _ANSWERS else float("inf"))
        ended.wait(0.005)


@dataclass(frozen=True, slots=True)
class Times:
    """Of a process's main thread, in seconds.

    Attributes:
        used_s: it has computed.
        kept_s: it could have, had the machine given it a processor.
    """

    used_s: float = 0.0
    kept_s: float = 0.0


ASKER = "thread-self"
"""Whose name among processes' ids stands for the thread that asks for /health."""


def held_up_s(took_s: float, before: Mapping[str, Times], after: Mapping[str, Times]) -> float:
    """Of the time of an answer, what a server is to blame for.

    A machine that gives it no time holds nobody up: what it computes counts, and all of the time
    only where it hangs, which an event loop does that waits for something else than its clients.

    Args:
        took_s: until the answer came.
        before: times of the server's processes, and of ``ASKER``.
        after: the same.
    """
    grown = {name: (before.get(name, Times()), now) for name, now in after.items()}
    kept = {name: now.kept_s - then.kept_s for name, (then, now) in grown.items()}
    used_s = sum(now.used_s - then.used_s for name, (then, now) in grown.items() if name != ASKER)
    own_s = took_s - kept.pop(ASKER, 0.0) - max(kept.values(), default=0.0)
    return own_s if own_s >= _HUNG_S else min(took_s, used_s)


def _times(server: Server) -> dict[str, Times]:
    return {name: _spent(name) for name in (*map(str, processes(server)), ASKER)}


def _spent(name: str) -> Times:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        used, kept = Path(f"/proc/{name}/schedstat").read_text().split()[:2]
        return Times(int(used) / 1e9, int(kept) / 1e9)
    return Times()


def _health(port: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
        return answer.status


def _memory(pid: int, name: str) -> int:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
