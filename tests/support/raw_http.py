"""Bytes to a real router over a real socket, with an emulated worker behind that counts."""

import contextlib
import json
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httptools

from tests.support.fleet import running_fleet, worker_flags
from tests.support.sent import read_sent
from tests.support.server import Server, free_port, running_router, wait_until

TIMEOUT_S = 60.0

BODY = json.dumps({"model": "emulated", "prompt": [1, 2, 3], "max_tokens": 1}).encode()
LINE = b"POST /v1/completions HTTP/1.1"
HOST = b"Host: localhost"
LENGTH = b"Content-Length: %d" % len(BODY)


def message(*fields: bytes, line: bytes = LINE, body: bytes = b"") -> bytes:
    """A request of this line, these header fields and this body, as they are."""
    return b"\r\n".join([line, *fields, b"", body])


def chunked(body: bytes) -> bytes:
    """A completion request whose body is in chunks: these bytes, as they are."""
    return message(HOST, b"Transfer-Encoding: chunked", body=body)


VALID = message(HOST, LENGTH, body=BODY)
LAST = message(HOST, LENGTH, b"Connection: close", body=BODY)


@dataclass(slots=True)
class Reply:
    """One answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> Any:
        return json.loads(self.body)["error"]


@dataclass(slots=True)
class _Reader:
    """httptools' callbacks: collects whole answers."""

    replies: list[Reply] = field(default_factory=list)
    parser: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def on_message_begin(self) -> None:
        self.headers, self.body = {}, b""

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode().lower()] = value.decode()

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.replies.append(Reply(self.parser.get_status_code(), self.headers, self.body))


def replies_in(received: bytes) -> list[Reply]:
    """The answers that these bytes are, with nothing between or behind them."""
    reader = _Reader()
    reader.parser = httptools.HttpResponseParser(reader)
    reader.parser.feed_data(received)
    assert len(re.findall(rb"HTTP/1.1 \d", received)) == len(reader.replies), received
    return reader.replies


def connect(port: int) -> socket.socket:
    """A connection to a port of this machine."""
    return socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)


def exchange(port: int, *parts: bytes) -> bytes:
    """Send these, one write each, and read to the end of the connection."""
    with connect(port) as sock:
        # Who is refused early may find that the other side listens no more.
        with contextlib.suppress(ConnectionError):
            for part in parts:
                sock.sendall(part)
        return read_all(sock)


def read_all(sock: socket.socket) -> bytes:
    """Read to the end of the connection, however it is ended."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(65_536):
            received += data
    return received


@dataclass(slots=True)
class Front:
    """A router before one worker with one slot, so that it answers in the order of arrival."""

    router: Server
    admin: int
    answers: Path
    asked: int = 0

    @property
    def port(self) -> int:
        return self.router.port

    def forwarded(self) -> int:
        """Requests that have reached the worker since it was last asked.

        A request of the test's own goes last: what went to the worker before it has ended before.
        """
        name = f"probe-{self.asked}"
        fields = (HOST, LENGTH, b"Connection: close", b"X-Request-Id: " + name.encode())
        (probe,) = replies_in(exchange(self.port, message(*fields, body=BODY)))
        assert probe.status == 200, probe
        wait_until(lambda: self._seen(name), TIMEOUT_S, "the worker has noted the probe")
        before, self.asked = self.asked, len(read_sent(self.answers))
        return self.asked - before - 1

    def _seen(self, name: str) -> bool:
        return any(sent.request.endswith(name) for sent in read_sent(self.answers))


@contextlib.contextmanager
def fronted(folder: Path, *flags: str) -> Iterator[Front]:
    """Run a router with these flags before an emulated worker until the block ends."""
    admin, answers = free_port(), folder / "answers.jsonl"
    # Answers are short, also those to requests that do not say how long.
    emulated = ("--workers=1", "--slots=1", "--step-time=1e-3,0", "--max-model-len=100")
    with (
        running_fleet(folder, *emulated, "--answers", str(answers)) as fleet,
        running_router(
            folder,
            *("--policy", "fcfs", "--admin-port", str(admin), *flags),
            *worker_flags(fleet),
        ) as router,
    ):
        wait_until(lambda: router.get("/v1/models").json()["data"] != [], TIMEOUT_S, "the model")
        yield Front(router, admin, answers)


def connections_of(router: Server) -> int:
    """Connections that a server holds on its port, as the kernel counts them."""
    found = 0
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            local, state = re.split(r"\s+", line.strip())[1::2][:2]
            found += int(local.rpartition(":")[2], 16) == router.port and state == "01"
    return found
