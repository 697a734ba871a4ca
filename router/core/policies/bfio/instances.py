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

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from router.core.errors import InputError
from router.core.forecast.forecast import Floats, Ints
from router.core.policies.bfio.solver import UNLIMITED, Instance, Memory

FORMAT = "evenstep-instance"
VERSION = 1
_CAPACITY_LIMIT = 2**31
_LIMIT = 1e12  # of any other number, so that sums and squares are finite


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
    if not isinstance(data, Mapping):
        raise InputError(f"an instance is a JSON object, not {_shown(data)}")
    _check_format(data)
    loads = _rows(_list(data, "loads"), "loads")
    steps = loads.shape[1]
    candidates = _candidates(_list(data, "candidates"), _number(data, "growth"), steps)
    return Instance(
        loads=loads,
        candidates=candidates,
        capacity=_capacity(_list(data, "capacity"), len(loads)),
        weights=_weights(data, steps),
        tie_weight=_at_least_0(_number(data, "tie_weight"), "tie_weight"),
        memory=_memory(data, len(loads), len(candidates)) if "room" in data else None,
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


def _check_format(data: Mapping[str, Any]) -> None:
    given = data.get("format", FORMAT), data.get("version", VERSION)
    if given != (FORMAT, VERSION):
        raise InputError(
            f"format {_shown(given[0])} in version {_shown(given[1])} is none that is read here: "
            f"{FORMAT} in version {VERSION}"
        )


def _list(data: Mapping[str, Any], key: str) -> list[Any]:
    if key not in data:
        raise InputError(f"{key} is missing")
    if not isinstance(data[key], list):
        raise InputError(f"{key} is a list, not {_shown(data[key])}")
    return list(data[key])


def _number(data: Mapping[str, Any], key: str) -> float:
    return _finite(data.get(key, 0.0), key)


def _finite(value: object, place: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return _within_limit(number, place)
    raise InputError(f"{place} is a finite number, not {_shown(value)}")


def _within_limit(number: float, place: str) -> float:
    if abs(number) > _LIMIT:
        raise InputError(f"{place} is between {-_LIMIT:g} and {_LIMIT:g}, not {number:g}")
    return number


def _at_least_0(number: float, place: str) -> float:
    if number < 0:
        raise InputError(f"{place} is at least 0, not {number:g}")
    return number


def _row(values: object, place: str, steps: int) -> list[float]:
    if not isinstance(values, list) or len(values) != steps:
        raise InputError(f"{place} has a number for each of {steps} steps, not {_shown(values)}")
    return [_finite(value, f"{place}[{step}]") for step, value in enumerate(values)]


def _rows(values: list[Any], key: str) -> Floats:
    if not values or not isinstance(values[0], list) or not values[0]:
        raise InputError(f"{key} has a row for each worker, and each row a number for each step")
    rows = [_row(row, f"{key}[{at}]", len(values[0])) for at, row in enumerate(values)]
    return np.array(rows, dtype=np.float64)


def _candidates(values: list[Any], growth: float, steps: int) -> Floats:
    rows = np.empty((len(values), steps))
    for at, value in enumerate(values):
        place = f"candidates[{at}]"
        if isinstance(value, list):
            rows[at] = _row(value, place, steps)
        else:
            rows[at] = _line(_finite(value, place), growth, steps)
    return rows


def _capacity(values: list[Any], workers: int) -> Ints:
    return _whole(values, "capacity", workers, "workers", "requests", _CAPACITY_LIMIT)


def _whole(
    values: list[Any], key: str, count: int, of: str, unit: str, limit: int, least: int = -(2**53)
) -> Ints:
    if len(values) != count:
        raise InputError(f"{key} has {len(values)} entries, one for each of {count} {of}")
    for at, value in enumerate(values):
        if type(value) is not int or abs(value) > limit or value < least:
            raise InputError(f"{key}[{at}] is a whole number of {unit}, not {_shown(value)}")
    return np.array(values, dtype=np.int64)


def _memory(data: Mapping[str, Any], workers: int, candidates: int) -> Memory:
    limit, unit = int(_LIMIT), "units, at least 0"
    rooms = [UNLIMITED if room is None else room for room in _list(data, "room")]
    idle = data.get("idle", [])
    if not isinstance(idle, list) or not all(
        type(worker) is int and 0 <= worker < workers for worker in idle
    ):
        raise InputError(f"idle is a list of workers, by number from 0, not {_shown(idle)}")
    return Memory(
        room=_whole(rooms, "room", workers, "workers", unit, UNLIMITED, 0),
        need=_whole(_list(data, "need"), "need", candidates, "candidates", unit, limit, 0),
        idle=np.isin(np.arange(workers), idle),
    )


def _weights(data: Mapping[str, Any], steps: int) -> Floats:
    if ("weights" in data) == ("discount" in data):
        raise InputError("give either weights, one for each step, or a discount")
    if "discount" in data:
        discount = _at_least_0(_finite(data["discount"], "discount"), "discount")
        return _powers(discount, steps)
    numbers = _row(data["weights"], "weights", steps)
    return np.array([_at_least_0(weight, f"weights[{h}]") for h, weight in enumerate(numbers)])


def _powers(discount: float, steps: int) -> Floats:
    with np.errstate(over="ignore"):
        weights: Floats = discount ** np.arange(steps, dtype=np.float64)
    _within_limit(float(weights.max()), f"discount {discount:g}: the weight of a step")
    return weights


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
