"""Faults of emulated workers, and their connections, on which faults act on answers in transit."""

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any

import msgspec

from router.core.errors import InputError

_ENGINE_FAULTS = ("kill", "hang", "slow", "garbage", "error", "refuse")
_WIRE_FAULTS = ("stall", "reset", "close", "corrupt", "endless_head", "drip")
FAULT_KINDS = (*_ENGINE_FAULTS, *_WIRE_FAULTS)

_TORN = ("kill", "hang", "stall", "reset", "close")
_ERROR_STATUSES = range(400, 600)


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One fault, with its parameters.

    Faults of the whole worker: kill (connections reset, socket closed, state lost, snapshots stop),
    hang (steps stop, no answers), slow (speed divided by ``factor``), garbage (bytes that are not
    HTTP), error (completions answer ``status``), refuse (socket closed, streams go on).

    Faults of completion answers alone, while health checks succeed: stall (no more bytes, the
    connection stays), reset, close (the connection ends), corrupt (bytes that are no chunk, then
    the end), endless_head (header lines without end), drip (``bytes_per_s``, events in pieces).
    """

    kind: str
    factor: float = 2.0  # divisor of the speed, for slow
    status: int = 500
    delay_s: float = 0.0
    retry_after_s: int | None = None  # value of Retry-After, for error; None: no header
    # Whether half an event is sent first, for kill, hang, stall, reset and close.
    mid_event: bool = False
    # Stream events that pass first, for stall, reset, close and corrupt; an unstreamed answer
    # counts as one event.
    after_events: int = 0
    bytes_per_s: float = 10_000.0  # send rate, for drip and endless_head

    def __post_init__(self) -> None:
        if self.kind not in FAULT_KINDS:
            raise InputError(f"unknown fault {self.kind!r}; known: {', '.join(FAULT_KINDS)}")
        if self.status not in _ERROR_STATUSES:
            raise InputError(f"status must be from 400 to 599, got {self.status}")
        for name in ("factor", "bytes_per_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InputError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("delay_s", "after_events", "retry_after_s"):
            if (getattr(self, name) or 0) < 0:
                raise InputError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.mid_event and self.kind not in _TORN:
            raise InputError(f"mid_event goes with {', '.join(_TORN)}, not with {self.kind}")

    @property
    def on_the_wire(self) -> bool:
        return self.kind in _WIRE_FAULTS


GARBAGE = b"\x00\xff\x16\x03garbage \xc3\x28\r\n\r\n" * 4

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_TICK_S = 0.02
_HEADER_LINE = b"x-endless: %b\r\n" % (b"." * 85)


class Wire(asyncio.Transport):
    """Transport of a connection; while it carries an answer, its worker's fault applies.

    An answer is written in pieces: its head, then one per batch of events, or one for its body.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._fault: Callable[[], Fault | None] = lambda: None
        self._bearing = False
        self._writes = 0
        self._dripping = bytearray()
        self._closing = False
        self.struck = False  # whether a fault has ended the answer; later writes are discarded

    def bear(self, fault: Callable[[], Fault | None]) -> None:
        """Begin an answer that this fault may strike."""
        self._fault, self._bearing, self._writes = fault, True, 0

    def bare(self) -> None:
        """End the answer; dripping bytes continue to drip."""
        self._bearing = False

    def tear(self, data: bytes) -> None:
        """Send half of ``data``, then nothing ever after; discard dripping bytes."""
        if not self.struck and not self._dripping and not self.is_closing():
            self._transport.write(data[: len(data) // 2])
        self._dripping.clear()
        self.struck = True

    def reset(self) -> None:
        """End the connection as a crash would, with a TCP reset."""
        self._transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE
        )
        self._transport.abort()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.struck:
            return
        self._writes += 1
        fault = self._fault() if self._bearing else None
        if self._dripping:
            self._dripping += data
        elif fault is not None and fault.on_the_wire:
            self._write_under(fault, bytes(data))
        else:
            self._transport.write(data)

    def close(self) -> None:
        """Close once all is sent; a connection with a struck answer stays open."""
        if self._dripping:
            self._closing = True
        elif not self.struck:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def _write_under(self, fault: Fault, data: bytes) -> None:
        if fault.kind == "drip":
            self._dripping += data
            self._drip()
        elif fault.kind == "endless_head" and self._writes == 1:
            self._transport.write(data.partition(b"\r\n")[0] + b"\r\n")
            self.struck = True
            self._lengthen_head(fault.bytes_per_s)
        elif fault.kind != "endless_head" and self._writes > 1 + fault.after_events:
            self.tear(data if fault.mid_event else b"")
            if fault.kind == "reset":
                self.reset()
            elif fault.kind != "stall":
                if fault.kind == "corrupt":
                    self._transport.write(GARBAGE)
                self._transport.close()
        else:
            self._transport.write(data)

    def _drip(self) -> None:
        """Send a few bytes now and the rest later; all at once when the fault has ended."""
        if self.is_closing():
            self._dripping.clear()
        fault = self._fault()
        piece = len(self._dripping)
        if fault is not None and fault.kind == "drip":
            piece = max(1, round(fault.bytes_per_s * _TICK_S))
        self._transport.write(bytes(self._dripping[:piece]))
        del self._dripping[:piece]
        if self._dripping:
            asyncio.get_running_loop().call_later(_TICK_S, self._drip)
        elif self._closing:
            self._transport.close()

    def _lengthen_head(self, bytes_per_s: float) -> None:
        if not self.is_closing():
            self._transport.write(_HEADER_LINE)
            pause_s = len(_HEADER_LINE) / bytes_per_s
            asyncio.get_running_loop().call_later(pause_s, self._lengthen_head, bytes_per_s)
