"""Running requests of a group as arrays, updated row by row for the look-ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from router.core.forecast.forecast import NO_CAP, Running
from router.core.types import FREE_PLACE

_ID, _WORKER, _PROMPT, _GENERATED, _CAP, _PREFILL, _FROM, _PLACE = range(8)
_COLUMNS = 8
_FIRST_ROWS = 64
# Rows that places point to: no request; one that the router no longer counts.
_FREE, _UNCOUNTED = range(2)


def joined(one: Running, other: Running) -> Running:
    """Concatenated rows of both."""
    columns = (column.name for column in fields(Running))
    return Running(*(np.concatenate((getattr(one, i), getattr(other, i))) for i in columns))


class RunningTable:
    """One row per running engine request, unordered; changes cost O(1).

    Most of a worker's requests grow together: a row stores generated tokens less its worker's
    ``ticks`` then. ``versions`` has a number by worker that changes with its requests and never
    repeats: the number of ``changes`` by then.
    """

    def __init__(self) -> None:
        self.columns = np.zeros((_COLUMNS, _FIRST_ROWS), dtype=np.int64)
        self._end_probability = np.zeros(_FIRST_ROWS)
        self._rows = _UNCOUNTED + 1
        self._workers: list[WorkerRows] = []
        self.ticks: list[int] = []
        self.versions: list[int] = []
        self.changes = 0
        self._free: list[int] = []
        self._serial = 0

    def __len__(self) -> int:
        return self._rows - _UNCOUNTED - 1

    def worker(self) -> WorkerRows:
        if self._free:
            worker = self._workers[self._free.pop()]
        else:
            self.ticks.append(0)
            self.versions.append(0)
            worker = WorkerRows(self, len(self._workers))
            self._workers.append(worker)
        worker.change()
        return worker

    def release(self, worker: int) -> None:
        self._free.append(worker)

    def running(self, workers: Sequence[int]) -> Running:
        numbering = np.full(len(self.ticks), -1, dtype=np.int64)
        numbering[list(workers)] = np.arange(len(workers))
        rows = slice(_UNCOUNTED + 1, self._rows)
        columns = self.columns[:, rows]
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
            end_probability=self._end_probability[rows][here],
            prefill_left=kept[_PREFILL],
            from_tokens=kept[_FROM],
        )

    def new_id(self) -> int:
        self._serial += 1
        return self._serial

    def add(
        self, row: tuple[int, int, int, int, int, int, int, int], end_probability: float | None
    ) -> int:
        """As ``WorkerRows.add``, generated tokens less ticks; the index holds until a removal."""
        at = self._rows
        if at == self.columns.shape[1]:
            self.columns = np.concatenate((self.columns, np.zeros_like(self.columns)), axis=1)
            room = np.zeros_like(self._end_probability)
            self._end_probability = np.concatenate((self._end_probability, room))
        self.columns[:, at] = row
        self._end_probability[at] = np.nan if end_probability is None else end_probability
        self._rows += 1
        return at

    def remove(self, at: int) -> None:
        """Remove a row; the last one takes its index."""
        self._rows = last = self._rows - 1
        if at != last:
            self.columns[:, at] = self.columns[:, last]
            self._end_probability[at] = self._end_probability[last]
            owner = self._workers[int(self.columns[_WORKER, at])]
            owner.rows[self.columns[_PLACE, at]] = at


class WorkerRows:
    """The rows of one worker; ``rows``: the index of the row at each place of its requests."""

    def __init__(self, table: RunningTable, worker: int) -> None:
        self._table = table
        self._ticks = table.ticks
        self.worker = worker
        self.rows = np.zeros(_FIRST_ROWS, dtype=np.int64)

    @property
    def version(self) -> int:
        return self._table.versions[self.worker]

    def change(self) -> None:
        """Mark its requests without rows as changed."""
        self._table.changes += 1
        self._table.versions[self.worker] = self._table.changes

    def tick(self) -> None:
        self._ticks[self.worker] += 1
        self.change()

    def grow(self, growths: bytes) -> tuple[int, int, bool]:
        """Add what a ``growth`` tells.

        Returns the tokens gained by its counted requests, their number, and whether the places of
        all its requests are those that the message lists.
        """
        self.change()
        told = np.frombuffer(growths, dtype=np.uint8)
        rows = self.rows[: len(told)]
        gained = told[: len(rows)].astype(np.int64)
        free, counted = gained == FREE_PLACE, rows > _UNCOUNTED
        known = np.count_nonzero(self.rows) == len(told) - growths.count(FREE_PLACE)
        # Compared as bytes, in a fifth of the time.
        alike = known and (rows == _FREE).tobytes() == free.tobytes()
        gained[free] = 0
        gained *= counted
        self._table.columns[_GENERATED][rows] += gained
        return int(np.add.reduce(gained)), int(np.count_nonzero(counted)), alike

    def generated_tokens(self, place: int) -> int:
        return self._ticks[self.worker] + int(self._table.columns[_GENERATED, self.rows[place]])

    def resident_tokens(self) -> list[int]:
        """KV tokens of the request at each place, without prompt tokens still to be computed."""
        kept = self._table.columns[:, self.rows]
        tokens = kept[_PROMPT] + kept[_GENERATED] - kept[_PREFILL] + self._ticks[self.worker]
        return tokens.tolist()  # type: ignore[no-any-return]

    def free_place(self, told: int | None) -> int:
        """A place for a request: the told one, or the first that is free."""
        place = int(np.argmax(self.rows == _FREE)) if told is None else told
        if told is None and self.rows[place] != _FREE:
            place = len(self.rows)
        while place >= len(self.rows):
            self.rows = np.concatenate((self.rows, np.zeros_like(self.rows)))
        return place

    def taken(self, place: int) -> bool:
        return bool(self.rows[place] != _FREE)

    def add(
        self,
        prompt_tokens: int,
        generated_tokens: int,
        prefill_left: int,
        max_tokens: int = NO_CAP,
        end_probability: float | None = None,
        number: int | None = None,
        from_tokens: int = 0,
        place: int | None = None,
    ) -> int:
        number = self._table.new_id() if number is None else number
        place = self.free_place(place)
        generated = generated_tokens - self._ticks[self.worker]
        known = (prompt_tokens, generated, max_tokens, prefill_left, from_tokens, place)
        self.rows[place] = self._table.add((number, self.worker, *known), end_probability)
        self.change()
        return number

    def uncount(self, place: int) -> None:
        self.rows[place] = _UNCOUNTED

    def new_id(self) -> int:
        return self._table.new_id()

    def remove(self, place: int) -> None:
        row = int(self.rows[place])
        self.rows[place] = _FREE
        if row > _UNCOUNTED:
            self._table.remove(row)
            self.change()
