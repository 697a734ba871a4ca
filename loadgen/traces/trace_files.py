"""Published trace formats: CSV and JSON lines, plain or gzipped, detected by content.

A new format is one row of ``FORMATS``. Recordings are detected too.
"""

import csv
import io
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import BinaryIO, cast

from loadgen.traces.recordings import Bytes, is_recording, opened, recorded_requests
from router.core.errors import InputError

# Ten times the longest context of any model; a larger number is no length.
MAX_TOKENS = 100_000_000

# Mooncake's, whose rows may have the ids of a prompt's blocks.
BLOCK_TOKENS = 512
_BLOCKS = "hash_ids"

Row = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    prompt_tokens: int
    output_tokens: int
    arrival_s: float | None = None  # None where the trace has lengths only
    # Ids of the prompt's blocks of ``block_tokens``; an id stands for all of the prompt up to its
    # block's end. Empty where the trace has none.
    blocks: tuple[int, ...] = ()
    block_tokens: int = BLOCK_TOKENS


def _whole(field: object) -> int:
    if isinstance(field, str) and "_" not in field:
        return int(field)
    if isinstance(field, int) and not isinstance(field, bool):
        return field
    raise ValueError


def _seconds(field: object) -> float:
    if isinstance(field, str) and "_" not in field:
        return float(field)
    if isinstance(field, int | float) and not isinstance(field, bool):
        return float(field)
    raise ValueError


def _date(field: object) -> float:
    """Seconds since 1970; the default zone is UTC, digits after microseconds are cut off."""
    stamp = datetime.fromisoformat(str(field).strip())
    return (stamp if stamp.tzinfo else stamp.replace(tzinfo=UTC)).timestamp()


@dataclass(frozen=True, slots=True)
class Format:
    """Columns of one published format."""

    name: str
    prompt: str
    output: str
    arrival: str | None = None  # column of the arrival time, None for lengths only
    # Function from a field of that column to seconds on the trace's own clock.
    to_seconds: Callable[[object], float] = _seconds

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that a file must have; further ones are allowed."""
        lengths = (self.prompt, self.output)
        return lengths if self.arrival is None else (self.arrival, *lengths)

    def read(self, row: Row) -> TraceRequest:
        """Parse one row."""
        output_tokens = _count(row, self.output, at_least=0)
        return TraceRequest(
            _count(row, self.prompt, at_least=1 if output_tokens else 0),
            output_tokens,
            None if self.arrival is None else _time(row, self.arrival, self.to_seconds),
            _block_ids(row),
        )


# The first match wins, so the format with more columns stands first.
FORMATS = (
    Format("BurstGPT", "Request tokens", "Response tokens", "Timestamp"),
    Format("length sample", "Request tokens", "Response tokens"),
    Format("Azure", "ContextTokens", "GeneratedTokens", "TIMESTAMP", _date),
    Format(
        *("Mooncake", "input_length", "output_length", "timestamp"),
        lambda field: _seconds(field) / 1000,
    ),
    Format("Vidur", "num_prefill_tokens", "num_decode_tokens"),
)


def read_requests(path: Path) -> tuple[str, tuple[TraceRequest, ...]]:
    """Name of the format, and usable requests in the file's order; failed ones have no output."""
    with opened(path, "trace file") as file:
        if is_recording(file):
            name, read = "recording", list(_recorded(path, file))
        else:
            name, read = _published(path, file)
    requests = tuple(request for request in read if request.output_tokens)
    if not requests:
        raise InputError(f"{path}: has no request with output tokens; give a trace with some")
    return name, requests


def _recorded(path: Path, file: Bytes) -> Iterator[TraceRequest]:
    """Yield the engine requests of a recording.

    Those of one client request share its output evenly. A client may request any number of outputs
    and get none: requests without output are left out.
    """
    for line in recorded_requests(file, str(path)):
        if max(line.prompt_tokens, line.output_tokens) > MAX_TOKENS:
            raise InputError(
                f"{path}: request {line.request} has more than {MAX_TOKENS} tokens; remove its line"
            )
        for output_tokens in line.outputs:
            yield TraceRequest(max(1, line.prompt_tokens), output_tokens, line.arrival_s)


