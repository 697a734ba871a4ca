"""Answers without an end of their own: each has a few chunks of room, and none is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from starlette.exceptions import HTTPException
from starlette.responses import StreamingResponse


class Stream:
    """One open answer.

    Args:
        room: chunks that may wait for its reader.
        closed: called once, when it ends.
    """

    def __init__(self, room: int, closed: Callable[[Stream], None]) -> None:
        self._chunks: asyncio.Queue[bytes | None] = asyncio.Queue(room + 1)
        self._room = room
        self._closed: Callable[[Stream], None] | None = closed

    @property
    def open(self) -> bool:
        """It may still be sent something."""
        return self._closed is not None

    @property
    def waiting(self) -> int:
        """Chunks that wait for its reader."""
        return self._chunks.qsize()

    def send(self, chunk: bytes) -> None:
        """Hand a chunk over; a reader that has fallen behind gets no more, and then an end."""
        if not self.open:
            return
        if self.waiting >= self._room:
            self.close()
        else:
            self._chunks.put_nowait(chunk)

    def close(self) -> None:
        """End it, after what has been handed over."""
        closed, self._closed = self._closed, None
        if closed is not None:
            self._chunks.put_nowait(None)
            closed(self)

    async def chunks(self) -> AsyncIterator[bytes]:
        """What has been handed over, until the end; a reader that leaves ends it."""
        try:
            while (chunk := await self._chunks.get()) is not None:
                yield chunk
        finally:
            self.close()


class Streams:
    """All open answers of a server, so that its end can be theirs.

    Args:
        limit: how many may be open; one more is refused.
    """

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._open: set[Stream] = set()
        self._ended = False

    @property
    def number(self) -> int:
        """How many are open."""
        return len(self._open)

    def open(self, room: int, closed: Callable[[Stream], None] = lambda _: None) -> Stream:
        """One more.

        Args:
            room: chunks that may wait for its reader; one more ends it.
            closed: called once, when it ends, for whatever reason.

        Raises:
            HTTPException: there are too many, or the server is about to end.
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
        """End all, and let no more begin."""
        self._ended = True
        for stream in tuple(self._open):
            stream.close()


def streamed(stream: Stream, media_type: str) -> StreamingResponse:
    """The HTTP answer that a stream is."""
    return StreamingResponse(
        stream.chunks(), media_type=media_type, headers={"cache-control": "no-store"}
    )
