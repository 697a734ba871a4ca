"""Hot path: requests that generate bypass the ASGI application.

uvicorn's protocol hands a request over after its head. The answer goes straight from the engine's
connection to the client's. Keys, ids, log lines and shutdown work as in the application.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from typing import cast

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from router.core.errors import EvenstepError, NotLeadingError
from router.proxy.answers import ENDING, Answer, Header, error_answer, framed
from router.proxy.client_request import HEADER, head_of
from router.proxy.context import Serves, ServingContext, Source
from router.proxy.endpoints import ENDPOINTS, dialect_of, relay_of
from router.proxy.request_log import RequestLog

log = logging.getLogger(__name__)

# In a scope, the key that was let in (None: no key). Who removes it lets the key out later, and
# ends the request's log line.
KEY = "evenstep.key"

# Reads a request that was taken over.
ServesOf = Callable[[ServingContext, Scope, bytes], Awaitable[Serves]]

_CLOSE = (b"connection", b"close")
_CHUNKED = (b"transfer-encoding", b"chunked")


@dataclass(slots=True)
class HotPath:
    """Takes requests over from uvicorn; ``others``: who reads those that do not generate."""

    context: ServingContext
    requests: RequestLog
    others: Callable[[Scope], ServesOf | None] = lambda _: None

    def begin(self, cycle: RequestResponseCycle, tasks: set[asyncio.Task[None]]) -> Exchange | None:
        scope = cast(Scope, cycle.scope)
        hot = scope["path"] in ENDPOINTS and scope["method"] == "POST"
        serves_of = relay_of if hot else self.others(scope)
        return None if serves_of is None else Exchange(self, cycle, tasks, serves_of)


class Exchange:
    """A request that was taken over; implements ``Client``."""

    __slots__ = (
        *("_body_there", "_chunked", "_cycle", "_head", "_hot", "_line", "_named", "_scope"),
        *("_serves_of", "_source", "_task", "_tasks", "_transport", "gone"),
    )

    def __init__(
        self,
        hot: HotPath,
        cycle: RequestResponseCycle,
        tasks: set[asyncio.Task[None]],
        serves_of: ServesOf,
    ) -> None:
        self.gone = False
        self._hot = hot
        self._serves_of = serves_of
        self._cycle = cycle
        self._scope = cast(Scope, cycle.scope)
        self._scope[KEY] = None
        self._transport = cycle.transport
        # HTTP/1.0 has no chunks: a body without a length ends with the connection.
        self._chunked = self._scope["http_version"] != "1.0"
        head = head_of(self._scope)
        self._named = HEADER, head.name.encode()
        self._line = hot.requests.begin(self._scope)
        self._line.request_id = head.name  # set even if no answer follows
        self._body_there: asyncio.Future[None] | None = None
        self._source: Source | None = None
        self._head = b""
        self._tasks = tasks
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(self._ended)
        # The server's set, so that shutdown treats both alike.
        tasks.add(self._task)

    # Called by the connection.

    def whole(self) -> None:
        if self._body_there is not None and not self._body_there.done():
            self._body_there.set_result(None)

    def leave(self) -> None:
        self.gone = True
        self._task.cancel()

    def pause(self) -> None:
        if self._source is not None:
            self._source.pause()

    def resume(self) -> None:
        if self._source is not None:
            self._source.resume()

    # Called by a relay.

    def answer(self, answer: Answer) -> None:
        self._complete(self._encode(answer.status, framed(answer)) + answer.body)

    def begin(self, status: int, headers: Iterable[Header], source: Source) -> None:
        coding = (_CHUNKED,) if self._chunked else ()
        self._head = self._encode(status, (*headers, *coding))
        self._source = source
        if self._cycle.flow.write_paused:
            source.pause()

    def send(self, piece: bytes) -> None:
        if self.gone:
            return
        if self._chunked:
            piece = b"%x\r\n%b\r\n" % (len(piece), piece)
        self._transport.write(self._head + piece)
        self._head = b""

    def finish(self, piece: bytes = b"") -> None:
        if piece:
            self.send(piece)
        self._complete(self._head + (b"0\r\n\r\n" if self._chunked else b""))

    def _encode(self, status: int, headers: Iterable[Header]) -> bytes:
        cycle = self._cycle
        cycle.response_started = True
        self._line.status = status
        closes = _CLOSE in cycle.default_headers
        if closes:
            cycle.keep_alive = False
        last = () if cycle.keep_alive or closes else (_CLOSE,)
        lines, headers = [_status_line(status)], list(headers)
        if HEADER not in (name for name, _ in headers):
            headers.append(self._named)
        for name, value in (*cycle.default_headers, *headers, *last):
            lines.append(name + b": " + value)
        lines.append(b"\r\n")
        return b"\r\n".join(lines)

    def _complete(self, last: bytes) -> None:
        cycle = self._cycle
        if self.gone or cycle.response_complete:
            return
        self._transport.write(last)
        self._source = None
        cycle.response_complete = True
        if not cycle.keep_alive:
            self._transport.close()
        cycle.on_response()

    # The task.

    async def _run(self) -> None:
        context = self._hot.context
        try:
            if context.lifecycle.closed:
                raise NotLeadingError(ENDING)
            if context.door is not None:
                self._scope[KEY] = context.door.enter(self._scope)
            cycle = self._cycle
            if cycle.more_body:
                if cycle.waiting_for_100_continue:
                    self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                    cycle.waiting_for_100_continue = False
                self._body_there = asyncio.get_running_loop().create_future()
                await self._body_there
            body, cycle.body = bytes(cycle.body), bytearray()  # the protocol keeps the cycle
            relay = await self._serves_of(context, self._scope, body)
            await relay.serve(self)
        except EvenstepError as error:
            self._refuse(error)
        except asyncio.CancelledError:
            self._cut_short()
        except Exception:
            log.exception("a request failed")
            if self._cycle.response_started:
                self._transport.close()
            else:
                self.answer(error_answer(EvenstepError("internal error")))
        finally:
            if context.door is not None:
                context.door.leave(self._scope.get(KEY))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        # A task that is cancelled at once never runs.
        if task.cancelled():
            self._cut_short()
        if KEY in self._scope:
            self._hot.requests.end(self._scope)

    def _cut_short(self) -> None:
        if not (self.gone or self._cycle.response_started):
            self._refuse(NotLeadingError(ENDING))

    def _refuse(self, error: EvenstepError) -> None:
        self.answer(dialect_of(self._scope["path"]).error(error_answer(error)))


@cache
def _status_line(status: int) -> bytes:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}".encode()
