import asyncio
import fcntl
import os
import threading
from pathlib import Path

from router.core.clock import Clock
from router.replicas.leading import running_clock


class FileLock:
    """The kernel's lock of a file (``flock``); a process that ends loses it at once.

    Its holder writes to the file to renew it. A file server that has given the lock to another
    machine, or does not answer, lets no write succeed.

    Who locks an empty file first waits for ``lease_s``: the holder of one that has been deleted may
    still rely on that.
    """

    period_s = 0.25

    def __init__(self, path: Path, lease_s: float, clock: Clock = running_clock) -> None:
        self.lease_s = lease_s
        self._path, self._clock = path, clock
        self._file: int | None = None
        self._since_s = 0.0  # when the file was opened
        self._released = False
        self._one = threading.Lock()
        self._under_way: asyncio.Future[str] | None = None

    async def attempt(self, name: str) -> str:
        """One at a time: a call of a file server that is gone takes as long as it likes."""
        if self._under_way is None or self._under_way.done():
            self._under_way = asyncio.ensure_future(asyncio.to_thread(self._attempt, name))
        return await asyncio.shield(self._under_way)

    async def look(self) -> str:
        return await asyncio.to_thread(lambda: _told(self._path.read_bytes()))

    async def release(self, name: str) -> None:
        """An attempt that is under way ends before."""
        self._released = True
        await asyncio.to_thread(self._close)

    async def aclose(self) -> None: ...

    def _attempt(self, name: str) -> str:
        with self._one:
            return "" if self._released else self._locked(name)

    def _locked(self, name: str) -> str:
        if self._file is None:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._since_s = self._clock()
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        except BlockingIOError:
            held = False
        if not self._is_there(self._file):
            os.close(self._file)  # others lock another file of this name
            self._file = None
            return ""
        if not held:
            return _told(os.pread(self._file, 256, 0))
        new = not os.fstat(self._file).st_size
        if new and self._clock() < self._since_s + self.lease_s:
            return ""
        os.pwrite(self._file, name.ljust(255).encode() + b"\n", 0)
        os.fsync(self._file)
        return name

    def _is_there(self, file: int) -> bool:
        try:
            return os.path.samestat(os.fstat(file), self._path.stat())
        except FileNotFoundError:
            return False

    def _close(self) -> None:
        with self._one:
            if self._file is not None:
                os.close(self._file)
                self._file = None


def _told(written: bytes) -> str:
    return written.decode(errors="replace").strip()
