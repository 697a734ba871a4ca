"""Files that may be gzipped, whatever their names."""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from router.core.errors import InputError

_MAGIC = b"\x1f\x8b"

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
