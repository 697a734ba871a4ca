"""Server-sent events: never cut one in two, and say an error inside a stream."""

from __future__ import annotations

import re

import msgspec

# Nothing inside an event's JSON can look like it: there a line end is written with a backslash.
_DONE = re.compile(rb"(?:^|\n)data: ?\[DONE\]\r?\n")
_ENDS = (b"\n\n", b"\r\n\r\n")


class EventStream:
    """Passes bytes on up to the last complete event, so that a stream can always be ended cleanly.

    Attributes:
        done: the closing ``[DONE]`` has been passed on.
        events: complete events passed on.
    """

    def __init__(self) -> None:
        self.done = False
        self.events = 0
        self._held: list[bytes] = []
        self._seam = b""

    def feed(self, data: bytes) -> bytes:
        """What can be passed on once these bytes have come; the same bytes, unchanged."""
        if self._held or not data.endswith(_ENDS):
            data = self._up_to_last_event(data)
        if data:
            self.events += data.startswith(b"data:") + data.count(b"\ndata:")
            self.done = self.done or (b"[DONE]" in data and _DONE.search(data) is not None)
        return data

    def rest(self) -> bytes:
        """Bytes of an event that has not ended."""
        return b"".join(self._held)

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


def _end_of_last_event(data: bytes) -> int:
    return max((data.rfind(end) + len(end) for end in _ENDS if end in data), default=0)


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


def error_event(message: str, kind: str, code: int) -> bytes:
    """The same inside a stream."""
    return b"data: " + error_body(message, kind, code) + b"\n\n"
