"""A time by which something is to have happened, moved with every request at next to no cost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Deadline:
    """At most one at a time; its timer is set anew only where that is needed.

    A timer that fires before the deadline that has been set since is set again: a connection's
    deadlines are moved thousands of times before one of its timers fires.

    Args:
        loop: whose clock and timers.
        expired: called when a deadline has passed.
    """

    __slots__ = ("_at_s", "_expired", "_fires_s", "_loop", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, expired: Callable[[], None]) -> None:
        self._loop = loop
        self._expired = expired
        self._at_s: float | None = None
        self._fires_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def set(self, delay_s: float) -> None:
        """In place of the one before."""
        self._at_s = self._loop.time() + delay_s
        if self._timer is None:
            self._arm(self._at_s)
        elif self._at_s < self._fires_s:
            self._timer.cancel()
            self._arm(self._at_s)

    def clear(self) -> None:
        """There is none."""
        self._at_s = None

    def cancel(self) -> None:
        """The same, and no timer is left."""
        self._at_s = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, at_s: float) -> None:
        self._fires_s = at_s
        self._timer = self._loop.call_at(at_s, self._fire)

    def _fire(self) -> None:
        self._timer = None
        if self._at_s is None:
            return
        if self._loop.time() < self._at_s:
            self._arm(self._at_s)
            return
        self._at_s = None
        self._expired()
