"""Recordings as files: read whole, or only their requests, as a trace."""

from collections.abc import Iterator
from pathlib import Path

from loadgen.traces.gzipped import Bytes, opened
from router.recording.lines import LineReader, Recording, RequestLine, read

_BEGINNING = b'{"recording":'
# Stands for the rest of a truncated gzip file.
_BROKEN_OFF = b"{"


def load_recording(path: Path) -> Recording:
    """Read a recording, plain or gzipped; it may be truncated anywhere.

    Raises:
        InputError: the file cannot be read, or is no recording.
    """
    with opened(path, "recording") as file:
        return read(_lines(file), str(path))


def is_recording(file: Bytes) -> bool:
    """Whether the file begins like a recording; consumes nothing."""
    return file.peek(len(_BEGINNING)).startswith(_BEGINNING)


def recorded_requests(file: Bytes, name: str) -> Iterator[RequestLine]:
    """Yield the requests of a recording, in the order of their ends.

    Raises:
        InputError: as in ``recording.LineReader.read``.
    """
    for line in LineReader(name).read(_lines(file)):
        if isinstance(line, RequestLine):
            yield line


def _lines(file: Bytes) -> Iterator[bytes]:
    try:
        yield from file
    except EOFError:
        yield _BROKEN_OFF
