"""A fleet's own record of what it sent: a line of JSON for each request that it was asked.

A line is there once the answer is over, in the order of the ends. What was sent is what was handed
to the connection: of an answer that the other side broke off, less may have arrived.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from router.core.errors import InputError


class Sent(msgspec.Struct, frozen=True):
    """One line.

    Attributes:
        request: the ``X-Request-Id`` that came with it.
        rank: of the worker.
        began_s, ended_s: by the fleet's monotonic clock.
        status: that was answered.
        complete: the whole answer was sent.
        tokens: of each choice, sent in events that were whole.
        texts: what these say.
    """

    request: str
    rank: int
    began_s: float
    ended_s: float
    status: int
    complete: bool = False
    tokens: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()


class SentLog:
    """Writes lines as answers end; each is in the file at once.

    Args:
        path: None: nothing is written.

    Raises:
        InputError: the file cannot be written.
    """

    def __init__(self, path: Path | None) -> None:
        try:
            self._file = None if path is None else path.open("wb", buffering=0)
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}") from error

    def write(self, sent: Sent) -> None:
        """Add a line."""
        if self._file is not None and not self._file.closed:
            self._file.write(msgspec.json.encode(sent) + b"\n")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def read_sent(path: Path) -> list[Sent]:
    """Every line of such a file.

    Raises:
        InputError: the file cannot be read, or is not such a record.
    """
    try:
        return [msgspec.json.decode(line, type=Sent) for line in path.read_bytes().splitlines()]
    except (OSError, msgspec.DecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
