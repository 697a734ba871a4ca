"""A timer exact to some 50 microseconds, from the kernel's timer file descriptor.

Event loops round their own timers to milliseconds, a tenth or more of a decode step.
"""

import asyncio
import ctypes
import os
import time

_TFD_TIMER_ABSTIME = 1
_CLOCK_MONOTONIC = 1
_NANO = 1_000_000_000


def engine_now_s(time_scale: float) -> float:
    """An engine second is ``time_scale`` wall seconds."""
    return time.monotonic() / time_scale


class StepTimer:
    """Wakes one coroutine at a time of ``time.monotonic()``."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._expired)

    async def until(self, due_s: float) -> None:
        """A past time returns at once."""
        self._waiter = self._loop.create_future()
        due_ns = max(1, int(due_s * _NANO))
        spec = (ctypes.c_long * 4)(0, 0, due_ns // _NANO, due_ns % _NANO)
        if self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, spec, None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")
        await self._waiter

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _expired(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
