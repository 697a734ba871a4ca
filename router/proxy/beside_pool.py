"""Endpoints that generate nothing: their requests skip the pool and take no slot.

Each goes to the live worker with the fewest requests of all kinds, in any group of its model. If
that fails before the first byte, another worker is tried.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from fastapi import FastAPI, Request, Response
from starlette.routing import Route
from starlette.types import Scope

from router.core.errors import NoWorkerError
from router.core.events import Progressed, PromptCounted, RelayEvent, Succeeded
from router.core.state.group import Group
from router.core.state.worker import Worker
from router.core.stats import TokenStats
from router.core.targets import Verdict
from router.core.types import Outcome
from router.core.types import Request as PoolRequest
from router.dispatch.interface import Again, DispatchPort, Waiter
from router.proxy import multipart
from router.proxy.answers import header
from router.proxy.asgi_client import read_body, serve
from router.proxy.body import model_in
from router.proxy.client_request import ClientRequest
from router.proxy.context import ServingContext
from router.proxy.dialects import COMPLETIONS, MESSAGES
from router.proxy.json_fields import with_field
from router.proxy.relay import Relay
from router.proxy.request_log import note_sent
from router.replicas.leading import Leading

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

    def __init__(self, context: ServingContext) -> None:
        self.context = context
        self.in_flight = 0
        self._sent: Counter[str] = Counter()

    def choose(self, groups: Sequence[Group], tried: frozenset[str], lacks: Set[str]) -> Worker:
        """The least busy untried worker that serves the model; NoWorkerError: none is up."""
        closed = tried | lacks
        every = [pair for group in groups for pair in group.workers.items()]
        taking = [worker for worker_id, worker in every if worker_id not in closed and worker.takes]
        if not taking:
            raise NoWorkerError(f"no worker of group {groups[0].name!r} is up; retry")

        def lets_in(worker: Worker) -> bool:  # after an ejection the breaker allows trials only
            return worker.breaker.capacity(1, worker.slots, worker.in_flight + worker.aside) > 0

        chosen = min(
            list(filter(lets_in, taking)) or taking,
            key=lambda worker: (worker.in_flight + worker.aside, self._sent[worker.spec.id]),
        )
        self._sent[chosen.spec.id] += 1
        return chosen

    def begin(self, worker: Worker, attempt: str) -> None:
        self.context.dispatcher.deciders[worker.spec.group].stats.beside += 1
        worker.breaker.sent(attempt)
        worker.aside += 1
        self.in_flight += 1

    def end(self, worker: Worker, attempt: str) -> None:
        worker.breaker.gone(attempt)
        worker.aside -= 1
        self.in_flight -= 1


def add_aside(app: FastAPI, context: ServingContext) -> Aside:
    """Add these endpoints to an application."""
    aside = Aside(context)
    for path in PATHS:
        app.router.routes.append(Route(path, partial(_serve, aside), methods=["POST"]))
    return aside


async def _serve(aside: Aside, request: Request) -> Response:
    context, scope = aside.context, request.scope
    body, model = await _read(aside, request)
    groups = context.models.serving(model)
    dialect = MESSAGES if scope["path"].startswith("/v1/messages/") else COMPLETIONS
    asked = ClientRequest.read(scope, body, dialect)
    waiting = PoolRequest(
        id=asked.head.token,
        group=groups[0].name,
        prompt_tokens=0,
        arrival_s=context.clock(),
        lacks=context.models.lacking(model),
    )
    place = _Place(aside, groups, scope, asked, context.relay.port)
    # They take no slot, so no replica needs to know of another's.
    relay = Relay(replace(context.relay, port=place, leading=Leading()), waiting, asked)
    # The object is an ASGI application, and Starlette only calls it.
    return cast(Response, partial(serve, relay))


async def _read(aside: Aside, request: Request) -> tuple[bytes, str | None]:
    body, resolve = await read_body(request), aside.context.models.resolve
    kind = header(request.headers.raw, b"content-type")
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


@dataclass(slots=True)
class _Place:
    """One of these requests at its worker; acts as a relay's dispatcher."""

    _aside: Aside
    _groups: Sequence[Group]
    _scope: Scope
    _asked: ClientRequest
    _port: DispatchPort
    _worker: Worker | None = None

    def submit(self, request: PoolRequest) -> Waiter:
        worker = self._aside.choose(self._groups, request.avoid, request.lacks)
        self._asked.line = note_sent(self._scope, worker.spec.group, worker.spec.id)
        self._aside.begin(worker, request.id)
        self._worker = worker
        chosen = asyncio.get_running_loop().create_future()
        chosen.set_result(worker.spec)
        return chosen

    def give_back(self, request: PoolRequest, *failed_by: str) -> Again:
        # Also after a recall: there is no queue in which the worker could recover.
        tried = () if self._worker is None else (self._worker.spec.id,)
        self.end(request, Outcome.FAILED)
        again = request.again(*failed_by, *tried)
        return again, self.submit(again)

    def may_ask_elsewhere(self, request: PoolRequest, asked: Set[str]) -> bool:
        return self._port.may_ask_elsewhere(request, asked)

    def began(
        self, request: PoolRequest, worker_id: str, now_s: float, *, good: bool = True
    ) -> TokenStats:
        if good:
            self._port.apply(Succeeded(request.id, worker_id, now_s))
        return TokenStats()  # these answers have no tokens

    def apply(self, event: RelayEvent) -> None:
        if not isinstance(event, Progressed | PromptCounted):
            self._port.apply(event)

    def end(self, request: PoolRequest, _: Outcome) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            self._aside.end(worker, request.id)

    def judged(self, group: str, verdict: Verdict) -> None:
        """They have no targets."""

    def energy_j(self, _: PoolRequest) -> float | None:
        return None
