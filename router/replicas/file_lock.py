import asyncio
import fcntl
import os
from pathlib import Path


class FileLock:
    """The kernel's lock of a file (``flock``); a process that ends loses it at once.

    Its holder writes to the file to renew it. A file server that has given the lock to another
    machine, or does not answer, lets no write succeed.
    """

    period_s = 0.25

    def __init__(self, path: Path, lease_s: float) -> None:
        self.lease_s = lease_s
        self._path = path
        self._file: int | None = None
        self._under_way: asyncio.Future[str] | None = None

    async def attempt(self, name: str) -> str:
        """One at a time: a call of a file server that is gone takes as long as it likes."""
        if self._under_way is None or self._under_way.done():
            self._under_way = asyncio.ensure_future(asyncio.to_thread(self._attempt, name))
        return await asyncio.shield(self._under_way)

    async def release(self, name: str) -> None:
        self._close()

    def _attempt(self, name: str) -> str:
        if self._file is not None and not os.path.samestat(os.fstat(self._file), self._path.stat()):
            self._close()  # others lock another file of this name
        if self._file is None:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return os.pread(self._file, 256, 0).decode(errors="replace").strip()
        os.pwrite(self._file, name.ljust(255).encode() + b"\n", 0)
        os.fsync(self._file)
        return name

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
