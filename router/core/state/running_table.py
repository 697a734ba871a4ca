"""Running requests of a group as arrays, updated row by row for the look-ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import count

import numpy as np

from router.core.forecast.forecast import NO_CAP, Running

_ID, _WORKER, _PROMPT, _GENERATED, _CAP, _PREFILL, _FROM = range(7)
_COLUMNS = 7
_FIRST_ROWS = 64


def joined(one: Running, other: Running) -> Running:
    """Concatenated rows of both."""
    columns = (column.name for column in fields(Running))
    return Running(*(np.concatenate((getattr(one, i), getattr(other, i))) for i in columns))


class RunningTable:
    """One row per running engine request, unordered; changes cost O(1).

    A worker's requests grow together: a row stores generated tokens less its worker's ticks then.

    Attributes:
        ticks: tokens that each request has gained, by worker.
        versions: number by worker that changes with its requests and never repeats.
        changes: source of these numbers.
    """

    def __init__(self) -> None:
        self._columns = np.zeros((_COLUMNS, _FIRST_ROWS), dtype=np.int64)
        self._end_probability = np.zeros(_FIRST_ROWS)
        self._row: dict[int, int] = {}
        self.ticks: list[int] = []
        self.versions: list[int] = []
        self.changes = count()
        self._free: list[int] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._row)

    def worker(self) -> WorkerRows:
        if self._free:
            worker = self._free.pop()
        else:
            worker = len(self.ticks)
            self.ticks.append(0)
            self.versions.append(0)
        self.change(worker)
        return WorkerRows(self, worker)

    def release(self, worker: int) -> None:
        self._free.append(worker)

    def change(self, worker: int) -> None:
        self.versions[worker] = next(self.changes)

    def running(self, workers: Sequence[int]) -> Running:
        """The rows of some workers, renumbered in this order."""
        numbering = np.full(len(self.ticks), -1, dtype=np.int64)
        numbering[list(workers)] = np.arange(len(workers))
        rows = len(self._row)
        columns = self._columns[:, :rows]
        place = numbering[columns[_WORKER]]
        here = np.flatnonzero(place >= 0)
        kept = columns.take(here, axis=1)
        ticks = np.array(self.ticks, dtype=np.int64)
        return Running(
            id=kept[_ID],
            worker=place[here],
            prompt_tokens=kept[_PROMPT],
            generated_tokens=kept[_GENERATED] + ticks[kept[_WORKER]],
            max_tokens=kept[_CAP],
            end_probability=self._end_probability[:rows][here],
            prefill_left=kept[_PREFILL],
            from_tokens=kept[_FROM],
        )

    def new_id(self) -> int:
        self._serial += 1
        return self._serial

    def add(
        self,
        row: tuple[int, int, int, int, int, int, int],
        end_probability: float | None,
    ) -> None:
        """Add a row: id, worker, values of ``WorkerRows.add`` (generated tokens less ticks)."""
        at = len(self._row)
        if at == self._columns.shape[1]:
            self._columns = np.concatenate((self._columns, np.zeros_like(self._columns)), axis=1)
            room = np.zeros_like(self._end_probability)
            self._end_probability = np.concatenate((self._end_probability, room))
        self.change(row[_WORKER])
        self._columns[:, at] = row
        self._end_probability[at] = np.nan if end_probability is None else end_probability
        self._row[row[_ID]] = at

    def remove(self, number: int) -> None:
        at, last = self._row.pop(number), len(self._row)
        self.change(int(self._columns[_WORKER, at]))
        if at != last:
            self._columns[:, at] = self._columns[:, last]
            self._end_probability[at] = self._end_probability[last]
            self._row[int(self._columns[_ID, at])] = at


class WorkerRows:
    """The rows of one worker."""

    def __init__(self, table: RunningTable, worker: int) -> None:
        self._table = table
        self._ticks = table.ticks
        self.worker = worker

    @property
    def version(self) -> int:
        return self._table.versions[self.worker]

    def change(self) -> None:
        """Mark its requests without rows as changed."""
        self._table.versions[self.worker] = next(self._table.changes)

    def tick(self) -> None:
        self._ticks[self.worker] += 1
        self._table.change(self.worker)

    def add(
        self,
        prompt_tokens: int,
        generated_tokens: int,
        prefill_left: int,
        max_tokens: int = NO_CAP,
        end_probability: float | None = None,
        number: int | None = None,
        from_tokens: int = 0,
    ) -> int:
        number = self._table.new_id() if number is None else number
        generated = generated_tokens - self._ticks[self.worker]
        known = (prompt_tokens, generated, max_tokens, prefill_left, from_tokens)
        self._table.add((number, self.worker, *known), end_probability)
        return number

    def new_id(self) -> int:
        return self._table.new_id()

    def remove(self, number: int) -> None:
        self._table.remove(number)
