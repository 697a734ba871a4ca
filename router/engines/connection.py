"""A connection to an engine: one request after another, their answers framed by httptools."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import cast

import httptools

from router.errors import UpstreamError

Sink = Callable[[bytes], None]

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


class Connection(asyncio.Protocol):
    """One connection to an engine; serves one request at a time.

    Args:
        idle: where it is put while it has no request.

    Attributes:
        heard: bytes have come since this was taken back.
        status: of the answer, 0 until its head is there.
        headers: of the answer, as sent.
    """

    __slots__ = (
        *("_buffered_bytes", "_chunks", "_done", "_error", "_framed", "_head_bytes", "_idle"),
        *("_parser", "_paused", "_refused", "_reusable", "_sink", "_transport", "_waiter"),
        *("headers", "heard", "status"),
    )

    def __init__(self, idle: list[Connection]) -> None:
        self._idle = idle
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._chunks: list[bytes] = []
        self._buffered_bytes = self._head_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Sink | None = None
        self._error: UpstreamError | None = None
        self._refused: Exception | None = None
        self._framed = False
        self._done = True
        self._reusable = self._paused = False
        self.heard = False
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self._transport = cast(asyncio.Transport, transport)
        own = transport.get_extra_info("socket")
        for option in _SOCKET_OPTIONS if own.family != socket.AF_UNIX else ():
            own.setsockopt(*option)

    def data_received(self, data: bytes) -> None:
        """See asyncio; who waits is woken once for all that a read has brought."""
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
        elif self._sink is not None:
            self._deliver()
        else:
            self._buffered_bytes += len(data)
            if self._buffered_bytes > _HIGH_WATER_BYTES:
                self.pause()
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        if self in self._idle:
            self._idle.remove(self)
        if self._done:
            return
        ended = exc is None and self._error is None
        if ended and self.status and not self._framed:
            self.on_message_complete()  # a body without a length ends with the connection
            self._wake()
        else:
            self._fail("the engine closed the connection before its answer was complete")

    # httptools' callbacks

    def on_message_begin(self) -> None:
        """See httptools."""
        if self._done:
            raise UpstreamError("the engine sent a second answer to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools."""
        if self.status:
            return  # a trailer
        self.headers.append((name, value))
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        """See httptools."""
        status = self._parser.get_status_code()
        if status < 200:
            self.headers.clear()
            self._framed = False
            return
        self.status = status

    def on_body(self, data: bytes) -> None:
        """See httptools."""
        self._chunks.append(data)

    def on_message_complete(self) -> None:
        """See httptools."""
        if self.status:
            self._done = True
            # The parser knows it only in this callback.
            self._reusable = self._framed and self._parser.should_keep_alive()

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
        self._error = self._refused = None
        self._framed = self._done = False
        self._head_bytes = 0
        self._reusable = self.heard = False
        self._transport.write(message)

    def take_heard(self) -> bool:
        """See ``Response``."""
        heard, self.heard = self.heard or self._paused or bool(self._chunks), False
        return heard

    async def ask(self, message: bytes) -> None:
        """Send a request, and wait for status and headers of its answer."""
        self.send(message)
        try:
            while not self.status:
                await self._news()
        except BaseException:
            self.abort()
            raise

    async def chunk(self) -> bytes | None:
        """Wait for body bytes, all that have arrived; None at the end."""
        while not self._chunks:
            if self._done:
                return None
            await self._news()
        chunk, self._buffered_bytes = self._taken(), 0
        self.resume()
        return chunk

    async def pour(self, sink: Sink) -> None:
        """Have the body handed to a sink as it comes, what a read has brought at once."""
        self._sink = sink
        if self._paused:
            self.resume()  # too much had come before somebody took it
        try:
            if self._chunks:
                sink(self._taken())
            while not self._done:
                await self._news()
            if self._refused is not None:
                raise self._refused
        finally:
            self._sink = None

    def divert(self, sink: Sink) -> None:
        """See ``Response``."""
        self._sink = sink

    def pause(self) -> None:
        """Read no more for now."""
        self._paused = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        self._paused = False
        if self._transport is not None:
            self._transport.resume_reading()

    def release(self) -> None:
        """Keep the connection for the next request if its answer was read whole, else abort it."""
        if self._reusable and not self._chunks and not self.closing:
            self.resume()
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

    def _taken(self) -> bytes:
        chunks, self._chunks = self._chunks, []
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _deliver(self) -> None:
        assert self._sink is not None
        try:
            if self._chunks:
                self._sink(self._taken())
        except Exception as error:  # noqa: BLE001 - whoever pours is told
            self._refused, self._done = error, True
            self.abort()
        if self._done:
            self._wake()

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
