from __future__ import annotations

from collections.abc import Callable

from router.core.clock import Clock
from router.proxy.events import BLANK, ENDS, EventStream
from router.proxy.token_times import TokenTimes

# Batch size; fewer reads if they are large and may hold many tokens.
_READS = 16
_BYTES = 2048


class Passing:
    """Forwards a stream's events at once and counts several reads together.

    With many streams, a stream's data has left the processor's caches by its next event. Counting
    in batches costs a fraction.

    Args:
        clock: seconds, monotonic.
        told: callback with the tokens so far, after each batch.
    """

    __slots__ = (
        "_at_s",
        "_bytes",
        "_clock",
        "_held",
        "_reads",
        "_send",
        "_stream",
        "_times",
        "_told",
    )

    def __init__(
        self,
        stream: EventStream,
        times: TokenTimes,
        send: Callable[[bytes], None],
        clock: Clock,
        told: Callable[[int], None],
    ) -> None:
        self._stream = stream
        self._times = times
        self._send = send
        self._clock = clock
        self._told = told
        self._held = stream.holds
        self._bytes = 0
        self._reads: list[bytes] = []
        self._at_s: list[float] = []

    def take(self, chunk: bytes) -> None:
        if self._held or not chunk.endswith(ENDS):
            chunk = self._stream.cut(chunk)
            self._held = self._stream.holds
            if not chunk:
                return
        self._send(chunk)
        self._reads.append(chunk)
        self._at_s.append(self._clock())
        self._bytes += len(chunk)
        if len(self._reads) == _READS or self._bytes >= _BYTES:
            self.count()

    def count(self) -> None:
        if not self._reads:
            return
        stream, times, before = self._stream, self._times, self._stream.tokens
        reads = len(self._reads)
        events = b"".join(self._reads)
        stream.count(events)
        # Each read ends an event, so equal counts mean one event in each.
        if stream.tokens - before == reads == sum(map(events.count, BLANK)):
            times.each(self._at_s)
        else:
            for read, at_s in zip(self._reads, self._at_s, strict=True):
                before += stream.tokens_in(read)
                times.passed(before, at_s)
        self._bytes = 0
        self._reads.clear()
        self._at_s.clear()
        self._told(stream.tokens)
