"""Attempts at workers, and their time limits."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from types import TracebackType

from router.core.errors import RecalledError, UpstreamTimeoutError
from router.core.queue.retry import Deadlines
from router.engines.http_client import Response

# Number of checks within the time for which a stream may be silent.
_LOOKS = 4


class Bound:
    """Like ``asyncio.Timeout``, but for any error, and free of cost without a time."""

    __slots__ = ("_cancelling", "_task", "_timer", "error")

    def __enter__(self) -> Bound:
        self.error: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.error is None:
            return
        alone = self._task.uncancel() <= self._cancelling
        if alone and kind is asyncio.CancelledError:
            raise self.error from None

    def within(self, seconds: float, error: Exception) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self.strike, error)

    def lift(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def strike(self, error: Exception) -> None:
        """The first error wins."""
        if self.error is None:
            self.error = error
            self._task.cancel()


class Attempt(Bound):
    """A request at a worker; Recalled- or UpstreamTimeoutError: ended before the first byte."""

    __slots__ = ("_deadlines", "_next_look", "_silent_looks", "_under_way", "response")

    def __init__(self, under_way: set[Attempt], deadlines: Deadlines) -> None:
        self.response: Response | None = None
        self._under_way = under_way
        self._deadlines = deadlines
        self._silent_looks = 0
        self._next_look: asyncio.TimerHandle | None = None

    def __enter__(self) -> Attempt:
        super().__enter__()
        if (limit_s := self._deadlines.first_byte_timeout_s) is not None:
            self.within(limit_s, UpstreamTimeoutError(f"no answer within {limit_s:g} s"))
        self._under_way.add(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._under_way.discard(self)
        if self._next_look is not None:
            self._next_look.cancel()
        super().__exit__(kind, raised, at)

    def note_started(self) -> None:
        # The task sees the error only at the loop's next turn; an answer may come in this one.
        if self.error is not None:
            raise self.error
        self.lift()

    def follow(self, response: Response) -> None:
        self.response = response
        if self._deadlines.stream_idle_timeout_s is not None:
            self._listen(self._deadlines.stream_idle_timeout_s)

    def recall(self, reason: str) -> None:
        self._under_way.discard(self)
        self.strike(RecalledError(reason))

    def _look(self, idle_s: float) -> None:
        # Checks at intervals: a timer for each chunk would cost more than the chunk.
        assert self.response is not None
        self._silent_looks = 0 if self.response.take_heard() else self._silent_looks + 1
        if self._silent_looks >= _LOOKS:
            self.response.break_off(UpstreamTimeoutError(f"silent for {idle_s:g} s"))
        else:
            self._listen(idle_s)

    def _listen(self, idle_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._next_look = loop.call_later(idle_s / _LOOKS, self._look, idle_s)


class Attempts:
    """``watchers`` get worker id, reason, and whether streams end too."""

    def __init__(self) -> None:
        self._of: defaultdict[str, set[Attempt]] = defaultdict(set)
        self.watchers: list[Callable[[str, str, bool], None]] = []

    def watch(self, worker_id: str, deadlines: Deadlines) -> Attempt:
        return Attempt(self._of[worker_id], deadlines)

    def recall(self, worker_id: str, reason: str) -> None:
        """End a worker's attempts without a first byte; they are retried elsewhere."""
        self._end(worker_id, reason, streams=False)

    def break_off(self, worker_id: str, reason: str) -> None:
        self._end(worker_id, reason, streams=True)

    def _end(self, worker_id: str, reason: str, *, streams: bool) -> None:
        for tell in self.watchers:
            tell(worker_id, reason, streams)
        for attempt in list(self._of[worker_id]):
            if attempt.response is None:
                attempt.recall(reason)
            elif streams:
                attempt.response.break_off(RecalledError(reason))
