from __future__ import annotations

import asyncio
from collections.abc import Callable


class Deadline:
    """At most one deadline, moved without a new timer.

    A timer that fires early is set again. A connection's deadlines move thousands of times before
    one of its timers fires.
    """

    __slots__ = ("_at_s", "_expired", "_fires_s", "_loop", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, expired: Callable[[], None]) -> None:
        self._loop = loop
        self._expired = expired
        self._at_s: float | None = None
        self._fires_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def set(self, delay_s: float) -> None:
        self._at_s = self._loop.time() + delay_s
        if self._timer is None:
            self._arm(self._at_s)
        elif self._at_s < self._fires_s:
            self._timer.cancel()
            self._arm(self._at_s)

    # The timer stays for the next deadline; ``cancel`` removes it.
    def clear(self) -> None:
        self._at_s = None

    def cancel(self) -> None:
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
