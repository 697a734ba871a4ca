"""A thin relay of the bench's own: it asks a chooser, and passes request and answer on.

Peers that choose and do not forward stand behind it. Its own cost is measured, and told at
``GET /relay``: what it adds before a request is sent, without the chooser's answer, and its CPU.
Both are the bench's, not the peer's. It does not retry.

python -m tests.bench.league.relay --port 9000 --engines http://127.0.0.1:8101,http://127.0.0.1:8102
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import json
import sys
import time
import urllib.request
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import cached_property
from itertools import count, cycle
from pathlib import Path
from typing import Any, Protocol, cast

import httptools
import uvloop

from router.core.errors import UpstreamError
from router.engines.http_client import HttpClient, Response
from tests.support.server import Server, free_port, running

ROUND_ROBIN = "tests.bench.league.relay:round_robin"

_OURS = frozenset(
    (b"host", b"connection", b"keep-alive", b"content-length", b"transfer-encoding", b"expect")
)
_EVENT = b"\n\n"


@dataclass
class Asked:
    """A request on its way; times are of ``time.perf_counter``.

    Attributes:
        number: of this relay's requests.
        path: with its query.
        events: of a streamed answer so far: one a token, where engines stream every token.
        tail: the last two pieces of the answer that were read; a streamed one's usage is there.
        own: the chooser's.
    """

    number: int
    path: str
    body: bytes
    arrived_s: float
    worker: int = -1
    sent_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    events: int = 0
    tail: tuple[bytes, bytes] = (b"", b"")
    own: Any = None

    @cached_property
    def fields(self) -> dict[str, Any]:
        """Of the body, if it is a JSON object."""
        try:
            fields = json.loads(self.body)
        except ValueError:
            return {}
        return fields if isinstance(fields, dict) else {}

    @property
    def usage(self) -> dict[str, Any]:
        """What the engine counted, if its answer ended with that."""
        text = b"".join(self.tail)
        start = text.rfind(b'"usage":')
        if start < 0:
            return {}
        told = text[start + len(b'"usage":') :].decode(errors="replace").lstrip()
        with contextlib.suppress(ValueError):
            usage, _ = json.JSONDecoder().raw_decode(told)
            return usage if isinstance(usage, dict) else {}
        return {}


class Chooser(Protocol):
    """Decides, and hears how requests go on."""

    async def choose(self, asked: Asked) -> int:
        """The worker's index; an exception refuses the request with status 503."""

    def on_first_token(self, asked: Asked) -> None:
        """The first bytes of a good answer have been passed on."""

    def on_end(self, asked: Asked, whole: bool) -> None:
        """The request is over: its answer came whole, or not at all, or broke off."""

    def evidence(self) -> Mapping[str, float]:
        """Figures that show which state reached the chooser."""


# Of the engines' URLs and the chooser's settings.
MakeChooser = Callable[[Sequence[str], Mapping[str, Any]], AbstractAsyncContextManager[Chooser]]


class _RoundRobin:
    def __init__(self, workers: int) -> None:
        self._turns = cycle(range(workers))

    async def choose(self, asked: Asked) -> int:
        return next(self._turns)

    def on_first_token(self, asked: Asked) -> None:
        pass

    def on_end(self, asked: Asked, whole: bool) -> None:
        pass

    def evidence(self) -> Mapping[str, float]:
        return {}


@contextlib.asynccontextmanager
async def round_robin(urls: Sequence[str], _: Mapping[str, Any]) -> Any:
    """Engines in turn: what the relay alone costs."""
    yield _RoundRobin(len(urls))


