"""The status page: its files, and a stream of states, one a second."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from fastapi import FastAPI, Response
from starlette.responses import FileResponse
from starlette.staticfiles import StaticFiles

from router.admin.streams import Stream, Streams, streamed

log = logging.getLogger(__name__)

WEB = Path(__file__).parent / "web"

# A viewer this many states behind is dropped; its browser reconnects.
_ROOM = 5
_RECONNECT = b"retry: 1000\n\n"
# Keeps the stream alive when a state cannot be read.
_HEARTBEAT = b": still here\n\n"


class Ticker:
    """Sends the same states to all viewers, read once each, and only while there are viewers."""

    def __init__(self, render: Callable[[], bytes], streams: Streams, interval_s: float) -> None:
        self._render = render
        self._streams = streams
        self._interval_s = interval_s
        self._viewers: set[Stream] = set()
        self._ticking: asyncio.Task[None] | None = None
        self._last = b""

    def watch(self) -> Stream:
        """Add a viewer, starting with the last state."""
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
            self._last = self._event()
            for viewer in tuple(self._viewers):
                viewer.send(self._last)
            await asyncio.sleep(self._interval_s)
        self._ticking = None

    def _event(self) -> bytes:
        try:
            return b"data: " + self._render() + b"\n\n"
        except Exception:
            log.exception("the status page's state could not be read")
            return _HEARTBEAT


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
