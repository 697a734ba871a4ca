from __future__ import annotations

import asyncio
from types import TracebackType


class Bound:
    """A block of a task that ``strike`` ends with an error, from outside.

    Like ``asyncio.Timeout``, but for any error, and free of cost where no time is set.
    """

    __slots__ = ("_cancelling", "_error", "_task", "_timer")

    def __init__(self) -> None:
        self._error: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self.lift()
        if self._error is None:
            return
        alone = self._task.uncancel() <= self._cancelling
        if alone and kind is asyncio.CancelledError:
            raise self._error from None

    @property
    def error(self) -> Exception | None:
        return self._error

    def within(self, seconds: float | None, error: Exception) -> None:
        """Strike after a time, if one is given; call this at most once."""
        if seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self.strike, error)

    def lift(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def strike(self, error: Exception) -> None:
        """End the block from another task; the first error wins."""
        if self._error is None:
            self._error = error
            self._task.cancel()
