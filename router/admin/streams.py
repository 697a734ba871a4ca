"""Endless answers: each has a small buffer, and a slow reader is dropped rather than awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from starlette.exceptions import HTTPException
from starlette.responses import StreamingResponse


class Stream:
    """One open answer.

    Args:
        room: number of chunks that may wait for its reader.
        closed: called once, at its end.
    """

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
        """Queue a chunk; a full buffer closes the stream after what it holds."""
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
        """Yield the queued chunks until the end; a reader that leaves closes the stream."""
        try:
            while (chunk := await self._chunks.get()) is not None:
                yield chunk
        finally:
            self.close()


class Streams:
    """All open answers of a server, closed with it.

    Args:
        limit: number that may be open; further ones are rejected.
    """

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._open: set[Stream] = set()
        self._ended = False

    @property
    def number(self) -> int:
        return len(self._open)

    def open(self, room: int, closed: Callable[[Stream], None] = lambda _: None) -> Stream:
        """Open a stream.

        Args:
            room: number of chunks that may wait for its reader; one more closes it.
            closed: called once, at its end, for whatever reason.

        Raises:
            HTTPException: too many are open, or the server is stopping.
        """
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
    """Return the HTTP response for a stream."""
    return StreamingResponse(
        stream.chunks(), media_type=media_type, headers={"cache-control": "no-store"}
    )
