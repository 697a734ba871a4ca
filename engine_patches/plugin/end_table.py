"""Shared memory that carries end probabilities from the workers to the scheduler's process.

A worker process writes and the engine's process reads, without locks: one row for each running
request. Independent of vLLM.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

WINDOW_TOKENS = 16
"""Probabilities are averaged: the first so many alike, later each new one with this part."""

STEP_RELATIVE = 0.5
STEP_LEAST = 5e-4
"""A probability is told again when it has changed by more than both: half of itself, and this."""

_ROW_BYTES = 16


def table_path(instance: str, rank: int) -> Path:
    """Path of one engine's table while both sides open it."""
    return Path(tempfile.gettempdir()) / f"evenstep-ends-{instance}-{rank}"


def _arrays(file: int, rows: int) -> tuple[Ints, Floats]:
    with os.fdopen(file, "r+b") as opened:
        memory: npt.NDArray[np.uint8] = np.memmap(opened, np.uint8, "r+", 0, rows * _ROW_BYTES)
    half = rows * _ROW_BYTES // 2
    return memory[:half].view(np.int64), memory[half:].view(np.float64)


class EndWriter:
    """The workers' end; ``rows``: maximum number of requests that run at once."""

    def __init__(self, path: Path, rows: int) -> None:
        path.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        file = os.open(path, flags, 0o600)
        os.truncate(file, rows * _ROW_BYTES)
        # Of each row: its request's number (0: free), and the averaged probability that the next
        # token is the last (nan: not known).
        self.numbers, self.probabilities = _arrays(file, rows)
        self._seen = np.zeros(rows, np.int64)
        self._means = np.zeros(rows)
        self._free = list(range(rows))

    def enter(self, number: int) -> int:
        row = self._free.pop()
        self.hold(row, number)
        return row

    def hold(self, row: int, number: int) -> None:
        """A request has this row from now on, and no other one; 0: it is nobody's."""
        self.numbers[self.numbers == number] = 0
        self._seen[row] = 0
        self.probabilities[row] = np.nan
        self.numbers[row] = number

    def leave(self, row: int) -> None:
        self.numbers[row] = 0
        self._free.append(row)

    def take(self, rows: Ints, numbers: Ints, now: Floats, first: Flags) -> None:
        """Add the probabilities that the tokens sampled in a step end their requests.

        Rows that other requests hold by now are skipped, as is number 0; ``first``: the request has
        no token since it entered. Only the next step shows whether it got one in this, so until
        then the probability is not known.
        """
        valid = (self.numbers[rows] == numbers) & (numbers > 0)
        rows, now, first = rows[valid], now[valid], first[valid]
        seen = np.where(first, 1, self._seen[rows] + 1)
        self._seen[rows] = seen
        before = np.where(seen == 1, now, self._means[rows])
        self._means[rows] = mean = before + (now - before) / np.minimum(seen, WINDOW_TOKENS)
        self.probabilities[rows] = np.where(first, np.nan, mean)


class EndReader:
    """The scheduler's end; it unlinks the table once it is open, or raises OSError."""

    def __init__(self, path: Path) -> None:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        rows = os.fstat(file).st_size // _ROW_BYTES
        self._numbers, self._probabilities = _arrays(file, rows)
        path.unlink()
        self._told_numbers = np.zeros(rows, np.int64)
        self._told = np.zeros(rows)
        self._ids: dict[int, str] = {}
        self._numbers_of: dict[str, int] = {}
        self._last = 0

    def number(self, id_: str) -> int:
        """Number by which the workers identify a request, a session by one for all its inputs."""
        if id_ not in self._numbers_of:
            self._last += 1
            self._ids[self._last] = id_
            self._numbers_of[id_] = self._last
        return self._numbers_of[id_]

    def forget(self, ids: Iterable[str]) -> None:
        for id_ in ids:
            self._ids.pop(self._numbers_of.pop(id_, 0), None)

    def changed(self) -> dict[str, float]:
        """Probabilities, by request, that are new or changed by a step."""
        numbers, now = self._numbers.copy(), self._probabilities.copy()
        moved = np.abs(now - self._told) > np.maximum(STEP_RELATIVE * self._told, STEP_LEAST)
        news = (moved | (numbers != self._told_numbers)) & ~np.isnan(now) & (numbers > 0)
        rows = np.flatnonzero(news)
        self._told_numbers[rows], self._told[rows] = numbers[rows], now[rows]
        found = zip(numbers[rows].tolist(), now[rows].tolist(), strict=True)
        return {self._ids[number]: p for number, p in found if number in self._ids}
