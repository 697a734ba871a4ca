"""One request from its arrival to its end: wait, send, pass the answer on, account for it.

Whatever happens, exactly one of these ends it: its answer is complete, it failed, the client left.
Until the first byte has reached the client a failing worker costs nothing but time: the request
goes back to its place in the pool.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from http import HTTPStatus

from starlette.requests import HTTPConnection
from starlette.types import Receive, Scope, Send

from router.engines.upstream import Response
from router.errors import (
    AnsweredError,
    EndingError,
    EvenstepError,
    NoWorkerError,
    RecalledError,
    RequestTimeoutError,
    UpstreamError,
    UpstreamTimeoutError,
)
from router.proxy.answers import (
    Answer,
    content_type,
    error_answer,
    header,
    headers_down,
    headers_up,
    send_answer,
    send_head,
    told_in_stream,
)
from router.proxy.asked import Asked
from router.proxy.events import EventStream, with_comment
from router.proxy.identity import body_send
from router.proxy.judging import judge_answer, judge_failure
from router.proxy.leaving import cancelled, client_left
from router.proxy.relay_context import RelayContext
from router.proxy.token_times import TokenTimes
from router.proxy.usage import tokens_of
from router.retry import may_differ_elsewhere
from router.types import Outcome, Request, WorkerSpec

Waiter = asyncio.Future[WorkerSpec]

ENERGY_HEADER = b"x-evenstep-energy-joules"

# As vLLM begins an event that says an error, in each of its endpoints' dialects.
FAILED = re.compile(rb'^(?:data: ?\{"error"|event: ?error\r?\n)', re.MULTILINE)
_CODE = re.compile(rb'"code": ?(\d{3})\b')

_PROGRESS_TOKENS = 32


class Relay:
    """An ASGI application for one completion request whose body has been read.

    Args:
        context: what all relays share.
        request: as the dispatcher knows it.
        asked: as the engines are to know it.
    """

    def __init__(self, context: RelayContext, request: Request, asked: Asked) -> None:
        self._context = context
        self._request = request
        self._asked = asked
        self._deadlines = context.deadlines.within(asked.timeout_s)
        self._attempts_left = context.max_attempts
        self._at = ""
        self._life: asyncio.Timeout
        self._started = self._headed = False
        self._failed = False
        self._stream_down: EventStream | None = None
        self._response: Response | None = None
        self._given_up = Outcome.ABORTED
        self._send_body: Send
        self._told_tokens = 0
        self._times: TokenTimes | None = None
        self._note_started: Callable[[Response], None] = lambda _: None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve it; give it up as soon as the client is gone."""
        self._send_body = body_send(scope, send)
        serving = asyncio.create_task(self._serve(HTTPConnection(scope), send))
        leaving = asyncio.create_task(client_left(receive))
        try:
            await asyncio.wait((serving, leaving), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # the server ends, and has waited long enough
            await self._end_early(serving, send)
        finally:
            leaving.cancel()
            await cancelled(serving)

    async def _serve(self, client: HTTPConnection, send: Send) -> None:
        port = self._context.port
        try:
            async with asyncio.timeout(self._left_s()) as self._life:
                await self._attempts(client, send)
        except TimeoutError:
            if not self._life.expired():
                raise
            await self._expire(send)
        except EvenstepError as error:
            port.end(self._request, Outcome.FAILED)
            self._started = True
            await self._refuse(error, send)
        except asyncio.CancelledError:
            port.withdraw(self._request, self._given_up)
            raise
        except BaseException:
            port.end(self._request, Outcome.FAILED)
            raise

    async def _end_early(self, serving: asyncio.Task[None], send: Send) -> None:
        ending = EndingError("the router is ending; retry")
        if self._response is not None:
            self._response.break_off(ending)
            await asyncio.wait((serving,))
        elif not self._started:
            self._given_up = Outcome.FAILED
            await cancelled(serving)
            await self._refuse(NoWorkerError(str(ending)), send)

    async def _refuse(self, error: EvenstepError, send: Send) -> None:
        await send_answer(send, self._asked.dialect.error(error_answer(error)))

    def _left_s(self) -> float | None:
        limit_s = self._deadlines.request_s
        waited_s = self._context.clock() - self._request.arrival_s
        return None if limit_s is None else max(0.0, limit_s - waited_s)

    async def _expire(self, send: Send) -> None:
        """It has taken too long: say so, if it is not at its end just now."""
        stream = self._stream_down
        done = stream is not None and stream.done
        outcome = Outcome.COMPLETED if done else Outcome.EXPIRED
        self._context.port.withdraw(self._request, outcome)
        error = RequestTimeoutError(f"not answered within {self._deadlines.request_s:g} s")
        if not self._headed:
            self._started = True
            await self._refuse(error, send)
        elif stream is not None:
            event = b"" if done else self._error_event(error, stream)
            await send({"type": "http.response.body", "body": event})

    async def _attempts(self, client: HTTPConnection, send: Send) -> None:
        """Try workers until the first byte of an answer, then pass that answer on."""
        waiter = await self._enter(client, send)
        while waiter is not None:
            worker = await waiter
            self._attempts_left -= 1
            try:
                await self._attempt(worker, client, send)
            except UpstreamError as error:
                self._judge(worker, error)
                if self._attempts_left <= 0 or not self._may_retry(worker, error):
                    raise
                waiter = await self._enter_again(client, send, *blamed(worker, error))
            else:
                return

    def _may_retry(self, worker: WorkerSpec, error: UpstreamError) -> bool:
        """Whether a failed attempt may be made elsewhere; one that was too slow costs budget.

        A worker that was lost is out of use, so that it cannot fail many more; and an answer is
        given up only for another one.
        """
        return not isinstance(error, UpstreamTimeoutError) or self._may_ask_elsewhere(worker.id)

    def _may_ask_elsewhere(self, worker_id: str) -> bool:
        request = self._request
        return self._context.port.may_ask_elsewhere(request.group, request.avoid | {worker_id})

    async def _enter(self, client: HTTPConnection, send: Send) -> Waiter | None:
        """Wait for a worker; None if the client has its answer already."""
        return self._context.port.submit(self._request)

    async def _enter_again(
        self, client: HTTPConnection, send: Send, *failed_by: str
    ) -> Waiter | None:
        """The same after a failed attempt."""
        self._request, waiter = self._context.port.give_back(self._request, *failed_by)
        return waiter

    async def _attempt(self, worker: WorkerSpec, client: HTTPConnection, send: Send) -> None:
        self._at, self._failed, self._stream_down = worker.id, False, None
        watch = self._context.attempts.watch(worker.id, self._deadlines)
        async with watch as self._note_started:
            response = await self._post(worker, client, self._body_up())
            await self._take(response, worker, send)

    def _body_up(self) -> bytes:
        """What the worker is sent that answers."""
        return self._asked.dialect.body_up(self._asked.body, self._request.id)

    async def _post(self, worker: WorkerSpec, client: HTTPConnection, body: bytes) -> Response:
        rank = worker.rank if worker.url in self._context.ranked else None
        own_id, client_id = self._request.id, self._asked.client_id
        headers = headers_up(client.headers.raw, own_id, rank, client_id)
        target = self._asked.target
        return await self._context.client.request("POST", worker.url, target, headers, body)

    async def _take(self, response: Response, worker: WorkerSpec, send: Send) -> None:
        try:
            good = response.status < HTTPStatus.BAD_REQUEST
            if good and content_type(response.headers).startswith(b"text/event-stream"):
                await self._stream(worker, response, send)
            else:
                await self._whole(response, send)
        finally:
            response.close()

    async def _whole(self, response: Response, send: Send) -> None:
        body = await response.read()
        self._look_at_status(response.status, header(response.headers, b"retry-after"))
        self._note_first_byte(response)
        counted = tokens_of(body) if self._request.slots == 1 else None
        if counted is not None:
            self._context.port.prompt_counted(self._request, *counted)
        failed = response.status >= HTTPStatus.INTERNAL_SERVER_ERROR
        energy = [(ENERGY_HEADER, self._energy())] if self._request.metered else []
        self._end(Outcome.FAILED if failed else Outcome.COMPLETED)
        headers = (*headers_down(response.headers), *energy)
        await send_answer(send, Answer(response.status, body, headers))

    async def _stream(self, worker: WorkerSpec, response: Response, send: Send) -> None:
        stream = self._stream_down = self._asked.dialect.stream()
        try:
            async for chunk in response:
                if events := stream.feed(chunk):
                    await self._pass_on(events, stream, response, send)
        except UpstreamError as error:
            if not self._started:
                raise
            if not stream.done:
                await self._break_off(worker, error, stream, send)
                return
        first = self._note_first_byte(response)
        if self._times is not None:
            self._times.end()
        # Shorter than what is told in between, most answers would count as nothing.
        self._context.port.progress(self._request, stream.tokens)
        self._end(Outcome.COMPLETED)
        if first:
            await send_head(send, response.status, headers_down(response.headers))
        await send({"type": "http.response.body", "body": self._rest(stream)})

    def _rest(self, stream: EventStream) -> bytes:
        """What is left to be sent at the end of a stream."""
        return stream.rest()

    async def _pass_on(
        self, events: bytes, stream: EventStream, response: Response, send: Send
    ) -> None:
        if not self._started:
            self._look_at_first(events)
            self._note_first_byte(response)
            await send_head(send, response.status, headers_down(response.headers))
            self._headed = True
        if self._times is not None:
            self._times.passed(stream.tokens, self._context.clock())
        if self._request.metered and stream.done:
            comment = ENERGY_HEADER + b": " + self._energy()
            events = with_comment(events, stream.end(events), comment)
        await self._send_body({"type": "http.response.body", "body": events, "more_body": True})
        if stream.tokens - self._told_tokens >= _PROGRESS_TOKENS:
            self._told_tokens = stream.tokens
            self._context.port.progress(self._request, stream.tokens)

    async def _break_off(
        self, worker: WorkerSpec, error: UpstreamError, stream: EventStream, send: Send
    ) -> None:
        """End a stream that has begun: its tokens cannot be taken back, so say what happened."""
        self._judge(worker, error)
        self._end(Outcome.FAILED)
        await send({"type": "http.response.body", "body": self._error_event(error, stream)})

    def _error_event(self, error: EvenstepError, stream: EventStream) -> bytes:
        return self._asked.dialect.error_event(*told_in_stream(error), stream.events)

    def _end(self, outcome: Outcome) -> None:
        """It has its answer; however slowly the client takes it."""
        self._life.reschedule(None)
        self._context.port.end(self._request, outcome)

    def _energy(self) -> bytes:
        """What it has used, as its client is told."""
        energy_j = self._context.port.energy_j(self._request)
        return b"unknown" if energy_j is None else b"%.3f" % energy_j

    def _judge(self, worker: WorkerSpec, error: UpstreamError) -> None:
        judge_failure(self._context.port, self._context.trouble, worker.id, self._request.id, error)

    def _look_at_first(self, events: bytes) -> None:
        """An error may come inside a stream that began well, as its first event."""
        self._failed = FAILED.search(events) is not None
        if not self._failed:
            return
        self._context.port.refused(self._at, self._request.id)
        if (status := _CODE.search(events)) is not None:
            self._look_at_status(int(status[1]))

    def _look_at_status(self, status: int, retry_after: bytes = b"") -> None:
        """See what an answer says of its worker.

        Raises:
            AnsweredError: another worker is to be asked instead.
        """
        self._failed |= status >= HTTPStatus.BAD_REQUEST
        port, request = self._context.port, self._request
        suspect = bool(request.avoid)
        judge_answer(port, self._at, request.id, status, retry_after, suspect=suspect)
        if self._attempts_left > 0 and self._asks_elsewhere(status):
            raise AnsweredError(f"status {status}")

    def _asks_elsewhere(self, status: int) -> bool:
        """Another worker may answer better, and there is one."""
        return may_differ_elsewhere(status) and self._may_ask_elsewhere(self._at)

    def _note_first_byte(self, response: Response) -> bool:
        """What follows goes to the client; whether it is the first.

        Raises:
            RecalledError: nothing may follow, since the request is to be made elsewhere.
        """
        if self._started:
            return False
        self._note_started(response)
        self._started, self._response = True, response
        port, now_s = self._context.port, self._context.clock()
        port.first_byte(self._request, now_s)
        if not self._failed:
            port.answered(self._at, self._request.id)
        self._times = TokenTimes(port.token_stats(self._request.group), self._request.slots)
        return True


def blamed(worker: WorkerSpec, error: UpstreamError) -> tuple[str, ...]:
    """Who is to be avoided from now on: nobody for what the router itself broke off."""
    return () if isinstance(error, RecalledError) else (worker.id,)
