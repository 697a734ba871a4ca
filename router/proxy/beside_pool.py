"""Endpoints that generate nothing: their requests skip the pool and take no slot.

Each request goes to the live worker with the fewest requests of all kinds under way. If that worker
fails before the first byte, the request is retried at another.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence, Set
from functools import partial
from http import HTTPStatus
from typing import cast

from fastapi import FastAPI, Request, Response
from starlette.requests import HTTPConnection
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from router.core.errors import (
    AnsweredError,
    DescriptorsError,
    EndingError,
    EvenstepError,
    NoWorkerError,
    RequestTimeoutError,
    UpstreamError,
    UpstreamTimeoutError,
)
from router.core.queue.retry import may_differ_elsewhere
from router.core.state.group import Group
from router.core.state.worker import Worker
from router.core.types import Succeeded, WorkerSpec
from router.engines.http_client import Response as EngineResponse
from router.proxy import multipart
from router.proxy.answers import (
    Answer,
    Header,
    content_type,
    error_answer,
    header,
    headers_down,
    headers_up,
    send_answer,
    send_head,
    told_in_stream,
)
from router.proxy.asgi_client import cancelled, client_left, read_body
from router.proxy.attempts import Attempt, judge_answer, judge_failure
from router.proxy.body import model_in
from router.proxy.client_request import ClientRequest
from router.proxy.context import DecidingContext
from router.proxy.dialects import COMPLETIONS, MESSAGES
from router.proxy.events import check_end
from router.proxy.json_fields import with_field
from router.proxy.request_log import note_sent

# vLLM 0.32 serves these, each if the model supports it.
PATHS = (
    *("/v1/embeddings", "/v2/embed", "/pooling", "/classify"),
    *("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
    *("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech"),
    *("/tokenize", "/detokenize", "/v1/messages/count_tokens"),
)

# A larger form is parsed in a thread, to keep the event loop free.
_LARGE_BYTES = 1024 * 1024


class Aside:
    """Counts of these requests, by worker."""

    def __init__(self, context: DecidingContext) -> None:
        self.context = context
        self.in_flight = 0
        self._sent: Counter[str] = Counter()

    def choose(self, group: Group, tried: frozenset[str], lacks: Set[str]) -> Worker:
        """The least busy untried worker that serves the model.

        Raises:
            NoWorkerError: no such worker is up.
        """
        closed = tried | lacks
        able = [worker for worker_id, worker in group.workers.items() if worker_id not in closed]
        taking = [worker for worker in able if worker.takes]
        if not taking:
            raise NoWorkerError(f"no worker of group {group.name!r} is up; retry")
        return min(
            [worker for worker in taking if _let_in(worker)] or taking,
            key=self._busy,
        )

    def begin(self, group: Group, worker: Worker, attempt: str) -> None:
        self.context.dispatcher.deciders[group.name].stats.beside += 1
        worker.breaker.sent(attempt)
        worker.aside += 1
        self.in_flight += 1
        self._sent[worker.spec.id] += 1

    def end(self, worker: Worker, attempt: str) -> None:
        worker.breaker.gone(attempt)
        worker.aside -= 1
        self.in_flight -= 1

    def _busy(self, worker: Worker) -> tuple[int, int]:
        return worker.in_flight + worker.aside, self._sent[worker.spec.id]


def _let_in(worker: Worker) -> bool:
    """Whether the breaker admits one more; after an ejection it allows trials only."""
    return worker.breaker.capacity(1, worker.slots, worker.in_flight + worker.aside) > 0


def add_aside(app: FastAPI, context: DecidingContext) -> Aside:
    """Add these endpoints to an application."""
    aside = Aside(context)
    for path in PATHS:
        app.router.routes.append(Route(path, partial(_serve, aside), methods=["POST"]))
    return aside


async def _serve(aside: Aside, request: Request) -> Response:
    models, cluster = aside.context.models, aside.context.dispatcher.cluster
    body, model = await _read(aside, request)
    group = cluster.groups[models.group(model)]
    dialect = MESSAGES if request.url.path.startswith("/v1/messages/") else COMPLETIONS
    asked = ClientRequest.read(request.scope, body, dialect)
    # The object is an ASGI application, and Starlette only calls it.
    return cast(Response, _Relay(aside, group, asked, models.lacking(model)))


async def _read(aside: Aside, request: Request) -> tuple[bytes, str | None]:
    """The body with its model alias resolved, and that model."""
    body, resolve = await read_body(request), aside.context.models.resolve
    kind = content_type(request.headers.raw)
    if kind.lower().startswith(multipart.FORM):
        large = len(body) > _LARGE_BYTES
        find = partial(multipart.find_model, kind, body)
        found = await asyncio.to_thread(find) if large else find()
        if found is None or not found.value:
            return body, None
        model = resolve(found.value) or found.value
        same = model == found.value
        return body if same else multipart.with_model(body, found, model), model
    named = model_in(body)
    meant = resolve(named)
    return (with_field(body, "model", meant) if meant and meant != named else body), meant


class _Relay:
    """ASGI application for one request whose body has been read."""

    def __init__(
        self, aside: Aside, group: Group, asked: ClientRequest, lacks: frozenset[str]
    ) -> None:
        self._aside = aside
        self._context = aside.context.relay
        self._group = group
        self._asked = asked
        self._token = asked.head.token
        self._lacks = lacks
        self._deadlines = self._context.deadlines.within(asked.timeout_s)
        self._tried: frozenset[str] = frozenset()
        self._attempts_left = self._context.max_attempts
        self._life: asyncio.Timeout
        self._started = False
        self._streams: EngineResponse | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        serving = asyncio.create_task(self._serve(HTTPConnection(scope), send))
        leaving = asyncio.create_task(client_left(receive))
        try:
            await asyncio.wait((serving, leaving), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # the server's shutdown timeout is over
            if self._streams is None:
                raise
            self._streams.break_off(EndingError("the router is ending; retry"))
            await asyncio.wait((serving,))
        finally:
            leaving.cancel()
            await cancelled(serving)

    async def _serve(self, client: HTTPConnection, send: Send) -> None:
        try:
            async with asyncio.timeout(self._deadlines.request_s) as self._life:
                while not await self._attempt(client, send):
                    pass
        except TimeoutError:
            if not self._life.expired():
                raise
            limit_s = self._deadlines.request_s
            within, own = f"not answered within {limit_s:g} s", limit_s == self._asked.timeout_s
            await self._refuse(RequestTimeoutError(within, own=own), send)
        except EvenstepError as error:
            await self._refuse(error, send)

    async def _refuse(self, error: EvenstepError, send: Send) -> None:
        dialect = self._asked.dialect
        if not self._started:
            await send_answer(send, dialect.error(error_answer(error)))
            return
        event = dialect.error_event(*told_in_stream(error), 0)
        await send({"type": "http.response.body", "body": event})

    async def _attempt(self, client: HTTPConnection, send: Send) -> bool:
        """Whether the client has its answer; if not, retry."""
        chosen = self._aside.choose(self._group, self._tried, self._lacks)
        worker = chosen.spec
        attempt = f"{self._token}r{len(self._tried)}"
        line = note_sent(client.scope, self._group.name, worker.id)
        self._tried |= {worker.id}
        self._attempts_left -= 1
        self._aside.begin(self._group, chosen, attempt)
        context = self._context
        try:
            with context.attempts.watch(worker.id, self._deadlines) as watched:
                response = await self._post(worker)
                try:
                    self._judge(response, worker, attempt)
                    told = context.told(worker.id, line)
                    await self._pass_on(response, watched, send, told)
                finally:
                    response.close()
        except AnsweredError as error:
            if line is not None:
                line.failed(worker.id, error)
            return False
        except UpstreamError as error:
            judge_failure(context.port, context.trouble, worker.id, attempt, error, context.clock())
            if self._started or not self._may_retry(error):
                raise
            if line is not None:
                line.failed(worker.id, error)
            return False
        finally:
            self._aside.end(chosen, attempt)
        return True

    async def _post(self, worker: WorkerSpec) -> EngineResponse:
        rank = worker.rank if worker.url in self._context.ranked else None
        headers = headers_up(self._asked.headers, self._token, rank, self._asked.head.client_id)
        target, body = self._asked.target, self._asked.body
        return await self._context.client.request("POST", worker.url, target, headers, body)

    def _judge(self, response: EngineResponse, worker: WorkerSpec, attempt: str) -> None:
        """Report an answer's status to the dispatcher.

        Raises:
            AnsweredError: retry at another worker.
        """
        port, status, now_s = self._context.port, response.status, self._context.clock()
        retry_after = header(response.headers, b"retry-after")
        suspect = len(self._tried) > 1
        judge_answer(port, worker.id, attempt, status, retry_after, now_s, suspect=suspect)
        if self._attempts_left and may_differ_elsewhere(status) and self._may_ask_elsewhere():
            raise AnsweredError(f"status {status}")
        if status < HTTPStatus.BAD_REQUEST:
            port.apply(Succeeded(attempt, worker.id, now_s))

    def _may_retry(self, error: UpstreamError) -> bool:
        if isinstance(error, DescriptorsError):
            return False
        # A lost worker is out of use and fails no more requests; a slow one may, so its retries
        # cost budget.
        slow = isinstance(error, UpstreamTimeoutError)
        return self._attempts_left > 0 and (not slow or self._may_ask_elsewhere())

    def _may_ask_elsewhere(self) -> bool:
        return self._context.port.may_ask_elsewhere(self._group.name, self._tried | self._lacks)

    async def _pass_on(
        self, response: EngineResponse, watched: Attempt, send: Send, told: Sequence[Header]
    ) -> None:
        headers = [*headers_down(response.headers), *told]
        if not content_type(response.headers).startswith(b"text/event-stream"):
            body = await response.read()
            self._life.reschedule(None)  # the limit excludes the client's reading
            self._started = True
            await send_answer(send, Answer(response.status, body, tuple(headers)))
            return
        stream = self._asked.dialect.stream()
        async for chunk in response:
            if not self._started:
                watched.note_started(response)
                self._started, self._streams = True, response
                await send_head(send, response.status, headers)
            if events := stream.feed(chunk):
                await send({"type": "http.response.body", "body": events, "more_body": True})
        check_end(stream, response.framed)
        if not self._started:
            await send_head(send, response.status, headers)
        await send({"type": "http.response.body", "body": stream.rest()})
