from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import cast

import httptools

from router.core.errors import UpstreamError

Sink = Callable[[bytes], None]

_HIGH_WATER_BYTES = 256 * 1024
# Chunk size of a large request body: asyncio copies what the socket does not take.
_PIECE_BYTES = 64 * 1024
# Servers limit heads themselves: nginx to 32 KiB, uvicorn to 64 KiB.
_MOST_HEAD_BYTES = 64 * 1024
# tcpi_bytes_acked in Linux' struct tcp_info.
_ACKED = struct.Struct("=120xQ")
# A machine that vanishes is noticed after 25 s, whether it owes an answer (keep-alive: idle time,
# interval and number of probes) or an acknowledgement.
_SOCKET_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 25_000),
)


class Connection(asyncio.Protocol):
    """One connection to an engine; serves one request at a time; without one it is in ``idle``."""

    __slots__ = (
        *("_acked", "_buffered_bytes", "_chunks", "_done", "_dry_bytes", "_error", "_head_bytes"),
        *("_idle", "_parser", "_paused", "_refused", "_reusable", "_sink", "_transport"),
        *("_full", "_unsent", "_waiter", "framed", "headers", "heard", "idle_since_s", "status"),
        "unread",
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
        # Bytes arrived since the last ``take_heard``.
        # The engine closed it, certainly before reading the request.
        # The head marks the body's end.
        self.framed = self.heard = self.unread = False
        self.idle_since_s = 0.0  # on the loop's clock
        # 0 before the answer's head.
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        own = transport.get_extra_info("socket")
        for option in _SOCKET_OPTIONS:
            own.setsockopt(*option)

    def data_received(self, data: bytes) -> None:
        if self._done:
            self.abort()  # unsolicited: the next answer would be out of step
            return
        self.heard = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"the engine's answer is not HTTP: {error}")
        # Heads, trailers and text between chunks, which the parser buffers until they end.
        self._dry_bytes = 0 if self._chunks else self._dry_bytes + len(data)
        if self._dry_bytes > _MOST_HEAD_BYTES and not self._done:
            self._fail(f"the engine sent more than {_MOST_HEAD_BYTES:,} bytes that are no body")
        if not self.status:
            return
        if self._sink is not None:
            try:
                if chunks := self._chunks:
                    self._chunks = []
                    self._sink(chunks[0] if len(chunks) == 1 else b"".join(chunks))
            except Exception as error:  # noqa: BLE001 - ``pour`` raises it
                self._refused, self._done = error, True
                self.abort()
            if self._done:
                self._wake()
        else:
            self._buffered_bytes += len(data)
            if self._buffered_bytes > _HIGH_WATER_BYTES:
                self.pause()
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
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
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._send_on()

    # httptools' callbacks

    def on_message_begin(self) -> None:
        if self._done:
            raise UpstreamError("the engine sent a second answer to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.status:
            return  # a trailer
        self.headers.append((name, value))
        self._head_bytes += len(name) + len(value) + len(b": \r\n")
        if self._head_bytes > _MOST_HEAD_BYTES:
            self._fail(f"the engine's answer has a head of more than {_MOST_HEAD_BYTES:,} bytes")
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self.framed = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self.headers.clear()
            self.framed = False
            return
        self.status = status

    def on_body(self, data: bytes) -> None:
        self._chunks.append(data)

    def on_message_complete(self) -> None:
        if self.status:
            self._done = True
            # The parser knows it only in this callback.
            self._reusable = self.framed and self._parser.should_keep_alive()

    # one request

    @property
    def closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    @property
    def fileno(self) -> int:
        assert self._transport is not None
        return int(self._transport.get_extra_info("socket").fileno())

    def send(self, head: bytes, body: bytes) -> None:
        assert self._transport is not None
        self._acked = self._acknowledged() if self.status else None  # set on reuse
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
        heard, self.heard = self.heard or self._paused or bool(self._chunks), False
        return heard

    async def ask(self, head: bytes, body: bytes) -> None:
        self.send(head, body)
        try:
            while not self.status:
                await self._news()
        except BaseException:
            self.abort()
            raise

    async def chunk(self) -> bytes | None:
        """All body bytes that have arrived, at least one; None at the end."""
        while not self._chunks:
            if self._done:
                return None
            await self._news()
        chunk, self._buffered_bytes = self._taken(), 0
        self.resume()
        return chunk

    async def pour(self, sink: Sink) -> None:
        self._sink = sink
        if self._paused:
            self.resume()  # the buffer filled before the reader came
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
        self._sink = sink

    def pause(self) -> None:
        self._paused = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        self._paused = False
        if self._transport is not None:
            self._transport.resume_reading()

    def release(self) -> None:
        if self._reusable and not (self._chunks or self._unsent or self.closing):
            self.resume()
            self.idle_since_s = asyncio.get_running_loop().time()
            self._idle.append(self)
        else:
            self.abort()

    def abort(self) -> None:
        """The engine then stops generating."""
        self._done = True
        self._unsent = memoryview(b"")
        if self._transport is not None:
            self._transport.abort()

    def break_off(self, error: UpstreamError) -> None:
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
        """Bytes that the engine's machine acknowledged, which precedes reading; None: unknown."""
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

    def _news(self) -> asyncio.Future[None]:
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, message: str) -> None:
        self.break_off(UpstreamError(message))
