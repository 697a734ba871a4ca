"""Files that may be gzipped, and recordings in them: whole, or their requests as a trace."""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from router.core.errors import InputError
from router.recording.lines import LineReader, Recording, RequestLine, read

_MAGIC = b"\x1f\x8b"
_BEGINNING = b'{"recording":'
# Stands for the rest of a truncated gzip file.
_BROKEN_OFF = b"{"

Bytes = io.BufferedReader | gzip.GzipFile


@contextmanager
def opened(path: Path, kind: str) -> Iterator[Bytes]:
    """Open a file for reading, unpacked.

    Raises:
        InputError: the file cannot be read; this includes errors of reads within the block.
    """
    try:
        with path.open("rb") as raw:
            zipped = raw.peek(len(_MAGIC)).startswith(_MAGIC)
            yield gzip.GzipFile(fileobj=raw) if zipped else raw
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path}: broken gzip data ({error}); fetch the file again") from error
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; give the path of a {kind}") from error


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
