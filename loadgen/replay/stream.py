"""A streamed completion, read cheaply: only the last events are parsed as JSON."""

from dataclasses import dataclass, field

import msgspec

DATA = b"data:"
DONE = b"[DONE]"
CONTENT = b'"text"'
ABSENT = (b"", b"null")
# An event is parsed only if it may be the usage or an error. Quotes inside JSON strings are
# escaped, so generated text never contains the quoted marks. It can contain the end mark, hence the
# line check.
REMARKABLE = (b'"completion_tokens"', b'"error"', DONE)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()
    message: str | None = None
    object: str | None = None


_decoder = msgspec.json.Decoder(_Event)
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


@dataclass(slots=True)
class CompletionStream:
    """Parser of a body that arrives in arbitrary pieces."""

    first_s: float | None = None
    # Gaps between arrivals of content; an arrival may carry several events, an event several
    # tokens.
    gaps_s: list[float] = field(default_factory=list)
    output_tokens: int | None = None  # tokens in the usage event; None until then
    # Tokens of the prompt that the engine had cached, if the event tells.
    cached_tokens: int | None = None
    done: bool = False
    error: str | None = None  # message of an error event, or the problem with an event
    _last_s: float = 0.0
    _rest: bytes = b""

    def feed(self, chunk: bytes, now_s: float) -> None:
        """Parse the next bytes, which arrived at ``now_s``."""
        if self._rest:
            chunk = self._rest + chunk
            self._rest = b""
        if not chunk.endswith(b"\n"):
            cut = chunk.rfind(b"\n") + 1
            chunk, self._rest = chunk[:cut], chunk[cut:]
        if CONTENT in chunk:
            if self.first_s is None:
                self.first_s = now_s
            else:
                self.gaps_s.append(now_s - self._last_s)
            self._last_s = now_s
        if any(mark in chunk for mark in REMARKABLE):
            for line in chunk.split(b"\n"):
                if not line.startswith(DATA):
                    continue
                payload = line[len(DATA) :].strip()
                if payload == DONE:
                    self.done = True
                elif any(mark in payload for mark in REMARKABLE):
                    self._event(payload)

    def _event(self, payload: bytes) -> None:
        try:
            event = _decoder.decode(payload)
        except UNREADABLE as error:
            self.error = f"broken event: {error}"
            return
        if event.usage is not None:
            self.output_tokens = event.usage.completion_tokens
            if event.usage.prompt_tokens_details is not None:
                self.cached_tokens = event.usage.prompt_tokens_details.cached_tokens
        if bytes(event.error) not in ABSENT:
            self.error = f"error event: {error_message(bytes(payload))}"
        elif event.object == "error":
            self.error = f"error event: {event.message}"


class _ErrorBody(msgspec.Struct):
    message: str = ""
    error: msgspec.Raw = msgspec.Raw()


def error_message(body: bytes) -> str:
    """The message of an OpenAI error body, or the start of any other body."""
    try:
        outer = msgspec.json.decode(body, type=_ErrorBody)
        if bytes(outer.error) not in ABSENT:
            outer = msgspec.json.decode(outer.error, type=_ErrorBody)
    except UNREADABLE:
        return body[:200].decode(errors="replace")
    return outer.message or body[:200].decode(errors="replace")
