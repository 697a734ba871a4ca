"""``GET /recording``: a recording from now on, for a limited time, as JSON lines."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import FastAPI, Query, Response

from router.admin.streams import Stream, Streams, streamed
from router.recording.recorder import ROOM_BYTES, Listener, Recorder

_LONGEST_S = 3600
_PAUSE_S = 0.25
# Chunks that may wait for a reader; the last chunk has its own place.
_ROOM = 4

Seconds = Annotated[float, Query(gt=0, le=_LONGEST_S)]


def add_recording(
    app: FastAPI, recorder: Recorder, streams: Streams, room_bytes: int = ROOM_BYTES
) -> None:
    """Add ``GET /recording``.

    Args:
        app: application that gets the route.
        recorder: source of the lines.
        streams: open answers of the server.
        room_bytes: bytes that may wait for a slow reader; further lines are dropped and counted.
    """
    tasks: set[asyncio.Task[None]] = set()

    @app.get("/recording")
    async def recording(seconds: Seconds = 60.0) -> Response:
        """Steps and requests from now on, lengths and times alone, as --record writes them."""
        stream = streams.open(_ROOM + 1)
        listener = recorder.listen(room_bytes)
        task = asyncio.create_task(_pass_on(listener, stream, seconds))
        task.add_done_callback(lambda _: recorder.leave(listener))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return streamed(stream, "application/x-ndjson")


async def _pass_on(listener: Listener, stream: Stream, seconds: float) -> None:
    clock = asyncio.get_running_loop().time
    end_s = clock() + seconds
    while stream.open and clock() < end_s:
        if stream.waiting < _ROOM and (lines := listener.take()):
            stream.send(lines)
        await asyncio.sleep(min(_PAUSE_S, max(0.0, end_s - clock())))
    stream.send(listener.take())
    stream.close()
