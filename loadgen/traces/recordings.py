"""Recordings as files: read whole, or their requests as a trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from loadgen.traces.gzipped import Bytes, opened
from router.recording.lines import LineReader, Recording, RequestLine, read

_BEGINNING = b'{"recording":'
# Stands for the rest of a gzipped file that breaks off.
_BROKEN_OFF = b"{"


def load_recording(path: Path) -> Recording:
    """Read a recording, plain or gzipped; it may break off anywhere.

    Raises:
        InputError: it cannot be read, or is none.
    """
    with opened(path, "recording") as file:
        return read(_lines(file), str(path))


def is_recording(file: Bytes) -> bool:
    """Whether it begins like one; nothing is read of it."""
    return file.peek(len(_BEGINNING)).startswith(_BEGINNING)


def recorded_requests(file: Bytes, name: str) -> Iterator[RequestLine]:
    """The requests of a recording, in the order of their ends.

    Raises:
        InputError: see ``recording.LineReader.read``.
    """
    for line in LineReader(name).read(_lines(file)):
        if isinstance(line, RequestLine):
            yield line


def _lines(file: Bytes) -> Iterator[bytes]:
    try:
        yield from file
    except EOFError:
        yield _BROKEN_OFF
