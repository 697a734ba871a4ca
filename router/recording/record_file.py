"""``--record FILE``: writes a recording as it happens, off the event loop."""

import asyncio
import contextlib
import gzip
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, cast

from router.core.errors import ConfigError
from router.recording.recorder import Recorder

log = logging.getLogger(__name__)

# The most that a crash can lose.
_FLUSH_S = 0.5


class RecordFile:
    """Overwrites a file with a recorder's lines, gzipped if its name ends in .gz.

    A write error ends the recording and nothing else; ConfigError: it cannot even begin.
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
        """Record until cancelled; the file then has all lines up to that time."""
        listener = self._recorder.listen()
        loop = asyncio.get_running_loop()
        try:
            writable = True
            while writable:
                lines = listener.take()
                written = loop.run_in_executor(self._thread, self._write, lines)
                writable = await asyncio.shield(written)  # a cancellation must not lose these lines
                await asyncio.sleep(_FLUSH_S)
        finally:
            self._recorder.leave(listener)
            self._thread.submit(self._write, listener.take())
            self._thread.submit(self._close)
            self._thread.shutdown()

    def _write(self, lines: bytes) -> bool:
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
        with contextlib.suppress(OSError):  # the failure of these lines is in the log
            self._file.close()


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return cast("BinaryIO", gzip.open(path, "wb", compresslevel=5))
    return path.open("wb")
