"""One request from its arrival to its end: wait, send, pass the answer on, account for it.

Whatever happens, exactly one of these ends it: its answer is complete, it failed, the client left.
Until the first byte has reached the client a failing worker costs nothing but time: the request
goes back to its place in the pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from http import HTTPStatus

from starlette.requests import HTTPConnection
from starlette.types import Receive, Scope, Send

from router.decider import Clock
from router.engines.upstream import HttpClient, Response
from router.errors import EvenstepError, NoWorkerError, RecalledError, UpstreamError
from router.port import DispatchPort
from router.proxy.answers import (
    Answer,
    content_type,
    error_answer,
    headers_down,
    headers_up,
    send_answer,
    send_head,
)
from router.proxy.events import EventStream, error_event
from router.proxy.mooncake import Bootstraps
from router.types import Outcome, Request, WorkerSpec

Waiter = asyncio.Future[WorkerSpec]

_PROGRESS_EVENTS = 32
# Inside a text the quotation marks would be escaped.
_PROMPT_TOKENS = re.compile(rb'"usage": ?\{[^{}]*"prompt_tokens": ?(\d{1,9})\b')


@dataclass(slots=True, eq=False)
class _Attempt:
    """A request at a worker; ``response`` from its first byte on, unless it was recalled before."""

    timeout: asyncio.Timeout
    response: Response | None = None
    recalled: RecalledError | None = None

    def note_started(self, response: Response) -> None:
        """The first byte is there; raises what recalled the attempt, if that came before.

        The timeout strikes at the event loop's next turn, and an answer may come in this one.
        """
        if self.recalled is not None:
            raise self.recalled
        self.response = response

    def recall(self, reason: str) -> None:
        """Break it off; it has no first byte yet, and has not been recalled."""
        self.recalled = RecalledError(reason)
        self.timeout.reschedule(0)


class Attempts:
    """Attempts under way, by worker, so that those at a worker that is out of use can be ended."""

    def __init__(self) -> None:
        self._of: defaultdict[str, set[_Attempt]] = defaultdict(set)

    @contextlib.asynccontextmanager
    async def watch(self, worker_id: str) -> AsyncIterator[Callable[[Response], None]]:
        """Around an attempt; yields what is to be given its response before its first byte goes on.

        Raises:
            RecalledError: the attempt was recalled before that.
        """
        attempts = self._of[worker_id]
        try:
            async with asyncio.timeout(None) as timeout:
                attempt = _Attempt(timeout)
                attempts.add(attempt)
                try:
                    yield attempt.note_started
                finally:
                    attempts.discard(attempt)
        except TimeoutError as error:
            raise attempt.recalled or error from None

    def recall(self, worker_id: str, reason: str) -> None:
        """Break off those without a first byte, which are then made elsewhere."""
        attempts = self._of[worker_id]
        for attempt in [one for one in attempts if one.response is None]:
            attempts.remove(attempt)
            attempt.recall(reason)

    def break_off(self, worker_id: str, reason: str) -> None:
        """The same, and end the streams that have begun."""
        self.recall(worker_id, reason)
        for attempt in self._of[worker_id]:
            if attempt.response is not None:
                attempt.response.break_off(RecalledError(reason))


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """How prompts' KV gets from the workers that compute them to those that decode.

    Attributes:
        kept_s: how long an engine keeps it for whom it tells where it lies; None: it tells nobody,
            and others find it by its content.
        bootstraps: who knows it instead of the engine.
        warned: workers that should have told and did not.
    """

    kept_s: float | None
    bootstraps: Bootstraps
    warned: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class RelayContext:
    """What every relay needs.

    Attributes:
        port: the dispatcher.
        client: connections to the engines.
        trouble: told of a worker that could not be reached or broke off, and why.
        ranked: URLs behind which several ranks are told apart by a header.
        max_attempts: workers that one request is tried on.
        clock: the dispatcher's.
        attempts: those under way.
        transfer: how KV is handed off, None where there are no prefill workers.
    """

    port: DispatchPort
    client: HttpClient
    trouble: Callable[[str, str], None]
    ranked: frozenset[str]
    max_attempts: int
    clock: Clock
    attempts: Attempts = field(default_factory=Attempts)
    transfer: KvTransfer | None = None


class Relay:
    """An ASGI application for one completion request whose body has been read.

    Args:
        context: what all relays share.
        request: as the dispatcher knows it.
        target: path and query, the same at the engine.
        body: passed on unchanged.
    """

    def __init__(self, context: RelayContext, request: Request, target: str, body: bytes) -> None:
        self._context = context
        self._request = request
        self._target = target
        self._body = body
        self._started = False
        self._told_events = 0
        self._note_started: Callable[[Response], None] = lambda _: None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve it; give it up as soon as the client is gone."""
        serving = asyncio.create_task(self._serve(HTTPConnection(scope), send))
        leaving = asyncio.create_task(_client_left(receive))
        try:
            await asyncio.wait((serving, leaving), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # the server ends, and has waited long enough
            await _cancelled(serving)
            if self._started:
                raise
            await send_answer(send, error_answer(NoWorkerError("the router is ending; retry")))
        finally:
            leaving.cancel()
            await _cancelled(serving)

    async def _serve(self, client: HTTPConnection, send: Send) -> None:
        port = self._context.port
        try:
            await self._attempts(client, send)
        except EvenstepError as error:
            port.end(self._request, Outcome.FAILED)
            self._started = True
            await send_answer(send, error_answer(error))
        except asyncio.CancelledError:
            port.withdraw(self._request)
            raise
        except BaseException:
            port.end(self._request, Outcome.FAILED)
            raise

    async def _attempts(self, client: HTTPConnection, send: Send) -> None:
        """Try workers until the first byte of an answer, then pass that answer on."""
        waiter = await self._enter(client, send)
        for attempts_left in reversed(range(self._context.max_attempts)):
            if waiter is None:
                return
            worker = await waiter
            try:
                await self._attempt(worker, client, send)
            except UpstreamError as error:
                self._report(worker, error)
                if not attempts_left:
                    raise
                waiter = await self._enter_again(client, send)
            else:
                return

    async def _enter(self, client: HTTPConnection, send: Send) -> Waiter | None:
        """Wait for a worker; None if the client has its answer already."""
        return self._context.port.submit(self._request)

    async def _enter_again(self, client: HTTPConnection, send: Send) -> Waiter | None:
        """The same after a failed attempt."""
        self._request, waiter = self._context.port.give_back(self._request)
        return waiter

    async def _attempt(self, worker: WorkerSpec, client: HTTPConnection, send: Send) -> None:
        async with self._context.attempts.watch(worker.id) as self._note_started:
            response = await self._post(worker, client, self._body_up())
            await self._take(response, worker, send)

    def _body_up(self) -> bytes:
        """What the worker is sent that answers."""
        return self._body

    async def _post(self, worker: WorkerSpec, client: HTTPConnection, body: bytes) -> Response:
        rank = worker.rank if worker.url in self._context.ranked else None
        headers = headers_up(client.headers.raw, self._request.id, rank)
        return await self._context.client.request("POST", worker.url, self._target, headers, body)

    async def _take(self, response: Response, worker: WorkerSpec, send: Send) -> None:
        try:
            if content_type(response.headers).startswith(b"text/event-stream"):
                await self._stream(worker, response, send)
            else:
                await self._whole(response, send)
        finally:
            response.close()

    async def _whole(self, response: Response, send: Send) -> None:
        body = await response.read()
        self._note_first_byte(response)
        counted = _PROMPT_TOKENS.search(body) if self._request.slots == 1 else None
        if counted is not None:
            self._context.port.prompt_counted(self._request, int(counted[1]))
        failed = response.status >= HTTPStatus.INTERNAL_SERVER_ERROR
        self._context.port.end(self._request, Outcome.FAILED if failed else Outcome.COMPLETED)
        await send_answer(
            send, Answer(response.status, body, tuple(headers_down(response.headers)))
        )

    async def _stream(self, worker: WorkerSpec, response: Response, send: Send) -> None:
        stream = EventStream()
        try:
            async for chunk in response:
                if events := stream.feed(chunk):
                    await self._pass_on(events, stream, response, send)
        except UpstreamError as error:
            if not self._started:
                raise
            if not stream.done:
                await self._break_off(worker, error, send)
                return
        first = self._note_first_byte(response)
        # Shorter than what is told in between, most answers would count as nothing.
        self._context.port.progress(self._request, stream.events - stream.done)
        self._context.port.end(self._request, Outcome.COMPLETED)
        if first:
            await send_head(send, response.status, headers_down(response.headers))
        await send({"type": "http.response.body", "body": self._rest(stream)})

    def _rest(self, stream: EventStream) -> bytes:
        """What is left to be sent at the end of a stream."""
        return stream.rest()

    async def _pass_on(
        self, events: bytes, stream: EventStream, response: Response, send: Send
    ) -> None:
        if self._note_first_byte(response):
            await send_head(send, response.status, headers_down(response.headers))
        await send({"type": "http.response.body", "body": events, "more_body": True})
        if stream.events - self._told_events >= _PROGRESS_EVENTS:
            self._told_events = stream.events
            self._context.port.progress(self._request, stream.events)

    async def _break_off(self, worker: WorkerSpec, error: UpstreamError, send: Send) -> None:
        """End a stream that has begun: its tokens cannot be taken back, so say what happened."""
        self._report(worker, error)
        self._context.port.end(self._request, Outcome.FAILED)
        event = error_event(f"the worker failed in mid-answer: {error}", "BadGatewayError", 502)
        await send({"type": "http.response.body", "body": event})

    def _report(self, worker: WorkerSpec, error: UpstreamError) -> None:
        if not isinstance(error, RecalledError):
            self._context.trouble(worker.id, str(error))

    def _note_first_byte(self, response: Response) -> bool:
        """What follows goes to the client; whether it is the first.

        Raises:
            RecalledError: nothing may follow, since the request is to be made elsewhere.
        """
        if self._started:
            return False
        self._note_started(response)
        self._started = True
        self._context.port.first_byte(self._request, self._context.clock())
        return True


async def _cancelled(task: asyncio.Task[None]) -> None:
    """Wait until it has ended."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
