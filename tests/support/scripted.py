"""An HTTP server that answers byte for byte as a test says, request by request."""

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

TIMEOUT_S = 60.0

SSE = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"

T = TypeVar("T")


@dataclass(slots=True)
class Exchange:
    """A request that has been read, and the means to answer it.

    Attributes:
        connection: serial number of the connection that it came on.
        target: path and query.
        headers: names in lower case; of several with one name, the last.
    """

    connection: int
    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    ended: asyncio.Event

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    async def send(self, *parts: bytes) -> None:
        """Bytes as they are."""
        self.writer.write(b"".join(parts))
        async with asyncio.timeout(TIMEOUT_S):
            await self.writer.drain()

    async def answer(
        self, body: bytes, status: int = 200, kind: str = "application/json", **headers: str
    ) -> None:
        """A whole answer; underscores in header names stand for dashes."""
        await self.send(head(status, kind, content_length=str(len(body)), **headers), body)
        self.ended.set()

    async def start_stream(self, kind: str = SSE, **headers: str) -> None:
        """The head of a chunked answer."""
        await self.send(head(200, kind, transfer_encoding="chunked", **headers))

    async def chunks(self, *parts: bytes) -> None:
        """One chunk for each part."""
        await self.send(*(b"%x\r\n%b\r\n" % (len(part), part) for part in parts))

    async def end_stream(self) -> None:
        """The terminating chunk."""
        await self.send(b"0\r\n\r\n")
        self.ended.set()

    async def stream(self, *parts: bytes) -> None:
        """A whole chunked answer."""
        await self.start_stream()
        await self.chunks(*parts)
        await self.end_stream()

    def close(self) -> None:
        """Close the connection once what was sent has left."""
        self.writer.close()

    def reset(self) -> None:
        """Cut the connection, as the kernel does for a killed process."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def left(self) -> None:
        """Return once the client has closed the connection.

        Raises:
            AssertionError: it has sent something instead.
        """
        async with asyncio.timeout(TIMEOUT_S):
            with contextlib.suppress(ConnectionError):
                assert await self.reader.read(1) == b""


class ScriptedServer:
    """Requests wait in a queue for the test to answer them.

    Attributes:
        connections: accepted so far.
    """

    def __init__(self) -> None:
        self.connections = 0
        self._requests: asyncio.Queue[Exchange] = asyncio.Queue()
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def idle(self) -> bool:
        """No request waits to be looked at."""
        return self._requests.empty()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def stop(self) -> None:
        """Close everything; later connections are refused."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def next(self) -> Exchange:
        """The next request, once it has come whole."""
        async with asyncio.timeout(TIMEOUT_S):
            return await self._requests.get()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.append(writer)
        serving = self._serve(self.connections, reader, writer)
        self._tasks.add(asyncio.get_running_loop().create_task(serving))

    async def _serve(
        self, connection: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                exchange = await _read(connection, reader, writer)
                self._requests.put_nowait(exchange)
                await exchange.ended.wait()
        writer.close()


@contextlib.asynccontextmanager
async def scripted(count: int = 1) -> AsyncIterator[list[ScriptedServer]]:
    """So many servers, until the block ends."""
    servers = [ScriptedServer() for _ in range(count)]
    try:
        for server in servers:
            await server.start()
        yield servers
    finally:
        for server in servers:
            await server.stop()


def head(status: int, kind: str, **headers: str) -> bytes:
    """Status line and headers; underscores in names stand for dashes."""
    fields = {"content-type": kind} | {k.replace("_", "-"): v for k, v in headers.items()}
    lines = [f"HTTP/1.1 {status} Scripted", *(f"{k}: {v}" for k, v in fields.items())]
    return "\r\n".join([*lines, "\r\n"]).encode()


def event(value: Any) -> bytes:
    """A server-sent event as vLLM writes it."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def token_events(count: int) -> list[bytes]:
    """One event per output token."""
    return [event({"choices": [{"index": 0, "text": f" {i}"}]}) for i in range(count)]


async def soon(awaitable: Awaitable[T]) -> T:
    """Wait, but not for ever."""
    async with asyncio.timeout(TIMEOUT_S):
        return await awaitable


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop go on until something is so, but not for ever."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 - what is awaited tells nobody of it
            await asyncio.sleep(0.001)


async def _read(
    connection: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> Exchange:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, target, _ = lines[0].split(" ", 2)
    headers = _headers(lines[1:-2])
    if headers.get("transfer-encoding") == "chunked":
        body = await _read_chunks(reader)
    else:
        body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Exchange(
        connection, method, target, headers, body, reader, writer, ended=asyncio.Event()
    )


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body, size = b"", -1
    while size:
        size = int(await reader.readuntil(b"\r\n"), 16)
        body += (await reader.readexactly(size + 2))[:-2]
    return body


def _headers(lines: Iterable[str]) -> dict[str, str]:
    pairs = (line.partition(":") for line in lines)
    return {name.lower(): value.strip() for name, _, value in pairs}
