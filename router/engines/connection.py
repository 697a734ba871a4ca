"""A connection to an engine: one request after another, their answers framed by httptools."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import cast

import httptools

from router.errors import UpstreamError

Sink = Callable[[bytes], None]

_HIGH_WATER_BYTES = 256 * 1024
# More of a request's body is not handed over at once: what the socket does not take is copied.
_PIECE_BYTES = 64 * 1024
# Beyond what servers of the field send: nginx and uvicorn take 32 and 64 KiB themselves.
_MOST_HEAD_BYTES = 64 * 1024
# tcpi_bytes_acked of Linux' struct tcp_info.
_ACKED = struct.Struct("=120xQ")
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
        unread: the engine has closed it, for certain before it read anything of the request.
        status: of the answer, 0 until its head is there.
        headers: of the answer, as sent.
        framed: the head says how long the body is, or that it says where it ends.
    """

    __slots__ = (
        *("_acked", "_buffered_bytes", "_chunks", "_done", "_dry_bytes", "_error", "_head_bytes"),
        *("_idle", "_parser", "_paused", "_refused", "_reusable", "_sink", "_transport"),
        *("_full", "_unsent", "_waiter", "framed", "headers", "heard", "status", "unread"),
    )

    def __init__(self, idle: list[Connection]) -> None:
        self._idle = idle
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._chunks: list[bytes] = []
        self._buffered_bytes = self._head_bytes = self._dry_bytes = 0
        self._acked: int | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Sink | None = None
        self._error: UpstreamError | None = None
        self._refused: Exception | None = None
        self._done = True
        self._unsent = memoryview(b"")
        self._reusable = self._paused = self._full = False
        self.framed = self.heard = self.unread = False
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
        # A head, trailers, what stands between chunks: the parser holds what has not ended.
        self._dry_bytes = 0 if self._chunks else self._dry_bytes + len(data)
        if self._dry_bytes > _MOST_HEAD_BYTES and not self._done:
            self._fail(f"the engine sent more than {_MOST_HEAD_BYTES:,} bytes that are no body")
        if not self.status:
            return
        if self._sink is not None:
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
        self.unread = ended and self._acked is not None and self._acked == self._acknowledged()
        if ended and self.status and not self.framed:
            self.on_message_complete()  # a body without a length ends with the connection
            self._wake()
        else:
            self._fail("the engine closed the connection before its answer was complete")

    def pause_writing(self) -> None:
        """See asyncio."""
        self._full = True

    def resume_writing(self) -> None:
        """See asyncio; the next piece of a large body is sent."""
        self._full = False
        self._send_on()

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
        self._head_bytes += len(name) + len(value) + len(b": \r\n")
        if self._head_bytes > _MOST_HEAD_BYTES:
            self._fail(f"the engine's answer has a head of more than {_MOST_HEAD_BYTES:,} bytes")
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self.framed = True

    def on_headers_complete(self) -> None:
        """See httptools."""
        status = self._parser.get_status_code()
        if status < 200:
            self.headers.clear()
            self.framed = False
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
            self._reusable = self.framed and self._parser.should_keep_alive()

    # one request

    @property
    def closing(self) -> bool:
        """No further request can be sent on it."""
        return self._transport is None or self._transport.is_closing()

    @property
    def fileno(self) -> int:
        """Its file descriptor."""
        assert self._transport is not None
        return int(self._transport.get_extra_info("socket").fileno())

    def send(self, head: bytes, body: bytes) -> None:
        """Start a request."""
        assert self._transport is not None
        self._acked = self._acknowledged() if self.status else None  # if it was used before
        self._parser = httptools.HttpResponseParser(self)
        self._chunks, self._buffered_bytes = [], 0
        self.headers, self.status = [], 0
        self._error = self._refused = None
        self.framed = self._done = self._reusable = self.heard = self.unread = False
        self._head_bytes = self._dry_bytes = 0
        if len(body) > _PIECE_BYTES:
            self._transport.write(head)
            self._unsent = memoryview(body)
            self._send_on()
        else:
            self._transport.write(head + body)

    def take_heard(self) -> bool:
        """See ``Response``."""
        heard, self.heard = self.heard or self._paused or bool(self._chunks), False
        return heard

    async def ask(self, head: bytes, body: bytes) -> None:
        """Send a request, and wait for status and headers of its answer."""
        self.send(head, body)
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
        if self._reusable and not (self._chunks or self._unsent or self.closing):
            self.resume()
            self._idle.append(self)
        else:
            self.abort()

    def abort(self) -> None:
        """Close at once: the engine stops generating."""
        self._done = True
        self._unsent = memoryview(b"")
        if self._transport is not None:
            self._transport.abort()

    def break_off(self, error: UpstreamError) -> None:
        """End the answer that is being read, and the request with it, by this error."""
        self._error = self._error or error
        self._wake()
        if self._transport is not None:
            self._transport.abort()

    def _send_on(self) -> None:
        while self._unsent and not self._full and not self.closing:
            assert self._transport is not None
            piece, self._unsent = self._unsent[:_PIECE_BYTES], self._unsent[_PIECE_BYTES:]
            self._transport.write(piece)

    def _acknowledged(self) -> int | None:
        """Bytes that the engine's machine has received, None if it cannot be known.

        The machine acknowledges them before the engine can read them. So an engine that closed the
        connection with some of them not acknowledged has not read the request.
        """
        assert self._transport is not None
        own = self._transport.get_extra_info("socket")
        try:
            told = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED.size)
            return int(_ACKED.unpack(told)[0])
        except (OSError, struct.error):  # a Unix socket, or an old kernel
            return None

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
