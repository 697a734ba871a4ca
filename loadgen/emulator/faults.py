"""Ways in which an emulated worker can misbehave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from router.errors import InputError

FaultKind = Literal["kill", "hang", "slow", "garbage", "error", "refuse"]
FAULT_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
_ERROR_STATUSES = (500, 429)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, with its parameters.

    Attributes:
        kind: kill (connections reset, socket closed, state lost, snapshots stop), hang (steps stop,
            nothing answers), slow (speed divided by ``factor``), garbage (bytes that are not HTTP),
            error (completions answer ``status``), refuse (socket closed, streams go on).
        factor: for slow.
        status: for error, 500 or 429.
        mid_event: for kill: open streams get half an event first.

    Raises:
        InputError: a kind or a parameter that does not exist.
    """

    kind: FaultKind
    factor: float = 2.0
    status: int = 500
    mid_event: bool = False

    def __post_init__(self) -> None:
        if self.kind not in FAULT_KINDS:
            raise InputError(f"unknown fault {self.kind!r}; known: {', '.join(FAULT_KINDS)}")
        if self.factor <= 0:
            raise InputError(f"factor must be above 0, got {self.factor}")
        if self.status not in _ERROR_STATUSES:
            raise InputError(f"status must be 500 or 429, got {self.status}")
