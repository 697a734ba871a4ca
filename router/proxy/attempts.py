"""Attempts under way, each a request at a worker, and what ends one before its time."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable

from router.deadlines import Deadlines
from router.engines.upstream import Response
from router.errors import RecalledError, UpstreamTimeoutError

# A stream is looked at so many times in the time for which it may be silent.
_LOOKS = 4


class _Attempt:
    """A request at a worker; ``response`` from its first byte on, unless it was recalled before."""

    def __init__(self, timeout: asyncio.Timeout, deadlines: Deadlines) -> None:
        self.response: Response | None = None
        self.recalled: RecalledError | None = None
        self._timeout = timeout
        self._deadlines = deadlines
        self._silent_looks = 0
        self._next_look: asyncio.TimerHandle | None = None

    def note_started(self, response: Response) -> None:
        """The first byte is there; raises what recalled the attempt, if that came before.

        The timeout strikes at the event loop's next turn, and an answer may come in this one.
        """
        if self.recalled is not None:
            raise self.recalled
        self.response = response
        self._timeout.reschedule(None)
        self._listen(self._deadlines.idle_s)

    def recall(self, reason: str) -> None:
        """Break it off; it has no first byte yet, and has not been recalled."""
        self.recalled = RecalledError(reason)
        if not self._timeout.expired():
            self._timeout.reschedule(0)

    def end(self) -> None:
        """It is over."""
        if self._next_look is not None:
            self._next_look.cancel()

    def late(self) -> Exception:
        """Why it was broken off before its first byte."""
        within = f"no answer within {self._deadlines.first_byte_s or 0:g} s"
        return self.recalled or UpstreamTimeoutError(within)

    def _look(self, idle_s: float) -> None:
        """Ask for bytes now and then: a timer for each chunk would cost more than the chunk."""
        assert self.response is not None
        self._silent_looks = 0 if self.response.take_heard() else self._silent_looks + 1
        if self._silent_looks >= _LOOKS:
            self.response.break_off(UpstreamTimeoutError(f"silent for {idle_s:g} s"))
        else:
            self._listen(idle_s)

    def _listen(self, idle_s: float | None) -> None:
        if idle_s is not None:
            loop = asyncio.get_running_loop()
            self._next_look = loop.call_later(idle_s / _LOOKS, self._look, idle_s)


class Attempts:
    """Attempts under way, by worker, so that those at a worker that is out of use can be ended."""

    def __init__(self) -> None:
        self._of: defaultdict[str, set[_Attempt]] = defaultdict(set)

    @contextlib.asynccontextmanager
    async def watch(
        self, worker_id: str, deadlines: Deadlines
    ) -> AsyncIterator[Callable[[Response], None]]:
        """Around an attempt; yields what is to be given its response before its first byte goes on.

        Raises:
            RecalledError: the attempt was recalled before that.
            UpstreamTimeoutError: no first byte within its time.
        """
        attempts = self._of[worker_id]
        try:
            async with asyncio.timeout(deadlines.first_byte_s) as timeout:
                attempt = _Attempt(timeout, deadlines)
                attempts.add(attempt)
                try:
                    yield attempt.note_started
                finally:
                    attempt.end()
                    attempts.discard(attempt)
        except TimeoutError:
            raise attempt.late() from None

    def recall(self, worker_id: str, reason: str) -> None:
        """Break off those without a first byte, which are then made elsewhere."""
        attempts = self._of[worker_id]
        for attempt in [one for one in attempts if one.response is None]:
            attempts.remove(attempt)
            attempt.recall(reason)

    def break_off(self, worker_id: str, reason: str) -> None:
        """The same, and end the streams that have begun."""
        self.recall(worker_id, reason)
        for attempt in self._of[worker_id]:
            if attempt.response is not None:
                attempt.response.break_off(RecalledError(reason))
