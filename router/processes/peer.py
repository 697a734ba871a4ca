"""A proxy as the deciding process reaches it, or the other way round."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Generic, TypeVar, cast

import msgspec

from router.processes.messages import Frames, append

log = logging.getLogger(__name__)

M = TypeVar("M", bound=msgspec.Struct)


class Peer(asyncio.Protocol, Generic[M]):
    """Sends and receives messages; one write carries all messages of an event loop turn.

    Any error in a message ends the connection and both ends reconnect: the state that each holds of
    the other is no longer reliable.

    Args:
        made: called once when connected.
        lost: called once when disconnected.
        broken: called when an error ends the connection.

    Attributes:
        silent: ticks since the last message. The owner increments it on each of its own ticks, so a
            process that was itself suspended does not blame its peer.
    """

    def __init__(
        self,
        decoder: msgspec.msgpack.Decoder[M],
        receive: Callable[[M], None],
        made: Callable[[], None],
        lost: Callable[[], None],
        broken: Callable[[], None],
    ) -> None:
        self._decoder = decoder
        self._receive = receive
        self._made = made
        self._lost = lost
        self._broken = broken
        self._frames = Frames()
        self._unsent = bytearray()
        self._transport: asyncio.Transport
        self._loop = asyncio.get_running_loop()
        self.silent = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._made()

    def data_received(self, data: bytes) -> None:
        self.silent = 0
        try:
            for frame in self._frames.feed(data):
                self._receive(self._decoder.decode(frame))
        except Exception:
            log.exception("a message from another process cannot be handled; the two connect anew")
            self._broken()
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unsent.clear()
        self._lost()

    def send(self, message: msgspec.Struct) -> bool:
        """Queue a message for the end of this loop turn; return false if it cannot be encoded.

        In that case earlier messages are still sent, then the connection closes.
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
        if self._unsent and not self._transport.is_closing():
            self._transport.write(bytes(self._unsent))
        self._unsent.clear()

    def close(self) -> None:
        self.flush()
        self._transport.close()
