"""The integer program of BF-IO as JSON: one instance, one object, every number exact.

    {"format": "evenstep-instance", "version": 1,
     "loads": [[800, 801], [640, 0]],       worker by worker, step by step
     "candidates": [200, [90, 95]],         size s, which adds s + growth * h; or a value per step
     "growth": 1,                           default 0
     "capacity": [1, 2],
     "weights": [1, 0.8],                   of each step; or "discount": 0.8
     "tie_weight": 0,                       default 0
     "room": [900, null],                   memory of each worker; null: no limit
     "need": [210, 100],                    of each candidate, in the same unit
     "idle": [0]}                           workers that run nothing; default none

Without ``room`` no worker has a limit. Other keys are ignored, and may hold notes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np

from router.core.errors import InputError
from router.core.forecast.forecast import Floats
from router.core.policies.bfio.solver import UNLIMITED, Instance, Memory

FORMAT: Final = "evenstep-instance"
VERSION: Final = 1
_LIMIT = 10**12  # so that sums and squares are finite

_Number = Annotated[float, msgspec.Meta(ge=-_LIMIT, le=_LIMIT)]
_AtLeast0 = Annotated[float, msgspec.Meta(ge=0, le=_LIMIT)]
_Row = Annotated[list[_Number], msgspec.Meta(min_length=1)]
_Room = Annotated[int, msgspec.Meta(ge=0, le=UNLIMITED)]
_Need = Annotated[int, msgspec.Meta(ge=0, le=_LIMIT)]


class _Written(msgspec.Struct, frozen=True):
    """An instance as it is written."""

    loads: Annotated[list[_Row], msgspec.Meta(min_length=1)]
    candidates: list[_Number | list[_Number]]
    capacity: list[Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31)]]
    format: Literal["evenstep-instance"] = FORMAT
    version: Literal[1] = VERSION
    growth: _Number = 0.0
    weights: list[_AtLeast0] | None = None
    discount: _AtLeast0 | None = None
    tie_weight: _AtLeast0 = 0.0
    room: list[_Room | None] | None = None
    need: list[_Need] = []
    idle: list[_Need] = []


def to_json(instance: Instance) -> dict[str, Any]:
    """``from_json`` restores the same numbers, bit by bit."""
    growth, memory = _growth(instance.candidates), {}
    if instance.memory is not None:
        rooms = instance.memory.room.tolist()
        memory = {
            "room": [None if room >= UNLIMITED else room for room in rooms],
            "need": instance.memory.need.tolist(),
            "idle": np.flatnonzero(instance.memory.idle).tolist(),
        }
    return {
        "format": FORMAT,
        "version": VERSION,
        "loads": [_short(row) for row in instance.loads],
        "candidates": [_candidate(row, growth) for row in instance.candidates],
        "growth": _short([growth])[0],
        "capacity": [int(slots) for slots in instance.capacity],
        "weights": _short(instance.weights),
        "tie_weight": _short([instance.tie_weight])[0],
        **memory,
    }


def from_json(data: object) -> Instance:
    """Read an instance, written by ``to_json`` or by hand.

    Raises:
        InputError: a key is missing or a value is invalid; the message names it.
    """
    try:
        written = msgspec.convert(data, _Written)
    except msgspec.ValidationError as error:
        raise InputError(f"no instance: {error}") from None
    workers, steps = len(written.loads), len(written.loads[0])
    for at, row in enumerate(written.loads):
        _check_length(f"loads[{at}]", row, steps, "steps")
    _check_length("capacity", written.capacity, workers, "workers")
    return Instance(
        loads=np.array(written.loads, dtype=np.float64),
        candidates=_candidates(written, steps),
        capacity=np.array(written.capacity, dtype=np.int64),
        weights=_weights(written, steps),
        tie_weight=written.tie_weight,
        memory=None if written.room is None else _memory(written, written.room),
    )


def _growth(candidates: Floats) -> float:
    if candidates.shape[1] < 2 or not len(candidates):
        return 0.0
    gains = np.round(candidates[:, 1] - candidates[:, 0], 9)
    gains, counts = np.unique(gains, return_counts=True)
    return float(gains[counts.argmax()])


def _candidate(row: Floats, growth: float) -> float | list[float]:
    numbers = _short(row)
    return numbers[0] if np.array_equal(row, _line(row[0], growth, len(row))) else numbers


def _line(size: float, growth: float, steps: int) -> Floats:
    return size + growth * np.arange(steps, dtype=np.float64)


def _short(values: Floats | Sequence[float]) -> list[float]:
    return [int(value) if float(value).is_integer() else float(value) for value in values]


def _check_length(place: str, values: Sequence[object], count: int, of: str) -> None:
    if len(values) != count:
        raise InputError(f"{place} has {len(values)} entries, one for each of {count} {of}")


def _candidates(written: _Written, steps: int) -> Floats:
    rows = np.empty((len(written.candidates), steps))
    for at, candidate in enumerate(written.candidates):
        if isinstance(candidate, list):
            _check_length(f"candidates[{at}]", candidate, steps, "steps")
            rows[at] = candidate
        else:
            rows[at] = _line(candidate, written.growth, steps)
    return rows


def _memory(written: _Written, rooms: Sequence[int | None]) -> Memory:
    workers = len(written.loads)
    _check_length("room", rooms, workers, "workers")
    _check_length("need", written.need, len(written.candidates), "candidates")
    if beyond := [worker for worker in written.idle if worker >= workers]:
        raise InputError(f"idle has worker {beyond[0]}, and there are {workers}, from 0 on")
    return Memory(
        room=np.array([UNLIMITED if room is None else room for room in rooms], dtype=np.int64),
        need=np.array(written.need, dtype=np.int64),
        idle=np.isin(np.arange(workers), written.idle),
    )


def _weights(written: _Written, steps: int) -> Floats:
    weights, discount = written.weights, written.discount
    if weights is not None and discount is None:
        _check_length("weights", weights, steps, "steps")
        return np.array(weights, dtype=np.float64)
    if discount is None or weights is not None:
        raise InputError("give either weights, one for each step, or a discount")
    with np.errstate(over="ignore"):
        powers: Floats = discount ** np.arange(steps, dtype=np.float64)
    if powers.max() > _LIMIT:
        raise InputError(f"discount {discount:g}: the last step's weight is above {_LIMIT:g}")
    return powers
