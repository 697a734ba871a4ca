"""uvicorn's HTTP/1.1 protocol with strict parsing, size and time limits, and a hot-path hook.

llhttp parses the bytes of ``data_received``, and its callbacks decide. A refusal waits for the
answers to earlier requests. Then nothing more is parsed: when a message's end is in doubt, so is
the next one's start.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from router.file_limit import descriptors_lacking, scarce
from router.http import head
from router.http.port import HttpLimits
from router.http.refusal import HttpCounts, Refused

log = logging.getLogger(__name__)

# Requests that may be pipelined behind one under way, and body bytes of each.
_AHEAD = 8
_AHEAD_BODY_BYTES = 65_536
# After a refusal the client may still be sending. Its bytes are read for so long, since an early
# close would discard the answer (RFC 9112, 9.6).
_LINGER_S = 5.0
# Connections beyond the limit that get an answer; more are just cut.
_TOLD = 256

# Stages of a request. Not an Enum: its members cost a lookup, some twenty times a request.
_BETWEEN, _HEAD, _BODY = range(3)


class Taken(Protocol):
    """A request that the hot path serves."""

    def whole(self) -> None: ...

    def leave(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class HotPath(Protocol):
    """Serves requests in place of the application; ``begin`` returns None to decline one."""

    def begin(
        self, cycle: RequestResponseCycle, tasks: set[asyncio.Task[None]]
    ) -> Taken | None: ...


@dataclass(slots=True)
class Deadline:
    """At most one deadline; it moves thousands of times before a timer fires, without a new one."""

    _loop: asyncio.AbstractEventLoop
    _expired: Callable[[], None]
    _at_s: float | None = None
    _fires_s: float = 0.0
    _timer: asyncio.TimerHandle | None = None

    def set(self, delay_s: float | None) -> None:
        """Move it; with None there is none, but the timer stays for the next one."""
        if delay_s is None:
            self._at_s = None
            return
        at_s = self._at_s = self._loop.time() + delay_s
        if self._timer is not None:
            if at_s >= self._fires_s:
                return
            self._timer.cancel()
        self._fires_s = at_s
        self._timer = self._loop.call_at(at_s, self._fire)

    def cancel(self) -> None:
        self._at_s = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        self._timer, at_s = None, self._at_s
        if at_s is None:
            return
        if (left_s := at_s - self._loop.time()) > 0:
            self.set(left_s)
            return
        self._at_s = None
        self._expired()


class LimitedProtocol(HttpToolsProtocol):
    """One client's connection; uvicorn passes all arguments but the first three."""

    def __init__(
        self,
        limits: HttpLimits,
        counts: HttpCounts,
        hot: HotPath | None,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._counts = counts
        self._hot = hot
        self._taken: Taken | None = None  # the running request, if the hot path serves it
        self._max_headers = limits.max_headers
        self._reading = Deadline(self.loop, self._read_expired)
        self._writing = Deadline(self.loop, self._write_expired)
        self._unsent = 0  # bytes that the client had not taken when that was last looked at
        self._stage = _BETWEEN
        self._entered = False  # whether these bytes began the stage
        self._raw: bytes | bytearray = b""  # whole reads since the head began
        self._first_read = 0  # size of the first of them
        self._clear = True  # no request has begun in these bytes
        self._ahead = False  # other bytes precede the head
        self._body_bytes = 0
        self._held: deque[int] = deque()  # body bytes of each unanswered request
        self._dry_bytes = 0  # bytes received since the last body byte
        self._running: RequestResponseCycle | None = None
        self._refusal: Refused | None = None

    # The connection.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._counts.connections += 1
        fileno = transport.get_extra_info("socket").fileno()
        if scarce(fileno, 3):
            self._refuse(Refused(503, str(descriptors_lacking()), b"retry-after: 1\r\n"))
            if scarce(fileno, 2):
                self.transport.close()  # no descriptors left to linger with
        elif len(self.connections) <= self._limits.max_connections:
            self._reading.set(self._limits.header_timeout_s)
        elif len(self.connections) <= self._limits.max_connections + _TOLD:
            message = f"{self._limits.max_connections:,} connections are open already; retry later"
            self._refuse(Refused(503, message, b"retry-after: 1\r\n"))
        else:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._counts.connections -= 1
        self._reading.cancel()
        self._writing.cancel()
        # The running request and those behind it.
        for cycle in self._unanswered():
            self._abandon(cycle)
        self.pipeline.clear()
        self._counts.body_bytes -= sum(self._held)
        self._held.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        self._clear = self._stage == _BETWEEN
        if self._stage == _HEAD:
            self._raw += data
        else:
            self._raw = data
        try:
            self.parser.feed_data(data)
            self._look(len(data))
        except httptools.HttpParserError as error:
            raised = error.__context__  # an exception from a callback
            if not (raised is None or isinstance(raised, httptools.HttpParserError | Refused)):
                raise raised from None
            invalid = Refused(400, f"the request is not HTTP/1.1: {raised or error}")
            self._refuse(raised if isinstance(raised, Refused) else invalid)
        except Refused as refused:
            self._refuse(refused)

    def shutdown(self) -> None:
        # A refused client is not waited for.
        if self._refusal is not None and not any(self._unanswered()):
            self.transport.abort()
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        self._await_reader(self._writing)
        super().pause_writing()
        if self._taken is not None:
            self._taken.pause()

    def resume_writing(self) -> None:
        self._writing.set(None)
        super().resume_writing()
        if self._taken is not None:
            self._taken.resume()

    # The parser's callbacks, in this order; an exception stops it.

    def on_message_begin(self) -> None:
        self._stage, self._entered = _HEAD, True
        self._first_read = len(self._raw)
        self._ahead, self._clear = not self._clear, False
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        headers = self.headers
        if len(headers) == self._max_headers:
            raise head.too_many_headers(self._limits)
        headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._check_head()
        ahead = self._running is not None and not self.cycle.response_complete
        if ahead and len(self.pipeline) == _AHEAD:
            raise Refused(400, f"only {_AHEAD} requests may be sent ahead of their answers")
        super().on_headers_complete()
        # The list is the application's now; trailers were not checked.
        self.headers = []
        self._stage, self._entered = _BODY, True
        self._body_bytes = self._dry_bytes = 0
        self._held.append(0)
        if ahead:
            self.flow.resume_reading()  # else the connection's end would go unseen
        else:
            self._running = self.cycle

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        self._dry_bytes = 0
        if self._body_bytes > self._limits.max_body_bytes:
            raise head.body_too_large(self._limits)
        if self._body_bytes > _AHEAD_BODY_BYTES and self.cycle is not self._running:
            message = f"ahead of another answer a body may have {_AHEAD_BODY_BYTES:,} bytes"
            raise Refused(413, message)
        if not self.cycle.response_complete:
            # Beside others a body needs twice its room, so that a few large ones leave some to
            # small ones.
            others = self._counts.body_bytes - self._held[-1]
            if others and others + 2 * self._body_bytes > self._limits.max_bodies_bytes:
                raise head.bodies_too_large(self._limits)
            self._counts.body_bytes += len(body)
            self._held[-1] += len(body)
        super().on_body(body)
        if self._taken is not None:
            self.flow.resume_reading()  # the hot path takes bodies whole

    def on_message_complete(self) -> None:
        self._stage, self._entered = _BETWEEN, True
        super().on_message_complete()
        if self._taken is not None and self.cycle is self._running:
            self._taken.whole()

    def _check_head(self) -> None:
        method, version = self.parser.get_method(), self.parser.get_http_version()
        head.check_line(method, self.url, version, self._raw, ahead=self._ahead)
        if len(self.url) > self._limits.max_uri_bytes:
            raise head.uri_too_long(self._limits)
        if len(self._raw) > self._limits.max_header_bytes:
            head.check_size(self.url, self.headers, self._limits)
        if self.parser.should_upgrade():
            raise Refused(400, "only HTTP/1.1 is spoken here: send no Upgrade")
        self.expect_100_continue = head.check_fields(self.headers, version, self._limits)

    def _look(self, received: int) -> None:
        entered, self._entered = self._entered, False
        limits = self._limits
        if self._stage != _HEAD:
            self._raw = b""  # frees the bytes while the answer runs
        if self._stage == _BETWEEN:
            if entered:
                answered = self._running is None or self._running.response_complete
                self._reading.set(limits.keep_alive_timeout_s if answered else None)
        elif self._stage == _BODY:
            if entered:
                self._reading.set(limits.body_timeout_s)
            # Between chunks; the first read may hold other bytes.
            self._dry_bytes += received
            if self._dry_bytes > limits.max_header_bytes + received:
                raise head.head_too_long(limits)
        else:
            if entered:
                self._reading.set(limits.header_timeout_s)
                self._raw = bytearray(self._raw)
            if len(self._raw) - self._first_read > limits.max_header_bytes:
                raise head.head_too_long(limits)
            if not self.headers and len(self.url) > limits.max_uri_bytes:
                raise head.uri_too_long(limits)

    # Answers and ends.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._taken = None if self._hot is None else self._hot.begin(cycle, self.tasks)
        if self._taken is None:
            super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        self._taken = None
        self._counts.body_bytes -= self._held.popleft() if self._held else 0
        if self.pipeline and not self.transport.is_closing():
            self._running = self.pipeline[-1][0]
            super().on_response_complete()
            return
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            self._await_reader(self._reading)
        elif self._refusal is not None:
            self._answer(self._refusal)
        else:
            self.flow.resume_reading()
            if self._stage == _BETWEEN:
                self._reading.set(self._limits.keep_alive_timeout_s)

    def _refuse(self, refused: Refused) -> None:
        self._refusal = refused
        self._counts.refused[refused.status] += 1
        log.debug("refused with %d: %s", refused.status, refused.message)
        self._reading.set(None)
        self.flow.resume_reading()
        if self._stage == _BODY:
            self._take_back(self.cycle)
        elif not any(self._unanswered()):
            self._answer(refused)

    def _take_back(self, cycle: RequestResponseCycle) -> None:
        if cycle is not self._running:
            self.pipeline.popleft()
            self._counts.body_bytes -= self._held.pop()
            return
        self._abandon(cycle)
        self._running = None
        if cycle.response_started:
            self._close()
        elif self._refusal is not None:
            self._answer(self._refusal)

    def _abandon(self, cycle: RequestResponseCycle) -> None:
        cycle.disconnected = True
        cycle.message_event.set()
        if self._taken is not None and cycle is self._running:
            self._taken.leave()
            self._taken = None

    def _answer(self, refused: Refused) -> None:
        self.transport.write(refused.answer(body=self.parser.get_method() != b"HEAD"))
        self._close()

    def _close(self) -> None:
        if self.transport.get_write_buffer_size() > 0:
            self._await_reader(self._reading)
        else:
            self._reading.set(_LINGER_S)
        if self._refusal is not None and self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    def _await_reader(self, deadline: Deadline) -> None:
        self._unsent = self.transport.get_write_buffer_size()
        deadline.set(self._limits.write_timeout_s)

    def _write_expired(self) -> None:
        self._cut_idle(self._writing)

    def _cut_idle(self, deadline: Deadline) -> None:
        """A client that reads slowly, but does, is waited for."""
        if self.transport.get_write_buffer_size() < self._unsent:
            self._await_reader(deadline)
        else:
            self.transport.abort()

    def _read_expired(self) -> None:
        if self._refusal is not None or self.transport.is_closing():
            self._cut_idle(self._reading)
        elif self._stage == _BETWEEN:
            self._close()
        else:
            rest = "header fields" if self._stage == _HEAD else "body"
            self._refuse(Refused(408, f"the request's {rest} did not come in time"))

    def _unanswered(self) -> Iterator[RequestResponseCycle]:
        if self._running is not None and not self._running.response_complete:
            yield self._running
        for cycle, _ in self.pipeline:
            yield cycle
