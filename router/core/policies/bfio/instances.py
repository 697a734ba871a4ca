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

from collections.abc import Sequence, Sized
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType

from router.core.errors import InputError
from router.core.forecast.forecast import Floats
from router.core.policies.bfio.solver import UNLIMITED, Instance, Memory

T = TypeVar("T", bound=Sized)

_LIMIT = 10**12  # so that sums and squares are finite
_Number = Annotated[float, Meta(ge=-_LIMIT, le=_LIMIT)]
_Weight = Annotated[float, Meta(ge=0, le=_LIMIT)]
_Row = Annotated[list[_Number], Meta(min_length=1)]
_Slots = Annotated[int, Meta(ge=-(2**31), le=2**31)]
_Room = Annotated[int, Meta(ge=0, le=UNLIMITED)]
_Need = Annotated[int, Meta(ge=0, le=_LIMIT)]


class _Written(msgspec.Struct):
    """An instance as above."""

    loads: Annotated[list[_Row], Meta(min_length=1)]
    candidates: list[_Number | list[_Number]]
    capacity: list[_Slots]
    growth: _Number = 0.0
    weights: list[_Weight] | UnsetType = UNSET
    discount: _Weight | UnsetType = UNSET
    tie_weight: _Weight = 0.0
    room: list[_Room | None] | UnsetType = UNSET
    need: list[_Need] = []
    idle: list[int] = []
    format: Literal["evenstep-instance"] = "evenstep-instance"
    version: Literal[1] = 1


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
        "format": "evenstep-instance",
        "version": 1,
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
        raise InputError(f"not an instance: {error}") from error
    workers, steps = len(written.loads), len(written.loads[0])
    rows = [_as_long(f"loads[{at}]", row, steps) for at, row in enumerate(written.loads)]
    candidates = np.empty((len(written.candidates), steps))
    for at, one in enumerate(written.candidates):
        if isinstance(one, list):
            candidates[at] = _as_long(f"candidates[{at}]", one, steps)
        else:
            candidates[at] = _line(one, written.growth, steps)
    return Instance(
        loads=np.array(rows),
        candidates=candidates,
        capacity=np.array(_as_long("capacity", written.capacity, workers), dtype=np.int64),
        weights=_weights(written, steps),
        tie_weight=written.tie_weight,
        memory=None if written.room is UNSET else _memory(written, written.room),
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


def _as_long(place: str, values: T, length: int) -> T:
    if len(values) != length:
        raise InputError(f"{place} should have {length} entries, and has {len(values)}")
    return values


def _weights(written: _Written, steps: int) -> Floats:
    if written.weights is not UNSET and written.discount is UNSET:
        return np.array(_as_long("weights", written.weights, steps))
    if written.weights is not UNSET or written.discount is UNSET:
        raise InputError("give either weights, one for each step, or a discount")
    with np.errstate(over="ignore"):
        weights: Floats = written.discount ** np.arange(steps, dtype=np.float64)
    if weights.max() > _LIMIT:
        raise InputError(f"discount {written.discount:g}: the weight of a step exceeds {_LIMIT:g}")
    return weights


def _memory(written: _Written, rooms: Sequence[int | None]) -> Memory:
    workers = len(written.loads)
    if not all(0 <= worker < workers for worker in written.idle):
        raise InputError(f"idle should list workers by number from 0 to {workers - 1}")
    units = [UNLIMITED if room is None else room for room in _as_long("room", rooms, workers)]
    needs = _as_long("need", written.need, len(written.candidates))
    return Memory(
        room=np.array(units, dtype=np.int64),
        need=np.array(needs, dtype=np.int64),
        idle=np.isin(np.arange(workers), written.idle),
    )
