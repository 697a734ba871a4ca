"""One end of the connection between a proxy and the deciding process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Generic, TypeVar, cast

import msgspec

from router.processes.messages import Frames, Message, append

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)


class Connection(asyncio.Protocol, Generic[M]):
    """Sends and receives messages; those of one turn of the event loop go in one write.

    Whatever goes wrong with a message ends the connection, and both ends begin anew: what the one
    knows of the other would not be true any more.

    Args:
        decoder: of what the other end says.
        take: called with each message.
        made: called once when there is a connection.
        lost: called once when there is none any more.
        broken: called when an error ends it.

    Attributes:
        silent: set to 0 when the other end is heard. Whoever counts it up now and then knows for
            how long that was not so, and one that was stopped itself does not blame the other.
    """

    def __init__(
        self,
        decoder: msgspec.msgpack.Decoder[M],
        take: Callable[[M], None],
        made: Callable[[], None],
        lost: Callable[[], None],
        broken: Callable[[], None],
    ) -> None:
        self._decoder = decoder
        self._take = take
        self._made = made
        self._lost = lost
        self._broken = broken
        self._frames = Frames()
        self._unsent = bytearray()
        self._transport: asyncio.Transport
        self._loop = asyncio.get_running_loop()
        self.silent = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self._transport = cast(asyncio.Transport, transport)
        self._made()

    def data_received(self, data: bytes) -> None:
        """See asyncio; what cannot be understood or done ends the connection."""
        self.silent = 0
        try:
            for frame in self._frames.feed(data):
                self._take(self._decoder.decode(frame))
        except Exception:
            log.exception("a message from another process cannot be handled; the two connect anew")
            self._broken()
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._unsent.clear()
        self._lost()

    def say(self, message: Message) -> bool:
        """Send it at the end of this turn of the loop; false if it cannot be sent.

        Earlier messages are sent all the same, then the connection ends.
        """
        if not self._unsent:
            self._loop.call_soon(self.flush)
        try:
            append(message, self._unsent)
        except Exception:
            name = type(message).__name__
            log.exception(
                "a message (%s) cannot be sent to another process; they connect anew", name
            )
            self._broken()
            self.close()
            return False
        return True

    def flush(self) -> None:
        """Send now what is to be sent."""
        if self._unsent and not self._transport.is_closing():
            self._transport.write(bytes(self._unsent))
        self._unsent.clear()

    def close(self) -> None:
        """Send the rest, and end."""
        self.flush()
        self._transport.close()
