"""Envoy's external processing: the endpoint picker of gateways, protocol 1.0.

The request's body comes through here, and is held until there is a worker. An answer's body comes
only if the gateway sends it; then its tokens are counted, and its end is known.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Iterator, MutableSet
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

from envoy.config.core.v3.base_pb2 import HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf.duration_pb2 import Duration
from starlette.types import Scope

from router.core.errors import (
    EvenstepError,
    InvalidRequestError,
    NoWorkerError,
    TooLargeError,
    UpstreamError,
)
from router.core.types import Outcome
from router.pick.pick import DESTINATION, Pick, Told
from router.pick.picks import SUBSET, Picks
from router.proxy.answers import Answer, Header, error_answer, streams, tokens_of
from router.proxy.client_request import head_of
from router.proxy.endpoints import dialect_of
from router.proxy.event_stream import EventStream

log = logging.getLogger(__name__)

NAME = "envoy.service.ext_proc.v3.ExternalProcessor"
Answered = pb.ProcessingResponse

_DUPLEX, _BUFFERED = ProcessingMode.FULL_DUPLEX_STREAMED, ProcessingMode.BUFFERED
_NAMESPACE, _HINT = "envoy.lb", "envoy.lb.subset_hint"
# A message has at most 64 KiB.
_PIECE_BYTES = 62_000
_ADDRESS = "upstream.address"


class ExternalProcessor:
    """The service; ``tasks``: those of open requests, which the server waits for at its end."""

    def __init__(
        self, picks: Picks, tasks: MutableSet[Any], most_wait_s: float, most_bytes: int
    ) -> None:
        self._picks = picks
        self._tasks = tasks
        self._bounds = most_wait_s, most_bytes

    async def Process(  # noqa: N802 - as gRPC has it
        self, messages: AsyncIterator[Any], _: Any
    ) -> AsyncIterator[Any]:
        """One request; an error of it is an immediate answer."""
        stream, task = _Stream(self._picks, *self._bounds), asyncio.current_task()
        self._tasks.add(task)
        cancelled = True
        try:
            async for message in messages:
                async for answer in stream.take(message):
                    yield answer
                if stream.refused:
                    break
            cancelled = False
        except asyncio.CancelledError:
            if not (self._picks.closed and stream.waits):
                raise
            yield stream.refusal(NoWorkerError("the router is ending; retry"))
        finally:
            self._tasks.discard(task)
            stream.close(cancelled=cancelled)


class _Stream:
    """One request, from its head on."""

    def __init__(self, picks: Picks, most_wait_s: float, most_bytes: int) -> None:
        self._picks = picks
        self._most_wait_s, self._most_bytes = most_wait_s, most_bytes
        self._modes = _DUPLEX, ProcessingMode.NONE  # of the bodies of request and answer
        self._body = bytearray()
        self._scope: Scope = {}
        self._pick: Pick | None = None
        self._events: EventStream | None = None
        self._told = Told(0)
        self.refused = self.waits = False

    async def take(self, message: Any) -> AsyncIterator[Any]:
        """Answers to a message."""
        kind = message.WhichOneof("request")
        try:
            if kind.startswith("request"):
                async for answer in self._read(kind, message):
                    yield answer
            else:
                yield self._look(kind, message)
        except EvenstepError as error:
            yield self.refusal(error)
        except Exception:
            log.exception("a request failed")
            yield self.refusal(EvenstepError("internal error"))

    async def _read(self, kind: str, message: Any) -> AsyncIterator[Any]:
        """A part of the request; it is decided on once it is whole."""
        part = getattr(message, kind)
        if kind == "request_headers":
            self._read_head(message)
            if self._modes[0] == _BUFFERED and not part.end_of_stream:
                yield Answered(request_headers=pb.HeadersResponse())
        elif kind == "request_body":
            self._body += part.body
            if len(self._body) > self._most_bytes:
                raise TooLargeError(f"a request's body may have {self._most_bytes:,} bytes")
        if kind == "request_trailers" or part.end_of_stream:
            if self._pick is None:
                async for answer in self._decide(kind):
                    yield answer
            if kind == "request_trailers":
                yield Answered(request_trailers=pb.TrailersResponse())

    def _look(self, kind: str, message: Any) -> Any:
        """A part of the answer."""
        if kind == "response_headers":
            return self._begin(message)
        if kind == "response_body":
            return self._pass_on(message.response_body)
        self._end()
        return Answered(response_trailers=pb.TrailersResponse())

    def _read_head(self, message: Any) -> None:
        headers = _headers(message.request_headers)
        known = dict(headers)
        path, _, query = known.get(b":path", b"/").partition(b"?")
        given = [h for h in headers if not h[0].startswith(b":") and h[0] != SUBSET]
        hints = message.metadata_context.filter_metadata
        if _HINT in hints and SUBSET.decode() in hints[_HINT]:
            subset = hints[_HINT][SUBSET.decode()]
            endpoints = [subset] if isinstance(subset, str) else list(subset)
            given.append((SUBSET, ",".join(endpoints).encode() or b","))
        self._scope = {
            "type": "http",
            "method": known.get(b":method", b"").decode("latin-1"),
            "path": unquote(path.decode("latin-1")),  # as engines read it
            "query_string": query,
            "headers": given,
        }
        self._picks.begin(self._scope)
        if message.HasField("protocol_config"):
            modes = message.protocol_config
            self._modes = modes.request_body_mode, modes.response_body_mode
        bodiless = message.request_headers.end_of_stream
        if not (bodiless or self._modes[0] in (_DUPLEX, _BUFFERED)):
            raise InvalidRequestError(
                "the gateway keeps the request's body: its request_body_mode should be "
                "FULL_DUPLEX_STREAMED or BUFFERED"
            )

    async def _decide(self, ended_by: str) -> AsyncIterator[Any]:
        """``ended_by``: kind of the request's last part."""
        buffered = self._modes[0] == _BUFFERED and ended_by != "request_headers"
        if buffered:  # else the gateway waits for 200 ms
            wait = Duration(seconds=int(self._most_wait_s) + 1)
            yield Answered(override_message_timeout=wait)
        body, self.waits = bytes(self._body), True
        found = await self._picks.of(self._scope, body)
        headers = await found.place()
        self.waits = False
        changed = False
        if isinstance(found, Pick):
            self._pick, asked = found, found.asked
            up = asked.dialect.body_up(asked.body, found.request.id)
            body, changed = up, up is not body
        removed = [name.decode() for name in self._picks.removed(headers)]
        # Envoy has dropped the length: else engines would get chunks.
        told = _directions(headers, removed, None if ended_by == "request_headers" else len(body))
        if buffered:
            answer = Answered(request_body=pb.BodyResponse(response=told))
            if changed:
                answer.request_body.response.body_mutation.body = body
            yield _with_metadata(answer, headers)
            return
        yield _with_metadata(Answered(request_headers=pb.HeadersResponse(response=told)), headers)
        if ended_by != "request_headers":
            for piece in _pieces(body, ends=ended_by == "request_body"):
                yield piece

    def _begin(self, message: Any) -> Any:
        headers = _headers(message.response_headers)
        address = ""
        for values in message.attributes.values():
            if _ADDRESS in values:
                address = str(values[_ADDRESS])
        status = int(dict(headers).get(b":status", b"0"))
        self._told = Told(status, address)
        answer = Answered(response_headers=pb.HeadersResponse())
        if (pick := self._pick) is not None:
            pick.begun(self._told)
            self._events = pick.asked.dialect.stream() if streams(headers) else None
            self._body.clear()
            name, value = head_of(self._scope).header
            _set(answer.response_headers.response, [(name, value)])
            if message.response_headers.end_of_stream:
                self._end()
            elif status >= 400 and self._modes[1] == ProcessingMode.NONE:
                self._picks.end(pick, self._told, "answer")
        return answer

    def _pass_on(self, part: Any) -> Any:
        if self._events is not None:
            with suppress(UpstreamError):  # too long an event to be counted
                self._events.feed(part.body)
        else:
            self._body += part.body
        if part.end_of_stream:
            self._end()
        answer = Answered(response_body=pb.BodyResponse())
        if self._modes[1] == _DUPLEX:
            streamed = answer.response_body.response.body_mutation.streamed_response
            streamed.body, streamed.end_of_stream = part.body, part.end_of_stream
        return answer

    def _end(self) -> None:
        """The answer's body is whole."""
        if (pick := self._pick) is not None:
            if self._events is not None:
                pick.counted(None, self._events.tokens)
            elif (tokens := tokens_of(bytes(self._body))) is not None:
                pick.counted(tokens)
            self._picks.end(pick, self._told, "answer")

    def refusal(self, error: EvenstepError) -> Any:
        """The immediate answer to an error, in the words of ``evenstep serve``."""
        self.refused, self.waits = True, False
        answer: Answer = dialect_of(self._scope.get("path", "")).error(error_answer(error))
        self._told = Told(answer.status)
        immediate = pb.ImmediateResponse(body=answer.body, details="evenstep")
        immediate.status.code = answer.status
        for name, value in (*answer.headers, head_of(self._scope).header):
            _add(immediate.headers.set_headers, name, value)
        return Answered(immediate_response=immediate)

    def close(self, *, cancelled: bool) -> None:
        """The gateway tells no more; or it has cancelled the request."""
        if self._pick is not None:
            # Without bodies of answers, a call may end either way after their heads.
            cancelled &= not self._told.status or self._modes[1] != ProcessingMode.NONE
            self._pick.forsaken = Outcome.ABORTED if cancelled else Outcome.COMPLETED
        elif self._scope:
            self._picks.leave(self._scope, self._told.status)


