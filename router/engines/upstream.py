"""A small streaming HTTP/1.1 client: keep-alive pools per engine, framing by httptools.

Bodies are handed on as they arrive, unparsed. It exists because httpx as a streaming upstream costs
several times as much per token; the control plane uses httpx.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from typing import cast
from urllib.parse import SplitResult, urlsplit

import httptools

from router.errors import UpstreamError

Headers = Sequence[tuple[bytes, bytes]]

_HIGH_WATER_BYTES = 256 * 1024
_MOST_HEAD_BYTES = 256 * 1024
# An engine's machine that vanished without closing its connections is noticed after 25 s, whether
# it owes an answer (idle time, interval and number of probes) or has not acknowledged a request.
_SOCKET_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 25_000),
)


class _Connection(asyncio.Protocol):
    """One connection to an engine; serves one request at a time."""

    def __init__(self, idle: list[_Connection]) -> None:
        self._idle = idle
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._chunks: list[bytes] = []
        self._buffered_bytes = self._head_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._error: UpstreamError | None = None
        self._framed = False
        self._done = True
        self._reusable = False
        self.heard = False
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        for option in _SOCKET_OPTIONS:
            transport.get_extra_info("socket").setsockopt(*option)

    def data_received(self, data: bytes) -> None:
        if self._done:
            self.abort()  # nobody asked: whatever this is, the next answer would not be in step
            return
        self.heard = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"the engine's answer is not HTTP: {error}")
        if not self.status:
            self._head_bytes += len(data)
            if self._head_bytes > _MOST_HEAD_BYTES:
                self._fail("the engine's answer has a head without an end")

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self._idle:
            self._idle.remove(self)
        if self._done:
            return
        if exc is None and self.status and not self._framed:
            self.on_message_complete()  # a body without a length ends with the connection
        else:
            self._fail("the engine closed the connection before its answer was complete")

    # httptools' callbacks

    def on_message_begin(self) -> None:
        if self._done:
            raise UpstreamError("the engine sent a second answer to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.status:
            return  # a trailer
        self.headers.append((name, value))
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self.headers.clear()
            self._framed = False
            return
        self.status = status
        self._wake()

    def on_body(self, data: bytes) -> None:
        self._chunks.append(data)
        self._buffered_bytes += len(data)
        if self._buffered_bytes > _HIGH_WATER_BYTES and self._transport is not None:
            self._transport.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        if self.status:
            self._done = True
            # The parser knows it only in this callback.
            self._reusable = self._framed and self._parser.should_keep_alive()
            self._wake()

    # one request

    @property
    def closing(self) -> bool:
        """No further request can be sent on it."""
        return self._transport is None or self._transport.is_closing()

    def send(self, message: bytes) -> None:
        """Start a request."""
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._chunks, self._buffered_bytes = [], 0
        self.headers, self.status = [], 0
        self._error, self._framed, self._done = None, False, False
        self._head_bytes = 0
        self._reusable = self.heard = False
        self._transport.write(message)

    def take_heard(self) -> bool:
        """See ``Response``."""
        heard, self.heard = self.heard or bool(self._chunks), False
        return heard

    async def head(self) -> None:
        """Wait for status and headers."""
        while not self.status:
            await self._news()

    async def chunk(self) -> bytes | None:
        """Wait for body bytes, all that have arrived; None at the end."""
        while not self._chunks:
            if self._done:
                return None
            await self._news()
        chunks, self._chunks, self._buffered_bytes = self._chunks, [], 0
        if self._transport is not None:
            self._transport.resume_reading()
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def release(self) -> None:
        """Keep the connection for the next request if its answer was read whole, else abort it."""
        if self._reusable and not self._chunks and not self.closing:
            self._idle.append(self)
        else:
            self.abort()

    def abort(self) -> None:
        """Close at once: the engine stops generating."""
        self._done = True
        if self._transport is not None:
            self._transport.abort()

    def break_off(self, error: UpstreamError) -> None:
        """End the answer that is being read, and the request with it, by this error."""
        self._error = self._error or error
        self._wake()
        if self._transport is not None:
            self._transport.abort()

    async def _news(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, message: str) -> None:
        self.break_off(UpstreamError(message))


class Response:
    """An engine's answer; iterate for its body, and close it in any case.

    Attributes:
        status: HTTP status.
        headers: as sent, names in the engine's spelling.
    """

    def __init__(self, connection: _Connection) -> None:
        self._connection: _Connection | None = connection
        self.status = connection.status
        self.headers = list(connection.headers)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Body bytes as they arrive, transfer encoding removed.

        Raises:
            UpstreamError: the answer broke off.
        """
        while self._connection is not None:
            chunk = await self._connection.chunk()
            if chunk is None:
                self.close()
                return
            yield chunk

    async def read(self) -> bytes:
        """The whole body.

        Raises:
            UpstreamError: the answer broke off.
        """
        return b"".join([chunk async for chunk in self])

    def take_heard(self) -> bool:
        """Whether bytes have come since this was asked before, or wait to be read."""
        connection = self._connection
        return connection is None or connection.take_heard()

    def break_off(self, error: UpstreamError) -> None:
        """Whoever reads the body gets this error instead of what has not come yet."""
        if self._connection is not None:
            self._connection.break_off(error)

    def close(self) -> None:
        """Give the connection back; before the end of the body this aborts the request."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.release()


class HttpClient:
    """Connections to any number of engines.

    Args:
        connect_timeout_s: bound on opening a connection.
        key: the engines' API key; None: they ask for none.
    """

    def __init__(self, connect_timeout_s: float = 2.0, key: str | None = None) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._credentials = bearer(key)
        self._idle: defaultdict[str, list[_Connection]] = defaultdict(list)

    async def request(
        self, method: str, url: str, path: str, headers: Headers = (), body: bytes = b""
    ) -> Response:
        """Send a request and wait for the head of its answer.

        Args:
            method: HTTP method.
            url: base URL of the engine.
            path: target below it, with query.
            headers: without Host and Content-Length, which are set here.
            body: sent whole.

        Raises:
            UpstreamError: no connection, or no answer on it.
        """
        target = urlsplit(url)
        message = _encode(method, target, path, (*headers, *self._credentials), body)
        connection = self._reuse(url)
        if connection is not None:
            try:
                return await self._exchange(connection, message)
            except UpstreamError:
                if connection.heard:
                    raise  # else it was closed while idle: the request was never read
        return await self._exchange(await self._connect(url, target), message)

    async def aclose(self) -> None:
        """Close the idle connections."""
        for connections in self._idle.values():
            for connection in list(connections):
                connection.abort()
        self._idle.clear()

    def _reuse(self, url: str) -> _Connection | None:
        idle = self._idle[url]
        while idle:
            connection = idle.pop()
            if not connection.closing:
                return connection
        return None

    async def _connect(self, url: str, target: SplitResult) -> _Connection:
        secure = target.scheme == "https"
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self._idle[url]),
                    target.hostname or "",
                    target.port or (443 if secure else 80),
                    ssl=ssl.create_default_context() if secure else None,
                )
        except (OSError, TimeoutError) as error:
            reason = str(error) or f"no connection within {self._connect_timeout_s:g} s"
            raise UpstreamError(f"cannot connect to {url}: {reason}") from error
        return connection

    async def _exchange(self, connection: _Connection, message: bytes) -> Response:
        connection.send(message)
        try:
            await connection.head()
        except BaseException:
            connection.abort()
            raise
        return Response(connection)


def _encode(method: str, target: SplitResult, path: str, headers: Headers, body: bytes) -> bytes:
    lines = [
        f"{method} {target.path.rstrip('/')}{path} HTTP/1.1".encode("latin-1"),
        b"host: " + target.netloc.rpartition("@")[2].encode("latin-1"),
        *(name + b": " + value for name, value in headers),
        b"content-length: %d" % len(body),
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def bearer(key: str | None) -> Headers:
    """The header that shows a key, none where there is none."""
    return () if key is None else ((b"authorization", f"Bearer {key}".encode("ascii")),)
