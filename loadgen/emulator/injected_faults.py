"""Faults of emulated workers."""

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
