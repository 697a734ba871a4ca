"""Server-sent events: never cut one in two, and count those that bear tokens."""

from __future__ import annotations

import re

import msgspec

from router.errors import UpstreamError

# Nothing inside an event's JSON can look like it: there a line end is written with a backslash.
_DONE = re.compile(rb"(?:^|[\r\n])data: ?\[DONE\][\r\n]")
# An empty line ends an event; a line ends with CR, LF or both. After LF a CR has its LF mostly,
# which is waited for.
BLANK = (b"\n\n", b"\n\r", b"\r\r")
ENDS = (b"\n\n", b"\r\r", b"\n\r\n", b"\r\r\n")
# Of one event; the largest that engines send is a whole answer with its token ids, some MB.
MOST_EVENT_BYTES = 16 * 1024 * 1024
# A chat's first event, and the one of include_usage, as vLLM writes them: neither bears a token.
_ROLE = b'"delta":{"role":"assistant","content":""'
_USAGE = b'"choices":[]'


class EventStream:
    """Passes bytes on up to the last complete event, so that a stream can always be ended cleanly.

    Attributes:
        done: its last event, ``[DONE]`` mostly, has been passed on.
        events: complete events passed on.
        tokens: those of them that bear tokens, mostly one each.
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
        """What can be passed on once these bytes have come; the same bytes, unchanged."""
        events = self.cut(data)
        if events:
            self.count(events)
        return events

    @property
    def holds(self) -> bool:
        """There are bytes of an event that has not ended."""
        return bool(self._held)

    def cut(self, data: bytes) -> bytes:
        """See ``feed``; what can be passed on is not counted yet.

        Raises:
            UpstreamError: an event is too long.
        """
        if self._held or not data.endswith(ENDS):
            return self._up_to_last_event(data)
        return data

    def rest(self) -> bytes:
        """Bytes of an event that has not ended."""
        return b"".join(self._held)

    def end(self, events: bytes) -> int | None:
        """Where the last event of a stream begins among these, None if it is not there."""
        done = _DONE.search(events)
        return done and done.start() + events[done.start() :].startswith((b"\n", b"\r"))

    def count(self, data: bytes) -> None:
        """Complete events are passed on."""
        self.events += _events_in(data)
        self.tokens += self.tokens_in(data)
        self.done = self.done or _ends(data)

    def tokens_in(self, data: bytes) -> int:
        """Those of complete events."""
        return _events_in(data) - _ends(data) - data.count(_ROLE) - data.count(_USAGE)

    def _up_to_last_event(self, data: bytes) -> bytes:
        # An end may lie across the seam to the bytes held; those are not searched again.
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
    """See whether an answer that has ended is whole.

    Args:
        stream: what came of it.
        framed: it said where it ends; else it is whole with the last event of a stream only.

    Raises:
        UpstreamError: it is not.
    """
    if not (framed or stream.done or stream.end(stream.rest() + b"\n") is not None):
        raise UpstreamError("the engine closed the connection before its answer's last event")


def with_comment(events: bytes, at: int | None, comment: bytes) -> bytes:
    """The same events with a comment before the last of a stream, for which clients look."""
    at = len(events) if at is None else at
    return events[:at] + b": " + comment + b"\n\n" + events[at:]


def error_body(message: str, kind: str, code: int, param: str | None = None) -> bytes:
    """An error as OpenAI's clients expect it.

    Args:
        message: what went wrong and what to do.
        kind: the error's type, in vLLM's names.
        code: HTTP status.
        param: the offending field.
    """
    error = {"message": message, "type": kind, "param": param, "code": code}
    return msgspec.json.encode({"error": error})
