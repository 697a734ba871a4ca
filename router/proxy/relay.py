"""One request from its arrival to its end: wait, send, pass the answer on, account for it.

Whatever happens, exactly one of these ends it: its answer is complete, it failed, the client left.
Until the first byte has reached the client a failing worker costs nothing but time: the request
goes back to its place in the pool.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from http import HTTPStatus

from starlette.requests import HTTPConnection
from starlette.types import Receive, Scope, Send

from router.decider import Clock
from router.dispatch import DispatchPort
from router.engines.upstream import HttpClient, Response
from router.errors import EvenstepError, UpstreamError
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
from router.types import Outcome, Request, WorkerSpec

_PROGRESS_EVENTS = 32


class Unstarted:
    """Attempts without a first byte, by worker, so that a silent worker's can be recalled."""

    def __init__(self) -> None:
        self._attempts: defaultdict[str, set[asyncio.Timeout]] = defaultdict(set)

    @contextlib.asynccontextmanager
    async def watch(self, worker_id: str) -> AsyncIterator[Callable[[], None]]:
        """Around an attempt; yields what is to be called at its first byte.

        Raises:
            UpstreamError: the attempt was recalled.
        """
        attempts = self._attempts[worker_id]
        try:
            async with asyncio.timeout(None) as attempt:
                attempts.add(attempt)
                yield lambda: attempts.discard(attempt)
        except TimeoutError as error:
            raise UpstreamError("the worker does not answer its health checks") from error
        finally:
            attempts.discard(attempt)

    def recall(self, worker_id: str) -> None:
        """Break off a worker's attempts, which are then made elsewhere."""
        attempts = self._attempts[worker_id]
        while attempts:
            attempts.pop().reschedule(0)


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
        unstarted: attempts that can be recalled.
    """

    port: DispatchPort
    client: HttpClient
    trouble: Callable[[str, str], None]
    ranked: frozenset[str]
    max_attempts: int
    clock: Clock
    unstarted: Unstarted = field(default_factory=Unstarted)


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
        self._note_started: Callable[[], None] = lambda: None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve it; give it up as soon as the client is gone."""
        serving = asyncio.create_task(self._serve(HTTPConnection(scope), send))
        leaving = asyncio.create_task(_client_left(receive))
        try:
            await asyncio.wait((serving, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving

    async def _serve(self, client: HTTPConnection, send: Send) -> None:
        port, request = self._context.port, self._request
        try:
            await self._attempts(port.submit(request), client, send)
        except EvenstepError as error:
            port.end(request, Outcome.FAILED)
            await send_answer(send, error_answer(error))
        except asyncio.CancelledError:
            port.withdraw(request)
            raise
        except BaseException:
            port.end(request, Outcome.FAILED)
            raise

    async def _attempts(
        self, waiter: asyncio.Future[WorkerSpec], client: HTTPConnection, send: Send
    ) -> None:
        """Try workers until the first byte of an answer, then pass that answer on."""
        for attempts_left in reversed(range(self._context.max_attempts)):
            worker = await waiter
            try:
                await self._attempt(worker, client, send)
            except UpstreamError as error:
                self._context.trouble(worker.id, str(error))
                if not attempts_left:
                    raise
                waiter = self._context.port.give_back(self._request)
            else:
                return

    async def _attempt(self, worker: WorkerSpec, client: HTTPConnection, send: Send) -> None:
        async with self._context.unstarted.watch(worker.id) as self._note_started:
            await self._exchange(worker, client, send)

    async def _exchange(self, worker: WorkerSpec, client: HTTPConnection, send: Send) -> None:
        rank = worker.rank if worker.url in self._context.ranked else None
        headers = headers_up(client.headers.raw, self._request.id, rank)
        response = await self._context.client.request(
            "POST", worker.url, self._target, headers, self._body
        )
        try:
            if content_type(response.headers).startswith(b"text/event-stream"):
                await self._stream(worker, response, send)
            else:
                await self._whole(response, send)
        finally:
            response.close()

    async def _whole(self, response: Response, send: Send) -> None:
        body = await response.read()
        self._note_first_byte()
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
        # Shorter than what is told in between, most answers would count as nothing.
        self._context.port.progress(self._request, stream.events - stream.done)
        self._context.port.end(self._request, Outcome.COMPLETED)
        await self._start(response, send)
        await send({"type": "http.response.body", "body": stream.rest()})

    async def _pass_on(
        self, events: bytes, stream: EventStream, response: Response, send: Send
    ) -> None:
        await self._start(response, send)
        await send({"type": "http.response.body", "body": events, "more_body": True})
        if stream.events - self._told_events >= _PROGRESS_EVENTS:
            self._told_events = stream.events
            self._context.port.progress(self._request, stream.events)

    async def _start(self, response: Response, send: Send) -> None:
        if not self._started:
            self._started = True
            self._note_first_byte()
            await send_head(send, response.status, headers_down(response.headers))

    async def _break_off(self, worker: WorkerSpec, error: UpstreamError, send: Send) -> None:
        """End a stream that has begun: its tokens cannot be taken back, so say what happened."""
        self._context.trouble(worker.id, str(error))
        self._context.port.end(self._request, Outcome.FAILED)
        event = error_event(f"the worker failed in mid-answer: {error}", "BadGatewayError", 502)
        await send({"type": "http.response.body", "body": event})

    def _note_first_byte(self) -> None:
        self._note_started()
        self._context.port.first_byte(self._request, self._context.clock())


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
