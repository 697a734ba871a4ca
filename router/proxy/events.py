"""Server-sent events: forwarded whole, and counted if they bear tokens."""

from __future__ import annotations

import re

from router.core.errors import UpstreamError

# An event's JSON cannot match: it escapes line ends.
_DONE = re.compile(rb"(?:^|[\r\n])data: ?\[DONE\][\r\n]")
# An empty line ends an event; a line ends with CR, LF or both. A CR after LF is usually followed by
# its LF, which is awaited.
BLANK = (b"\n\n", b"\n\r", b"\r\r")
ENDS = (b"\n\n", b"\r\r", b"\n\r\n", b"\r\r\n")
# Largest event in practice: a whole answer with its token ids, some MB.
MOST_EVENT_BYTES = 16 * 1024 * 1024
# A chat's first event and the one of include_usage, as vLLM writes them, bear no token.
_ROLE = b'"delta":{"role":"assistant","content":""'
_USAGE = b'"choices":[]'


class EventStream:
    """Forwards complete events only, so that a stream can always be ended cleanly.

    Attributes:
        done: whether the last event, usually ``[DONE]``, was forwarded.
        tokens: number of events with tokens, usually one each.
    """

    __slots__ = ("_held", "_held_bytes", "_seam", "done", "events", "tokens")

    def __init__(self) -> None:
        self.done = False
        self.events = 0
        self.tokens = 0
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._seam = b""

    def feed(self, data: bytes) -> bytes:
        """Add bytes; return those that can be forwarded now, unchanged."""
        events = self.cut(data)
        if events:
            self.count(events)
        return events

    @property
    def holds(self) -> bool:
        return bool(self._held)

    def cut(self, data: bytes) -> bytes:
        """Like ``feed``, without counting.

        Raises:
            UpstreamError: an event is too long.
        """
        if self._held or not data.endswith(ENDS):
            return self._up_to_last_event(data)
        return data

    def rest(self) -> bytes:
        return b"".join(self._held)

    def end(self, events: bytes) -> int | None:
        """Offset of a stream's last event, None if it is not there."""
        done = _DONE.search(events)
        return done and done.start() + events[done.start() :].startswith((b"\n", b"\r"))

    def count(self, data: bytes) -> None:
        self.events += _events_in(data)
        self.tokens += self.tokens_in(data)
        self.done = self.done or _ends(data)

    def tokens_in(self, data: bytes) -> int:
        return _events_in(data) - _ends(data) - data.count(_ROLE) - data.count(_USAGE)

    def _up_to_last_event(self, data: bytes) -> bytes:
        # An end may straddle the bytes held; only their last three are searched again.
        end = _end_of_last_event(self._seam + data)
        if not end:
            self._hold(data)
            return b""
        cut = end - len(self._seam)
        passed = b"".join((*self._held, data[:cut]))
        self._held, self._held_bytes, self._seam = [], 0, b""
        self._hold(data[cut:])
        return passed

    def _hold(self, data: bytes) -> None:
        if data:
            self._held.append(data)
            self._held_bytes += len(data)
            self._seam = (self._seam + data)[-3:]
            if self._held_bytes > MOST_EVENT_BYTES:
                self._held.clear()
                raise UpstreamError(f"an event has more than {MOST_EVENT_BYTES:,} bytes")


def _events_in(data: bytes) -> int:
    return data.startswith(b"data:") + data.count(b"\ndata:") + data.count(b"\rdata:")


def _ends(data: bytes) -> bool:
    return b"[DONE]" in data and _DONE.search(data) is not None


def _end_of_last_event(data: bytes) -> int:
    last = len(data) - data.endswith(b"\n\r")
    end = max(data.rfind(blank, 0, last) + 2 for blank in BLANK)
    if end < 2:
        return 0
    return end + (data[end - 1 : end + 1] == b"\r\n")


def check_end(stream: EventStream, framed: bool) -> None:
    """Check that an answer that has ended is complete.

    Unless HTTP ``framed`` it, a stream's last event must be there.

    Raises:
        UpstreamError: the answer is incomplete.
    """
    if not (framed or stream.done or stream.end(stream.rest() + b"\n") is not None):
        raise UpstreamError("the engine closed the connection before its answer's last event")


def with_comment(events: bytes, at: int | None, comment: bytes) -> bytes:
    """Insert a comment before a stream's last event, where clients stop reading."""
    at = len(events) if at is None else at
    return events[:at] + b": " + comment + b"\n\n" + events[at:]