class Costs:
    """What the relay takes itself."""

    def __init__(self) -> None:
        self._own_s, self._chooser_s = array("d"), array("d")
        self._cpu_start_s = time.process_time()
        self.events = 0

    def sent(self, asked: Asked, chooser_s: float) -> None:
        """A request goes out now."""
        asked.sent_s = time.perf_counter()
        self._own_s.append(asked.sent_s - asked.arrived_s - chooser_s)
        self._chooser_s.append(chooser_s)

    def told(self) -> dict[str, float]:
        """CPU includes the chooser's part in this process."""
        figures = {
            "relay_requests": float(len(self._own_s)),
            "relay_events": float(self.events),
            "relay_cpu_s": time.process_time() - self._cpu_start_s,
        }
        for name, values in (("relay_overhead", self._own_s), ("chooser", self._chooser_s)):
            ordered = sorted(values) or [0.0]
            figures[f"{name}_mean_s"] = sum(ordered) / len(ordered)
            figures[f"{name}_p50_s"] = ordered[len(ordered) // 2]
            figures[f"{name}_p99_s"] = ordered[int(len(ordered) * 0.99)]
        return figures


class Relay:
    """Passes requests on to the engines at ``urls``."""

    def __init__(self, urls: Sequence[str], chooser: Chooser) -> None:
        self._urls = urls
        self.chooser = chooser
        self.costs = Costs()
        self.engines = HttpClient()
        self.numbers = count()

    def figures(self) -> dict[str, float]:
        return {**self.costs.told(), **self.chooser.evidence()}

    async def ask(self, asked: Asked, method: str, headers: list[tuple[bytes, bytes]]) -> Response:
        """The head of an engine's answer; the chooser is asked about what is posted."""
        if method == "POST":
            start_s = time.perf_counter()
            asked.worker = await self.chooser.choose(asked)
            chooser_s = time.perf_counter() - start_s
        else:
            asked.worker, chooser_s = 0, 0.0
        connecting = False

        def sent() -> None:
            nonlocal connecting
            if not connecting:
                self.costs.sent(asked, chooser_s)
            connecting = True

        url = self._urls[asked.worker]
        return await self.engines.request(method, url, asked.path, headers, asked.body, sent)


class _ClientConnection(asyncio.Protocol):
    """One connection of a client, for one request after the other."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._response: Response | None = None
        self._task: asyncio.Task[None] | None = None
        self._began_s = 0.0
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        if self._response is not None:
            self._response.pause()

    def resume_writing(self) -> None:
        if self._response is not None:
            self._response.resume()

    # httptools' callbacks

    def on_message_begin(self) -> None:
        self._began_s = time.perf_counter()
        self._url, self._headers, self._body = b"", [], []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() not in _OURS:
            self._headers.append((name, value))

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        if self._task is not None:
            self._abort()  # pipelined: no client of the bench does that
            return
        relay = self._relay
        path, method = self._url.decode(), self._parser.get_method().decode()
        if path == "/health":
            self._answer(200, {})
        elif path == "/relay":
            self._answer(200, relay.figures())
        else:
            asked = Asked(next(relay.numbers), path, b"".join(self._body), self._began_s)
            self._task = asyncio.get_running_loop().create_task(self._serve(asked, method))

    async def _serve(self, asked: Asked, method: str) -> None:
        whole = False
        try:
            self._response = await self._relay.ask(asked, method, self._headers)
            await self._pass(asked, self._response)
            whole = self._response.status == 200
        except UpstreamError as error:
            self._fail(asked, 502, str(error))
        except Exception as error:  # noqa: BLE001 - the chooser's; the client is told
            self._fail(asked, 503, f"{type(error).__name__}: {error}")
        finally:
            if self._response is not None:
                self._response.close()
            self._response = self._task = None
            if asked.worker >= 0 and method == "POST":
                self._relay.costs.events += asked.events
                self._relay.chooser.on_end(asked, whole)

    async def _pass(self, asked: Asked, response: Response) -> None:
        transport, chooser = self._transport, self._relay.chooser
        assert transport is not None
        sized = any(name.lower() == b"content-length" for name, _ in response.headers)
        head = [b"HTTP/1.1 %d -" % response.status]
        head += [
            name + b": " + value
            for name, value in response.headers
            if name.lower() not in _OURS or name.lower() == b"content-length"
        ]
        if not sized:
            head.append(b"transfer-encoding: chunked")
        transport.write(b"\r\n".join([*head, b"", b""]))
        good = response.status == 200

        def piece(data: bytes) -> None:
            transport.write(data if sized else b"%x\r\n%b\r\n" % (len(data), data))
            asked.last_s = time.perf_counter()
            asked.events += data.count(_EVENT)
            asked.tail = asked.tail[1], data
            if good and not asked.first_s:
                asked.first_s = asked.last_s
                chooser.on_first_token(asked)

        await response.pour(piece)
        if not sized:
            transport.write(b"0\r\n\r\n")

    def _fail(self, asked: Asked, status: int, reason: str) -> None:
        print(f"{asked.path}: {reason}", file=sys.stderr, flush=True)
        if self._response is None:
            self._answer(status, {"error": {"message": reason, "code": status}})
        else:
            self._abort()  # the answer has begun: only its end can tell

    def _answer(self, status: int, body: Mapping[str, object]) -> None:
        if self._transport is not None:
            text = json.dumps(body).encode()
            head = b"HTTP/1.1 %d -\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            self._transport.write(head % (status, len(text)) + text)

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


async def listening(relay: Relay, port: int) -> asyncio.Server:
    """Clients are served on a port of this machine; 0: any free one."""
    loop = asyncio.get_running_loop()
    return await loop.create_server(lambda: _ClientConnection(relay), "127.0.0.1", port)


async def serve(port: int, urls: Sequence[str], make: MakeChooser, settings: Any) -> None:
    """Until the task is cancelled."""
    async with (
        make(urls, settings) as chooser,
        await listening(Relay(urls, chooser), port) as server,
    ):
        await server.serve_forever()


@contextlib.contextmanager
def relaying(
    urls: Sequence[str], folder: Path, chooser: str, settings: Mapping[str, object]
) -> Iterator[Server]:
    """A relay in a process of its own, before these engines.

    Args:
        urls: of the engines.
        folder: for its log.
        chooser: ``module:function``, a ``MakeChooser``.
        settings: the chooser's.
    """
    port = free_port()
    command = [sys.executable, "-m", "tests.bench.league.relay", "--port", str(port)]
    command += ["--engines", ",".join(urls), "--chooser", chooser]
    command += ["--settings", json.dumps(settings)]
    with running(command, port, folder / f"relay-{port}.log") as server:
        yield server


def figures_of(url: str) -> dict[str, float]:
    """Of a running relay: what it took itself, and its chooser's evidence."""
    return {name: float(value) for name, value in read_json(f"{url}/relay").items()}


def read_json(url: str) -> Any:
    """Of a server on this machine; httpx would load certificates first."""
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--engines", required=True, help="URLs, with commas")
    parser.add_argument("--chooser", default=ROUND_ROBIN, help="module:function")
    parser.add_argument("--settings", default="{}", help="the chooser's, as JSON")
    given = parser.parse_args()
    module, _, function = given.chooser.partition(":")
    make = getattr(importlib.import_module(module), function)
    engines = given.engines.split(",")
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(given.port, engines, make, json.loads(given.settings)))


if __name__ == "__main__":
    main()
