"""``--record FILE``: a recording written as it happens, off the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, cast

from router.errors import ConfigError
from router.recording.recorder import Recorder

log = logging.getLogger(__name__)

# What a crash can lose, at most.
_FLUSH_S = 0.5


class RecordFile:
    """Writes the lines of a recorder to a file, gzipped if its name ends in .gz.

    A file that can be written no longer ends the recording and nothing else.

    Args:
        path: replaced if it exists.
        recorder: whose lines.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path, recorder: Recorder) -> None:
        self._path = path
        self._recorder = recorder
        self._thread = ThreadPoolExecutor(1, "record")
        try:
            self._file = _open(path)
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"--record: cannot write {path}: {reason}; give another") from None

    async def run(self) -> None:
        """Record until cancelled; what has been told by then is in the file afterwards."""
        listener = self._recorder.listen()
        loop = asyncio.get_running_loop()
        try:
            writable = True
            while writable:
                lines = listener.take()
                written = loop.run_in_executor(self._thread, self._write, lines)
                writable = await asyncio.shield(written)  # else lines may be lost at the end
                await asyncio.sleep(_FLUSH_S)
        finally:
            self._recorder.leave(listener)
            self._thread.submit(self._write, listener.take())
            self._thread.submit(self._close)
            self._thread.shutdown()

    def _write(self, lines: bytes) -> bool:
        """False: it is of no use to go on."""
        if self._file.closed:
            return False
        try:
            self._file.write(lines)
            self._file.flush()
        except OSError as error:
            reason = error.strerror or error
            log.warning("the recording %s ends here, it cannot be written: %s", self._path, reason)
            self._close()
            return False
        return True

    def _close(self) -> None:
        with contextlib.suppress(OSError):  # of lines whose failure has been told
            self._file.close()


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return cast("BinaryIO", gzip.open(path, "wb", compresslevel=5))
    return path.open("wb")
