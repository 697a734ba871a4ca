"""Server-sent events: never cut one in two, and count those that bear tokens."""

from __future__ import annotations

import re

import msgspec

# Nothing inside an event's JSON can look like it: there a line end is written with a backslash.
_DONE = re.compile(rb"(?:^|\n)data: ?\[DONE\]\r?\n")
ENDS = (b"\n\n", b"\r\n\r\n")
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

    __slots__ = ("_held", "_seam", "done", "events", "tokens")

    def __init__(self) -> None:
        self.done = False
        self.events = 0
        self.tokens = 0
        self._held: list[bytes] = []
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
        """See ``feed``; what can be passed on is not counted yet."""
        if self._held or not data.endswith(ENDS):
            return self._up_to_last_event(data)
        return data

    def rest(self) -> bytes:
        """Bytes of an event that has not ended."""
        return b"".join(self._held)

    def end(self, events: bytes) -> int | None:
        """Where the last event of a stream begins among these, None if it is not there."""
        done = _DONE.search(events)
        return done and done.start() + events[done.start() :].startswith(b"\n")

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
        cut = _end_of_last_event(self._seam + data) - len(self._seam)
        if cut <= 0:
            self._hold(data)
            return b""
        passed = b"".join((*self._held, data[:cut]))
        self._held, self._seam = [], b""
        self._hold(data[cut:])
        return passed

    def _hold(self, data: bytes) -> None:
        if data:
            self._held.append(data)
            self._seam = (self._seam + data)[-3:]


def _events_in(data: bytes) -> int:
    return data.startswith(b"data:") + data.count(b"\ndata:")


def _ends(data: bytes) -> bool:
    return b"[DONE]" in data and _DONE.search(data) is not None


def _end_of_last_event(data: bytes) -> int:
    return max((data.rfind(end) + len(end) for end in ENDS if end in data), default=0)


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
