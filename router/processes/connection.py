"""One end of the connection between a proxy and the deciding process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Generic, TypeVar, cast

import msgspec

from router.processes.messages import Frames, Message, encode

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)


class Connection(asyncio.Protocol, Generic[M]):
    """Sends and receives messages; those of one turn of the event loop go in one write.

    Args:
        decoder: of what the other end says.
        take: called with each message.
        made: called once when there is a connection.
        lost: called once when there is none any more.
    """

    def __init__(
        self,
        decoder: msgspec.msgpack.Decoder[list[M]],
        take: Callable[[M], None],
        made: Callable[[], None],
        lost: Callable[[], None],
    ) -> None:
        self._decoder = decoder
        self._take = take
        self._made = made
        self._lost = lost
        self._frames = Frames()
        self._unsent: list[Message] = []
        self._transport: asyncio.Transport
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self._transport = cast(asyncio.Transport, transport)
        self._made()

    def data_received(self, data: bytes) -> None:
        """See asyncio; what cannot be understood ends the connection."""
        try:
            for frame in self._frames.feed(data):
                for message in self._decoder.decode(frame):
                    self._take(message)
        except Exception:
            log.exception("a message of another process is not understood")
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._unsent.clear()
        self._lost()

    def say(self, message: Message) -> None:
        """Send it at the end of this turn of the loop."""
        if not self._unsent:
            self._loop.call_soon(self.flush)
        self._unsent.append(message)

    def flush(self) -> None:
        """Send now what is to be sent."""
        if self._unsent:
            self._transport.write(encode(self._unsent))
            self._unsent.clear()

    def close(self) -> None:
        """Send the rest, and end."""
        self.flush()
        self._transport.close()
