"""A record of every emulated step, as CSV (gzipped when the name ends in .gz).

One row per step. Columns: ``time_s`` wall clock (seconds since 1970) at the end of the step;
``stepped`` "all" for a barrier step, else the rank that stepped alone; ``step`` its number;
``step_s`` its length in engine seconds; ``lateness`` how late it ended, as a fraction of its
length. Then for each rank R, at the start of the step (current values for other ranks): ``load_R``
tokens, ``running_R`` and ``waiting_R`` requests, ``power_R`` watts.
"""

import csv
import gzip
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

from router.core.errors import InputError

_STEP_COLUMNS = ("time_s", "stepped", "step", "step_s", "lateness")
_WORKER_COLUMNS = ("load", "running", "waiting", "power")


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One row; the tuples hold one value per rank."""

    time_s: float
    stepped: str
    step: int
    step_s: float
    lateness: float
    load_tokens: tuple[int, ...]
    running: tuple[int, ...]
    waiting: tuple[int, ...]
    power_w: tuple[float, ...]


class RecordWriter:
    """Writes rows as steps end; ``close`` flushes them."""

    def __init__(self, path: Path, workers: int) -> None:
        try:
            self._file = _open_text(path, "w")
        except OSError as error:
            raise InputError(f"cannot write the record {path}: {error.strerror}") from error
        self._rows = csv.writer(self._file, lineterminator="\n")
        names = [f"{column}_{rank}" for rank in range(workers) for column in _WORKER_COLUMNS]
        self._rows.writerow([*_STEP_COLUMNS, *names])

    def write(self, record: StepRecord) -> None:
        cells: list[object] = [f"{record.time_s:.6f}", record.stepped, record.step]
        cells += [f"{record.step_s:.9g}", f"{record.lateness:.4g}"]
        for load, running, waiting, power_w in zip(
            record.load_tokens, record.running, record.waiting, record.power_w, strict=True
        ):
            cells += [load, running, waiting, f"{power_w:.1f}"]
        self._rows.writerow(cells)

    def close(self) -> None:
        self._file.close()


def read_record(path: Path) -> list[StepRecord]:
    """Read a record.

    Raises:
        InputError: no such file, or not a record; the message names the line.
    """
    try:
        with _open_text(path, "r") as file:
            return list(_read_rows(file, path))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the record {path}: {error}") from error


def _open_text(path: Path, mode: Literal["r", "w"]) -> TextIO:
    if path.suffix == ".gz":
        packed = gzip.GzipFile(path, mode, compresslevel=3)
        return io.TextIOWrapper(packed, encoding="utf-8", newline="")
    return path.open(mode, encoding="utf-8", newline="")


def _read_rows(lines: Iterable[str], path: Path) -> Iterator[StepRecord]:
    rows = csv.reader(lines)
    header = tuple(next(rows, ()))
    if header[: len(_STEP_COLUMNS)] != _STEP_COLUMNS:
        raise InputError(f"{path} is not a record of emulated steps: wrong header")
    for number, row in enumerate(rows, start=2):
        try:
            if len(row) != len(header):
                raise ValueError("wrong number of cells")
            first, kinds = len(_STEP_COLUMNS), len(_WORKER_COLUMNS)
            load, running, waiting, power = (row[first + kind :: kinds] for kind in range(kinds))
            yield StepRecord(
                time_s=float(row[0]),
                stepped=row[1],
                step=int(row[2]),
                step_s=float(row[3]),
                lateness=float(row[4]),
                load_tokens=tuple(map(int, load)),
                running=tuple(map(int, running)),
                waiting=tuple(map(int, waiting)),
                power_w=tuple(map(float, power)),
            )
        except ValueError as error:
            raise InputError(f"{path}, line {number}: {error}") from error
