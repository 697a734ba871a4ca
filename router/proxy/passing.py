"""Events of a stream on their way to the client."""

from __future__ import annotations

from collections.abc import Callable

from router.clock import Clock
from router.proxy.events import BLANK, ENDS, EventStream
from router.proxy.token_times import TokenTimes

# Counted are so many reads, or less if they are so large that there may be many tokens in them.
_READS = 16
_BYTES = 2048


class Passing:
    """Passes the events of a stream on as they come, and counts them some reads later.

    Where there are many streams, what belongs to one has left the processor's caches by the time of
    its next event: to count several reads at once costs a fraction of counting each.

    Args:
        stream: counts events and tokens.
        times: of the tokens.
        send: takes events.
        clock: seconds, monotonic.
        told: called with the tokens so far whenever some have been counted.
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
        """Bytes of the answer; see ``Sink``."""
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
        """Count what has been passed on."""
        if not self._reads:
            return
        stream, times, before = self._stream, self._times, self._stream.tokens
        reads = len(self._reads)
        events = b"".join(self._reads)
        stream.count(events)
        # Each read has ended an event, so that as many ends are one in each.
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
