"""Record of what a fleet sent: one line of JSON per request.

Lines appear when answers end, in that order. "Sent" means handed to the connection: if the peer
disconnected, less may have arrived.
"""

from pathlib import Path

import msgspec

from router.core.errors import InputError


class Sent(msgspec.Struct, frozen=True):
    """One line."""

    request: str
    rank: int
    began_s: float  # by the fleet's monotonic clock, as its end
    ended_s: float
    status: int
    complete: bool = False
    tokens: tuple[int, ...] = ()  # tokens of each choice, sent in whole events
    texts: tuple[str, ...] = ()


class SentLog:
    """Writes lines as answers end; each is in the file at once. Without a path it writes none."""

    def __init__(self, path: Path | None) -> None:
        try:
            self._file = None if path is None else path.open("wb", buffering=0)
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}") from error

    def write(self, sent: Sent) -> None:
        if self._file is not None and not self._file.closed:
            self._file.write(msgspec.json.encode(sent) + b"\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
