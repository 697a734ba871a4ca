"""Request traces: lengths and arrival times, read from the files that their publishers offer.

A file is recognised by its header, never by its name, and may be gzipped. A new CSV format is one
row of ``FORMATS``.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from router.errors import InputError

BUNDLED_TRACE = Path(__file__).parent / "data" / "burstgpt_lengths_8000.csv.gz"
GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace; ``arrival_s`` is None where the trace has lengths only."""

    prompt_tokens: int
    output_tokens: int
    arrival_s: float | None = None


@dataclass(frozen=True, slots=True)
class Format:
    """Columns of one published format.

    Attributes:
        arrival: column of the arrival time, None for a sample of lengths.
        to_seconds: turns a field of that column into seconds on the trace's own clock.
    """

    name: str
    prompt: str
    output: str
    arrival: str | None = None
    to_seconds: Callable[[str], float] = float

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that a header must have; it may have others."""
        lengths = (self.prompt, self.output)
        return lengths if self.arrival is None else (self.arrival, *lengths)

    def read(self, row: Mapping[str, str]) -> TraceRequest:
        """Read one row.

        Raises:
            ValueError: a field is missing, or no number that can stand there.
        """
        output_tokens = _count(row, self.output, at_least=0)
        return TraceRequest(
            _count(row, self.prompt, at_least=1 if output_tokens else 0),
            output_tokens,
            None if self.arrival is None else _seconds(row, self.arrival, self.to_seconds),
        )


# The first row whose columns a header has wins, so the one with more columns stands first.
FORMATS = (
    Format("BurstGPT", "Request tokens", "Response tokens", "Timestamp"),
    Format("length sample", "Request tokens", "Response tokens"),
)


@dataclass(frozen=True, slots=True)
class Trace:
    """The usable requests of one file, in its order.

    Attributes:
        name: the file's name.
        format: which row of ``FORMATS`` the header matched.
        skipped_failures: rows without output tokens, which stand for failed requests.
    """

    name: str
    format: str
    requests: tuple[TraceRequest, ...]
    skipped_failures: int = 0

    @property
    def max_output_tokens(self) -> int:
        """The longest output: a cap that cuts nothing."""
        return max(request.output_tokens for request in self.requests)

    def sample(self, count: int, seed: int) -> tuple[TraceRequest, ...]:
        """Draw requests without their arrival times.

        No row is drawn twice while there are enough of them; else with replacement.

        Args:
            count: how many.
            seed: the same seed draws the same requests in the same order.
        """
        rng = random.Random(seed)
        rows = self.requests
        drawn = rng.sample(rows, count) if count <= len(rows) else rng.choices(rows, k=count)
        return tuple(TraceRequest(row.prompt_tokens, row.output_tokens) for row in drawn)

    def earliest(self, count: int | None = None) -> tuple[TraceRequest, ...]:
        """The first requests in order of arrival, timed from the first one.

        Args:
            count: how many; None takes all.

        Raises:
            InputError: the trace has no arrival times, or fewer requests than asked for.
        """
        timed = [(row.arrival_s, row) for row in self.requests if row.arrival_s is not None]
        if not timed:
            raise InputError(
                f"{self.name}: has no arrival times; use --arrivals closed:N or poisson:RATE"
            )
        if count is not None and count > len(timed):
            raise InputError(
                f"{self.name}: has {len(timed)} usable requests, not {count}; lower --requests, "
                "or use --arrivals closed:N or poisson:RATE, which draw rows again"
            )
        timed.sort(key=lambda pair: pair[0])
        start_s = timed[0][0]
        return tuple(
            TraceRequest(row.prompt_tokens, row.output_tokens, at_s - start_s)
            for at_s, row in timed[:count]
        )


def load_trace(path: Path = BUNDLED_TRACE) -> Trace:
    """Read a trace file.

    Args:
        path: a CSV file in one of ``FORMATS``, plain or gzipped.

    Raises:
        InputError: the file cannot be read or a row is broken; names the file, the row (as a
            line number, the header is row 1) and the mend.
    """
    with _open_text(path) as lines:
        reader = csv.reader(lines)
        try:
            return _read_csv(path, reader)
        except csv.Error as error:
            raise _row_error(path, reader.line_num, str(error)) from error


def _read_csv(path: Path, reader: Iterator[list[str]]) -> Trace:
    header = next(reader, None)
    if header is None:
        raise InputError(f"{path}: is empty; give a CSV file with a header and rows")
    header = [column.strip() for column in header]
    trace_format = _recognise(path, header)
    requests, skipped = [], 0
    for number, row in _rows(path, reader, header):
        try:
            request = trace_format.read(row)
        except ValueError as error:
            raise _row_error(path, number, str(error)) from error
        if request.output_tokens:
            requests.append(request)
        else:
            skipped += 1
    if not requests:
        raise InputError(f"{path}: has no request with output tokens; give a trace with some")
    return Trace(path.name, trace_format.name, tuple(requests), skipped)


def _recognise(path: Path, header: Sequence[str]) -> Format:
    for trace_format in FORMATS:
        if set(trace_format.columns) <= set(header):
            return trace_format
    nearest = min(FORMATS, key=lambda known: len(set(known.columns) - set(header)))
    missing = [column for column in nearest.columns if column not in header]
    known = "; ".join(f"{each.name}: {', '.join(each.columns)}" for each in FORMATS)
    raise InputError(
        f"{path}: row 1: no column {', '.join(map(repr, missing))} in the header "
        f"{','.join(header)[:200]!r}; name the columns as published ({known})"
    )


def _rows(
    path: Path, reader: Iterator[list[str]], header: Sequence[str]
) -> Iterator[tuple[int, Mapping[str, str]]]:
    for number, fields in enumerate(reader, start=2):
        if not fields:  # a blank line
            continue
        if len(fields) != len(header):
            raise _row_error(path, number, f"has {len(fields)} fields, the header {len(header)}")
        yield number, dict(zip(header, fields, strict=True))


def _row_error(path: Path, number: int, problem: str) -> InputError:
    return InputError(f"{path}: row {number}: {problem}; correct or remove the row")


def _count(row: Mapping[str, str], column: str, at_least: int) -> int:
    try:
        count = int(row[column])
    except ValueError:
        raise ValueError(f"column {column!r}: {row[column]!r} is not a whole number") from None
    if count < at_least:
        raise ValueError(f"column {column!r}: {count} is less than {at_least}")
    return count


def _seconds(row: Mapping[str, str], column: str, to_seconds: Callable[[str], float]) -> float:
    try:
        seconds = to_seconds(row[column])
    except ValueError:
        raise ValueError(f"column {column!r}: {row[column]!r} is not a time") from None
    if not math.isfinite(seconds):
        raise ValueError(f"column {column!r}: {row[column]!r} is not a time")
    return seconds


@contextmanager
def _open_text(path: Path) -> Iterator[io.TextIOWrapper]:
    try:
        with path.open("rb") as raw:
            zipped = raw.peek(2).startswith(GZIP_MAGIC)
            binary = cast("BinaryIO", gzip.GzipFile(fileobj=raw) if zipped else raw)
            with io.TextIOWrapper(binary, encoding="utf-8-sig", newline="") as text:
                yield text
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path}: broken gzip data ({error}); fetch the file again") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text ({error.reason}); give a CSV file") from error
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; give the path of a trace file") from error