def _headers(head: Any) -> list[Header]:
    return [
        (each.key.encode(), each.raw_value or each.value.encode()) for each in head.headers.headers
    ]


def _directions(headers: Iterable[Header], removed: list[str], length: int | None) -> Any:
    told = pb.CommonResponse(clear_route_cache=True)
    told.header_mutation.remove_headers.extend(removed)
    sizes = [] if length is None else [(b"content-length", b"%d" % length)]
    _set(told, (*headers, *sizes))
    return told


def _set(told: Any, headers: Iterable[Header]) -> None:
    for name, value in headers:
        _add(told.header_mutation.set_headers, name, value)


def _add(options: Any, name: bytes, value: bytes) -> None:
    """Of several values, that of a client among them, this one alone counts."""
    option = options.add(append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD)
    option.header.key, option.header.raw_value = name.decode(), value


def _with_metadata(answer: Any, headers: Iterable[Header]) -> Any:
    """The destination is told in dynamic metadata too, and must be the same."""
    destination = dict(headers)[DESTINATION].decode()
    answer.dynamic_metadata.update({_NAMESPACE: {DESTINATION.decode(): destination}})
    return answer


def _pieces(body: bytes, *, ends: bool) -> Iterator[Any]:
    for first in range(0, max(1, len(body)), _PIECE_BYTES):
        answer = Answered(request_body=pb.BodyResponse())
        piece = answer.request_body.response.body_mutation.streamed_response
        piece.body = body[first : first + _PIECE_BYTES]
        piece.end_of_stream = ends and first + _PIECE_BYTES >= len(body)
        yield answer
