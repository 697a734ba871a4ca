"""A proxy as the deciding process reaches it, or the other way round.

A frame is a length (4 bytes, big-endian) and a msgpack message.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, cast

import msgspec

log = logging.getLogger(__name__)

# No real frame is longer.
_MOST_BYTES = 256 * 1024 * 1024
_LENGTH_BYTES = 4

_encoder = msgspec.msgpack.Encoder()

M = TypeVar("M", bound=msgspec.Struct)


class _Counts(Protocol):
    broken: int


class Peer(asyncio.Protocol, Generic[M]):
    """Sends and receives messages; one write carries all messages of an event loop turn.

    An error in a message ends the connection, and they connect anew: what each end knows of the
    other is no longer reliable. ``silent``: own ticks since the last message; a suspended process
    does not tick.
    """

    def __init__(
        self,
        decoder: msgspec.msgpack.Decoder[M],
        receive: Callable[[M], None],
        made: Callable[[], None],
        lost: Callable[[], None],
        counts: _Counts,
    ) -> None:
        self._decoder = decoder
        self._receive = receive
        self._made = made
        self._lost = lost
        self._counts = counts
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
            self._counts.broken += 1
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unsent.clear()
        self._lost()

    def send(self, message: msgspec.Struct) -> bool:
        """False if the message cannot be encoded; the connection closes after earlier messages."""
        if not self._unsent:
            self._loop.call_soon(self.flush)
        try:
            append(message, self._unsent)
        except Exception:
            kind = type(message).__name__
            log.exception(
                "a message (%s) cannot be sent to another process; they connect anew", kind
            )
            self._counts.broken += 1
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


def append(message: msgspec.Struct, data: bytearray) -> None:
    """Append a frame to a send buffer, or raise ValueError or OverflowError and leave it alone."""
    begin = len(data)
    content = begin + _LENGTH_BYTES
    try:
        _encoder.encode_into(message, data, content)
        length = len(data) - content
        if length > _MOST_BYTES:
            raise ValueError(f"a message has {length:,} bytes, {_MOST_BYTES:,} at most")
    except Exception:
        del data[begin:]
        raise
    data[begin:content] = length.to_bytes(_LENGTH_BYTES, "big")


class Frames:
    """Splits a byte stream into frames, whatever the chunk boundaries."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[memoryview]:
        """The frames that these bytes complete, without lengths; ValueError: one is too long."""
        data = self._rest + data if self._rest else data
        view, at, frames = memoryview(data), 0, list[memoryview]()
        while len(data) - at >= _LENGTH_BYTES:
            length = int.from_bytes(view[at : at + _LENGTH_BYTES], "big")
            if length > _MOST_BYTES:
                raise ValueError(f"a frame of {length} bytes")
            begin = at + _LENGTH_BYTES
            if begin + length > len(data):
                break
            frames.append(view[begin : begin + length])
            at = begin + length
        self._rest = data[at:]
        return frames
