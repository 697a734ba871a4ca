"""The status page: its files, and a stream of states, one a second."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from fastapi import FastAPI, Response
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, StreamingResponse
from starlette.staticfiles import StaticFiles

log = logging.getLogger(__name__)

WEB = Path(__file__).parent / "web"

# A viewer this many states behind is dropped; its browser reconnects.
_ROOM = 5
_RECONNECT = b"retry: 1000\n\n"
# Keeps the stream alive when a state cannot be read.
_HEARTBEAT = b": still here\n\n"


@dataclass
class Ticker:
    """Sends the same states to all viewers, read once each, and only while there are viewers."""

    _render: Callable[[], bytes]
    _streams: Streams
    _interval_s: float
    _viewers: set[Stream] = field(default_factory=set)
    _ticking: asyncio.Task[None] | None = None
    _last: bytes = b""

    def watch(self) -> Stream:
        viewer = self._streams.open(_ROOM, self._viewers.discard)
        self._viewers.add(viewer)
        viewer.send(_RECONNECT)
        if self._ticking is None:
            self._last = b""
            self._ticking = asyncio.create_task(self._tick())
        elif self._last:
            viewer.send(self._last)
        return viewer

    async def _tick(self) -> None:
        while self._viewers:
            try:
                self._last = b"data: " + self._render() + b"\n\n"
            except Exception:
                log.exception("the status page's state could not be read")
                self._last = _HEARTBEAT
            for viewer in tuple(self._viewers):
                viewer.send(self._last)
            await asyncio.sleep(self._interval_s)
        self._ticking = None


def add_page(
    app: FastAPI, render: Callable[[], bytes], streams: Streams, interval_s: float = 1.0
) -> None:
    """Add ``GET /``, its files under ``/web``, and ``GET /events``; see ``Ticker``."""
    ticker = Ticker(render, streams, interval_s)

    @app.get("/")
    async def page() -> Response:
        """The status page."""
        return FileResponse(WEB / "index.html")

    @app.get("/events")
    async def events() -> Response:
        """States of all groups as server-sent events, one a second."""
        return streamed(ticker.watch(), "text/event-stream")

    app.mount("/web", StaticFiles(directory=WEB), name="web")


class Stream:
    """One open answer; ``room``: chunks that may wait for its reader; ``closed``: for its end."""

    def __init__(self, room: int, closed: Callable[[Stream], None]) -> None:
        self._chunks: asyncio.Queue[bytes | None] = asyncio.Queue(room + 1)
        self._room = room
        self._closed: Callable[[Stream], None] | None = closed

    @property
    def open(self) -> bool:
        return self._closed is not None

    @property
    def waiting(self) -> int:
        return self._chunks.qsize()

    def send(self, chunk: bytes) -> None:
        """A full buffer closes the stream after what it holds."""
        if not self.open:
            return
        if self.waiting >= self._room:
            self.close()
        else:
            self._chunks.put_nowait(chunk)

    def close(self) -> None:
        closed, self._closed = self._closed, None
        if closed is not None:
            self._chunks.put_nowait(None)
            closed(self)

    async def chunks(self) -> AsyncIterator[bytes]:
        """A reader that leaves closes the stream."""
        try:
            while (chunk := await self._chunks.get()) is not None:
                yield chunk
        finally:
            self.close()


class Streams:
    """All open answers of a server, closed with it; beyond ``limit`` further ones are rejected."""

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._open: set[Stream] = set()
        self._ended = False

    def open(self, room: int, closed: Callable[[Stream], None] = lambda _: None) -> Stream:
        """More than ``room`` chunks close it; HTTPException: too many are open, or none may be."""
        if self._ended:
            raise HTTPException(503, "the server is stopping")
        if len(self._open) >= self._limit:
            raise HTTPException(503, f"{self._limit} streams are open already: close one")

        def forget(stream: Stream) -> None:
            self._open.discard(stream)
            closed(stream)

        stream = Stream(room, forget)
        self._open.add(stream)
        return stream

    def close(self) -> None:
        self._ended = True
        for stream in tuple(self._open):
            stream.close()


def streamed(stream: Stream, media_type: str) -> StreamingResponse:
    """The HTTP response for a stream."""
    return StreamingResponse(
        stream.chunks(), media_type=media_type, headers={"cache-control": "no-store"}
    )
