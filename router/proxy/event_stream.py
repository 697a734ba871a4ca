"""Server-sent events: forwarded whole, counted and timed."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from router.core.clock import Clock
from router.core.errors import UpstreamError
from router.core.stats import TokenStats

# An event's JSON cannot match: it escapes line ends.
_DONE = re.compile(rb"(?:^|[\r\n])data: ?\[DONE\][\r\n]")
# An empty line ends an event; a line ends with CR, LF or both.
BLANK = (b"\n\n", b"\n\r", b"\r\r")
ENDS = (b"\n\n", b"\r\r", b"\n\r\n", b"\r\r\n")
# A whole answer with its token ids may have some MB.
MOST_EVENT_BYTES = 16 * 1024 * 1024
# vLLM's first event of a chat, and that of include_usage, bear no token.
_ROLE = b'"delta":{"role":"assistant","content":""'
_USAGE = b'"choices":[]'

# Batch size; fewer reads if they are large.
_READS = 16
_BYTES = 2048


class EventStream:
    """Forwards complete events only; ``done``: with the last one; ``tokens``: of events."""

    __slots__ = ("_held_bytes", "_seam", "done", "events", "held", "tokens")

    def __init__(self) -> None:
        self.done = False
        self.events = 0
        self.tokens = 0
        self.held: list[bytes] = []
        self._held_bytes = 0
        self._seam = b""

    def feed(self, data: bytes) -> bytes:
        if self.held or not data.endswith(ENDS):
            data = self.cut(data)
        if data:
            self.count(data)
        return data

    def rest(self) -> bytes:
        return b"".join(self.held)

    def end(self, events: bytes) -> int | None:
        """Offset of the last event, None if it is not there."""
        done = _DONE.search(events)
        return done and done.start() + events[done.start() :].startswith((b"\n", b"\r"))

    def count(self, data: bytes) -> None:
        self.events += data.startswith(b"data:") + data.count(b"\ndata:") + data.count(b"\rdata:")
        self.tokens += self.tokens_in(data)
        self.done = self.done or (b"[DONE]" in data and _DONE.search(data) is not None)

    def tokens_in(self, data: bytes) -> int:
        events = data.startswith(b"data:") + data.count(b"\ndata:") + data.count(b"\rdata:")
        ends = b"[DONE]" in data and _DONE.search(data) is not None
        return events - ends - data.count(_ROLE) - data.count(_USAGE)

    def cut(self, data: bytes) -> bytes:
        """Like ``feed``, without counting; raises UpstreamError if an event is too long."""
        # An end may straddle the held bytes: their last three are searched again.
        end = _end_of_last_event(self._seam + data)
        if not end:
            self._hold(data)
            return b""
        cut = end - len(self._seam)
        passed = b"".join((*self.held, data[:cut]))
        self.held, self._held_bytes, self._seam = [], 0, b""
        self._hold(data[cut:])
        return passed

    def _hold(self, data: bytes) -> None:
        if data:
            self.held.append(data)
            self._held_bytes += len(data)
            self._seam = (self._seam + data)[-3:]
            if self._held_bytes > MOST_EVENT_BYTES:
                self.held.clear()
                raise UpstreamError(f"an event has more than {MOST_EVENT_BYTES:,} bytes")


def _end_of_last_event(data: bytes) -> int:
    last = len(data) - data.endswith(b"\n\r")
    end = max(data.rfind(blank, 0, last) + 2 for blank in BLANK)
    if end < 2:
        return 0
    return end + (data[end - 1 : end + 1] == b"\r\n")


def check_end(stream: EventStream, framed: bool) -> None:
    """Raises UpstreamError if an unframed answer ended before its last event."""
    if not (framed or stream.done or stream.end(stream.rest() + b"\n") is not None):
        raise UpstreamError("the engine closed the connection before its answer's last event")


def with_comment(events: bytes, at: int | None, comment: bytes) -> bytes:
    """Insert a comment before the last event, where clients stop reading."""
    at = len(events) if at is None else at
    return events[:at] + b": " + comment + b"\n\n" + events[at:]


@dataclass(slots=True)
class TokenTimes:
    """When a stream's tokens were forwarded; those of several ``answers`` are mixed: no ITL."""

    _stats: TokenStats
    _answers: int
    _tokens: int = 0
    _first_s: float = 0.0
    _last_s: float = 0.0

    def passed(self, tokens: int, now_s: float) -> None:
        if tokens <= self._tokens:
            return
        if not self._tokens:
            self._first_s = now_s
        elif self._answers == 1:
            self._stats.itl_s.observe(now_s - self._last_s)
        self._tokens, self._last_s = tokens, now_s

    def each(self, times_s: Sequence[float]) -> None:
        """One token at each of these times; at least one."""
        if not self._tokens:
            self._first_s = self._last_s = times_s[0]
            self._tokens, times_s = 1, times_s[1:]
        if self._answers == 1:
            observe, before_s = self._stats.itl_s.observe, self._last_s
            for time_s in times_s:
                observe(time_s - before_s)
                before_s = time_s
        self._tokens += len(times_s)
        self._last_s = times_s[-1] if times_s else self._last_s

    @property
    def tpot_s(self) -> float | None:
        """Answers are taken to be equally long; None: of one token."""
        tokens = self._tokens / self._answers
        return (self._last_s - self._first_s) / (tokens - 1) if tokens > 1 else None

    def end(self) -> None:
        if (tpot_s := self.tpot_s) is not None:
            self._stats.tpot_s.observe(tpot_s)


@dataclass(slots=True)
class Passing:
    """Forwards events at once and counts several reads together.

    With many streams, a stream's data has left the processor's caches by its next event.
    ``told`` gets the tokens so far.
    """

    _stream: EventStream
    _times: TokenTimes
    _send: Callable[[bytes], None]
    _clock: Clock
    _told: Callable[[int], None]
    _bytes: int = 0
    _reads: list[bytes] = field(default_factory=list)
    _at_s: list[float] = field(default_factory=list)

    def take(self, chunk: bytes) -> None:
        if self._stream.held or not chunk.endswith(ENDS):
            chunk = self._stream.cut(chunk)
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