def _published(path: Path, file: Bytes) -> tuple[str, list[TraceRequest]]:
    requests: list[TraceRequest] = []
    try:
        with io.TextIOWrapper(cast("BinaryIO", file), encoding="utf-8-sig", newline="") as lines:
            trace_format, rows = _table(path, enumerate(lines, start=1))
            for number, row in rows:
                try:
                    requests.append(trace_format.read(row))
                except ValueError as error:
                    raise _row_error(path, number, str(error)) from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text ({error.reason}); give a CSV file") from error
    return trace_format.name, requests


def _table(
    path: Path, lines: Iterator[tuple[int, str]]
) -> tuple[Format, Iterable[tuple[int, Row]]]:
    number, first = next(((n, line) for n, line in lines if line.strip()), (0, ""))
    if not first:
        raise InputError(f"{path}: is empty; give a CSV file with a header and rows, or JSON lines")
    if first.lstrip().startswith("{"):
        row = _json_row(path, number, first)
        rest = ((n, _json_row(path, n, line)) for n, line in lines if line.strip())
        return _recognise(path, number, row), chain([(number, row)], rest)
    reader = csv.reader(chain([first], (line for _, line in lines)))
    rows = _csv_rows(path, reader, start=number)
    _, header = next(rows, (number, []))
    columns = [column.strip() for column in header]
    return _recognise(path, number, columns), _by_column(path, rows, columns)


def _recognise(path: Path, number: int, columns: Collection[str]) -> Format:
    for trace_format in FORMATS:
        if set(trace_format.columns) <= set(columns):
            return trace_format
    nearest = min(FORMATS, key=lambda known: len(set(known.columns) - set(columns)))
    missing = [column for column in nearest.columns if column not in columns]
    known = "; ".join(f"{each.name}: {', '.join(each.columns)}" for each in FORMATS)
    raise InputError(
        f"{path}: row {number}: no column {', '.join(map(repr, missing))} in the header "
        f"{','.join(columns)[:200]!r}; name the columns as published ({known})"
    )


def _csv_rows(
    path: Path, reader: Iterable[list[str]], start: int
) -> Iterator[tuple[int, list[str]]]:
    number = start - 1
    try:
        for number, fields in enumerate(reader, start):
            if "".join(fields).strip() or len(fields) > 1:  # else a blank line
                yield number, fields
    except csv.Error as error:
        raise _row_error(path, number + 1, str(error)) from error


def _by_column(
    path: Path, rows: Iterable[tuple[int, list[str]]], columns: Collection[str]
) -> Iterator[tuple[int, Row]]:
    for number, fields in rows:
        if len(fields) != len(columns):
            raise _row_error(path, number, f"has {len(fields)} fields, the header {len(columns)}")
        yield number, dict(zip(columns, fields, strict=True))


def _json_row(path: Path, number: int, line: str) -> dict[str, object]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        problem = str(error).partition(":")[0]
        raise _row_error(path, number, f"is broken JSON ({problem})") from error
    if not isinstance(row, dict):
        raise _row_error(path, number, "is no JSON object")
    return row


def _row_error(path: Path, number: int, problem: str) -> InputError:
    return InputError(f"{path}: row {number}: {problem}; correct or remove the row")


def _field(row: Row, column: str, read: Callable[[object], float], kind: str) -> float:
    if column not in row:
        raise ValueError(f"no column {column!r}")
    try:
        number = read(row[column])
        if math.isfinite(number):
            return number
    except (ValueError, OverflowError):
        pass
    raise ValueError(f"column {column!r}: {repr(row[column])[:80]} is not a {kind}")


def _count(row: Row, column: str, at_least: int) -> int:
    count = int(_field(row, column, _whole, "whole number"))
    if count < at_least:
        raise ValueError(f"column {column!r}: {count} is less than {at_least}")
    if count > MAX_TOKENS:
        raise ValueError(f"column {column!r}: {count} is more than {MAX_TOKENS}")
    return count


def _block_ids(row: Row) -> tuple[int, ...]:
    ids = row.get(_BLOCKS, ())
    if not isinstance(ids, list | tuple) or not all(isinstance(id_, int) for id_ in ids):
        raise ValueError(f"column {_BLOCKS!r}: {str(ids)[:80]!r} is not a list of whole numbers")
    return tuple(ids)


def _time(row: Row, column: str, to_seconds: Callable[[object], float]) -> float:
    seconds = _field(row, column, to_seconds, "time")
    if seconds < 0:
        raise ValueError(f"column {column!r}: {row[column]!r} is a negative time")
    return seconds
