"""The HTTP face: OpenAI-compatible completions, and what operators ask for."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, cast

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from router.cluster import Cluster, Group
from router.decider import Clock
from router.dispatch import Dispatcher
from router.errors import EvenstepError
from router.models import ModelTable
from router.policies.instances import to_json
from router.prefill import PrefillWorker
from router.proxy.answers import error_answer
from router.proxy.events import error_body
from router.proxy.parse import ParsedRequest, parse
from router.proxy.relay import Relay, RelayContext
from router.proxy.split_relay import SplitRelay
from router.types import Request as PoolRequest
from router.worker import Worker

COMPLETION_PATHS = ("/v1/completions", "/v1/chat/completions")

_KINDS = {404: "NotFoundError", 405: "MethodNotAllowedError"}

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True)
class AppContext:
    """What the routes need.

    Attributes:
        dispatcher: pools and cluster.
        models: which group serves which model.
        relay: shared by all relays.
        metrics: renders the Prometheus text.
        clock: the dispatcher's.
        problem: why a worker's snapshots do not count, None as far as all is well.
    """

    dispatcher: Dispatcher
    models: ModelTable
    relay: RelayContext
    metrics: Callable[[], bytes]
    clock: Clock
    problem: Callable[[str], str | None] = lambda _: None


def create_app(context: AppContext, lifespan: Lifespan | None = None) -> FastAPI:
    """The application.

    Args:
        context: see ``AppContext``.
        lifespan: starts and stops what runs beside it.
    """
    app = FastAPI(
        title="Evenstep",
        version=version("evenstep"),
        lifespan=lifespan,
        redirect_slashes=False,
    )
    _add_completions(app, context)
    _add_information(app, context)
    _add_errors(app)
    return app


def _add_completions(app: FastAPI, context: AppContext) -> None:
    async def complete(request: Request) -> Response:
        body = await request.body()
        parsed = parse(body)
        cluster = context.dispatcher.cluster
        group = cluster.groups[context.models.group(parsed.model)]
        waiting = _pool_request(parsed, group, context.clock())
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        relay = Relay
        prefills = cluster.prefill_group(group.name)
        if prefills is not None and _splits(parsed, context.relay):
            relay, waiting = SplitRelay, replace(waiting, group=prefills.name)
        # Starlette only calls what it is given as an ASGI application, which a relay is.
        return cast(Response, relay(context.relay, waiting, target, body))

    for path in COMPLETION_PATHS:
        app.router.routes.append(Route(path, complete, methods=["POST"]))


def _splits(parsed: ParsedRequest, relay: RelayContext) -> bool:
    """Whether one worker is to compute a request's prompt, and another to decode.

    KV that is handed to one engine request is let go as soon as it is fetched: vLLM's connectors
    have none for a second one (``n`` above 1), what is found by its content is there for all.
    """
    handed = relay.transfer is not None and relay.transfer.kept_s is not None
    return parsed.splittable and (parsed.slots == 1 or not handed)


def _pool_request(parsed: ParsedRequest, group: Group, now_s: float) -> PoolRequest:
    return PoolRequest(
        id=f"es-{secrets.token_hex(10)}",
        group=group.name,
        prompt_tokens=parsed.known_tokens + group.token_rate.tokens(parsed.text_bytes),
        slots=parsed.slots,
        max_tokens=parsed.max_tokens,
        priority=parsed.priority,
        arrival_s=now_s,
        text_bytes=parsed.text_bytes if parsed.text_only and not parsed.known_tokens else 0,
        exact=parsed.known_tokens > 0 and not parsed.text_bytes,
    )


def _add_information(app: FastAPI, context: AppContext) -> None:
    card = {"object": "model", "created": int(time.time()), "owned_by": "evenstep"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """Models that the workers serve."""
        return {"object": "list", "data": [{"id": name, **card} for name in context.models.names]}

    @app.get("/health")
    async def health() -> JSONResponse:
        """200 while some worker can serve, else 503; the state of each worker either way."""
        groups = context.dispatcher.cluster.groups.values()
        up = any(group.live_workers() for group in groups if group.serves is None)
        body = {
            "status": "ok" if up else "unavailable",
            "groups": {group.name: _describe_group(group, context) for group in groups},
        }
        return JSONResponse(body, status_code=200 if up else 503)

    @app.get("/version")
    async def show_version() -> dict[str, str]:
        """The router's version."""
        return {"version": version("evenstep")}

    @app.get("/debug/instance")
    async def instance(group: str = "default") -> dict[str, Any]:
        """The integer program that bfio solved in a group's last round, for `evenstep solve`."""
        decider = context.dispatcher.deciders.get(group)
        if decider is None or decider.solved is None:
            raise HTTPException(404, f"bfio solved nothing in the last round of group {group!r}")
        return to_json(decider.solved.instance)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(context.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _describe_group(group: Group, context: AppContext) -> dict[str, Any]:
    now = context.clock()
    return {
        "lockstep": group.lockstep,
        "prompts": _prompts(group, context.dispatcher.cluster),
        "pool_requests": len(context.dispatcher.deciders[group.name].pool),
        "workers": [_describe_worker(worker, now, context) for worker in group.workers.values()],
    }


def _prompts(group: Group, cluster: Cluster) -> str:
    """Who computes the prompts."""
    prefills = cluster.prefill_group(group.name)
    if group.serves is not None:
        return f"for group {group.serves.name}"
    if prefills is None:
        return "here"
    return f"in {prefills.name}" if prefills.live_workers() else f"here: {prefills.name} is down"


def _describe_worker(worker: Worker, now_s: float, context: AppContext) -> dict[str, Any]:
    fed = "fresh" if worker.feed else "stale"
    return {
        "id": worker.spec.id,
        "url": worker.spec.url,
        "up": worker.live,
        "down_reason": worker.down_reason,
        "slots": worker.slots,
        "free_slots": worker.free_slots,
        "in_flight": worker.in_flight,
        "load_tokens": worker.load_tokens,
        "kept_tokens": worker.kept_tokens if isinstance(worker, PrefillWorker) else None,
        "state_source": worker.source.value,
        "foreign_requests": worker.foreign.requests,
        "snapshots": fed if worker.spec.snapshots else "none",
        "snapshots_problem": context.problem(worker.spec.id),
        "running": worker.feed.running if worker.feed else None,
        "snapshot_sequence": worker.feed.sequence if worker.feed else None,
        "snapshot_age_s": round(now_s - worker.feed.received_s, 3) if worker.feed else None,
    }


def _add_errors(app: FastAPI) -> None:
    async def on_error(_: Request, error: Exception) -> Response:
        answer = error_answer(cast(EvenstepError, error))
        headers = {name.decode(): value.decode() for name, value in answer.headers}
        return Response(answer.body, answer.status, headers)

    async def on_http_error(_: Request, error: Exception) -> Response:
        error = cast(HTTPException, error)
        kind = _KINDS.get(error.status_code, "HTTPError")
        body = error_body(error.detail, kind, error.status_code)
        headers = {**(error.headers or {}), "content-type": "application/json"}
        return Response(body, error.status_code, headers)

    async def on_failure(_: Request, __: Exception) -> Response:
        body = error_body("internal error", "InternalServerError", 500)
        return Response(body, 500, {"content-type": "application/json"})

    async def on_client_left(_: Request, __: Exception) -> Response:
        return Response(status_code=400)  # for nobody: it left before its request was complete

    app.add_exception_handler(EvenstepError, on_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ClientDisconnect, on_client_left)
    app.add_exception_handler(Exception, on_failure)
