from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from router.http.refusal import error_body
from router.proxy.answers import Answer
from router.proxy.event_stream import EventStream
from router.proxy.json_fields import with_field


class NamedEventStream(EventStream):
    """Its events have names; it ends without ``[DONE]``.

    Text cannot imitate a name: JSON escapes line ends.

    Args:
        bearing: end of the line that names an event with a token, as vLLM writes it.
        bare: data of such an event without a token.
        last: lines that name a stream's last event.
    """

    __slots__ = ("_bare", "_bearing", "_last")

    def __init__(self, bearing: bytes, bare: bytes | None, last: tuple[bytes, ...]) -> None:
        super().__init__()
        self._bearing = bearing
        self._bare = bare
        self._last = last

    def end(self, events: bytes) -> int | None:
        ends = [line + end for line in self._last for end in (b"\n", b"\r")]
        found = [at for line in ends if (at := events.find(line)) >= 0]
        return min(found, default=None)

    def count(self, data: bytes) -> None:
        super().count(data)
        self.done = self.done or self.end(data) is not None

    def tokens_in(self, data: bytes) -> int:
        bare = 0 if self._bare is None else data.count(self._bare)
        return data.count(self._bearing + b"\n") + data.count(self._bearing + b"\r") - bare


@dataclass(frozen=True, slots=True)
class Dialect:
    """Format of an endpoint that generates."""

    stream: Callable[[], EventStream]
    # Made from message, type, status and events before.
    error_event: Callable[[str, str, int, int], bytes]
    typed_errors: bool = False  # clients expect ``"type": "error"``
    names_response: bool = False  # the engine takes the request id from the body, not a header

    def error(self, answer: Answer) -> Answer:
        return replace(answer, body=_typed(answer.body)) if self.typed_errors else answer

    def body_up(self, body: bytes, request_id: str) -> bytes:
        return with_field(body, "request_id", f"resp_{request_id}") if self.names_response else body


def _typed(body: bytes) -> bytes:
    error = msgspec.json.decode(body)["error"]
    told = {"type": error["type"], "message": error["message"]}
    return msgspec.json.encode({"type": "error", "error": told})


def _completion_error(message: str, kind: str, code: int, events: int) -> bytes:
    return b"data: " + error_body(message, kind, code) + b"\n\n"


def _messages_error(message: str, kind: str, code: int, events: int) -> bytes:
    return b"event: error\ndata: " + _typed(error_body(message, kind, code)) + b"\n\n"


def _responses_error(message: str, kind: str, code: int, events: int) -> bytes:
    # OpenAI's client raises on ``error``; the other fields are the interface's own.
    error = {"message": message, "type": kind, "param": None, "code": code}
    told = {"type": "error", "sequence_number": events, "code": kind, "message": message}
    data = msgspec.json.encode({**told, "param": None, "error": error})
    return b"event: error\ndata: " + data + b"\n\n"


_ENDINGS = tuple(b"event: response." + how for how in (b"completed", b"incomplete", b"failed"))
_BARE = b'"delta":{"type":"signature_delta"'

COMPLETIONS = Dialect(EventStream, _completion_error)
RESPONSES = Dialect(
    partial(NamedEventStream, b".delta", None, _ENDINGS), _responses_error, names_response=True
)
MESSAGES = Dialect(
    partial(NamedEventStream, b"block_delta", _BARE, (b"event: message_stop",)),
    _messages_error,
    typed_errors=True,
)
