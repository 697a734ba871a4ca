"""HTTP interface for clients: vLLM's endpoints, and information for operators."""

import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from importlib.metadata import version
from typing import Any, Protocol, cast

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.routing import Route

from router.api.front import add_error_handlers
from router.api.openapi import add_description
from router.api.shared_routes import add_instance, add_metrics
from router.core.state import lockstep
from router.core.state.group import Group
from router.core.state.prefill_worker import PrefillWorker
from router.core.state.worker import Worker
from router.proxy.asgi_client import read_body, serve
from router.proxy.beside_pool import Aside, add_aside
from router.proxy.context import ServingContext
from router.proxy.endpoints import ENDPOINTS, relay_of
from router.replicas.leading import Leading, shown


class AppContext(ServingContext, Protocol):
    """Dependencies of the routes."""

    async def metrics(self) -> bytes:
        """The Prometheus text."""

    def problem(self, worker_id: str, /) -> str | None:
        """Why a worker's snapshots are ignored; None if they count."""


def create_app(
    context: AppContext, running: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
) -> FastAPI:
    """Build the application; ``running`` surrounds its life."""
    app = FastAPI(
        title="Evenstep",
        version=version("evenstep"),
        lifespan=lambda _: running(),
        redirect_slashes=False,
    )
    add_generation(app, context)
    aside = add_aside(app, context)
    _add_information(app, context, aside)
    add_metrics(app, context.metrics)
    add_instance(app, context.dispatcher.deciders)
    add_error_handlers(app)
    add_description(app)
    return app


def _add_information(app: FastAPI, context: AppContext, aside: Aside) -> None:
    card = {"object": "model", "created": int(time.time()), "owned_by": "evenstep"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """Models that the workers serve, as their engines describe them."""
        return {"object": "list", "data": [{**card, **each} for each in context.models.cards]}

    @app.get("/health")
    async def health() -> JSONResponse:
        """200 while requests are served, else 503; either way with the state of each worker."""
        cluster = context.dispatcher.cluster
        groups, up = cluster.groups.values(), any(group.serving for group in cluster.answering)
        status = "ok" if up else "unavailable"
        if context.lifecycle.draining:
            status = "draining"
        body: dict[str, Any] = {
            "status": status,
            "groups": {group.name: _describe_group(group, context) for group in groups},
        }
        if not (leading := context.relay.leading).alone:
            body["replica"] = _describe_replica(leading)
        return JSONResponse(body, status_code=200 if status == "ok" else 503)

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """200 where new requests may be sent: they are decided on here, or passed on."""
        served = any(group.serving for group in context.dispatcher.cluster.answering)
        leading = context.relay.leading
        good = served and (leading.serves or leading.follows) and not context.lifecycle.draining
        body = {"ready": good, **({} if leading.alone else _describe_replica(leading))}
        return JSONResponse(body, status_code=200 if good else 503)

    @app.get("/load")
    async def load() -> dict[str, int]:
        """Number of requests under way, including those that wait."""
        return {"server_load": sum(context.dispatcher.under_way) + aside.in_flight}

    @app.get("/version")
    async def show_version() -> dict[str, str]:
        """The router's version."""
        return {"version": app.version}


def _describe_replica(leading: Leading) -> dict[str, Any]:
    name, leader = shown(leading.name), shown(leading.leader) or None
    return {"name": name, "decides": leading.decides, "leader": leader}


def _describe_group(group: Group, context: AppContext) -> dict[str, Any]:
    now_s, prefills = context.clock(), context.dispatcher.cluster.prefill_group(group.name)
    if group.serves is not None:
        prompts = f"for group {group.serves.name}"
    elif prefills is None:
        prompts = "here"
    else:
        prompts = f"in {prefills.name}" if prefills.serving else f"here: {prefills.name} is down"
    return {
        "lockstep": group.lockstep,
        "lockstep_by": lockstep.source(group),
        "prompts": prompts,
        "pool_requests": context.dispatcher.deciders[group.name].waiting,
        "workers": [
            _describe_worker(worker, context.problem(worker.spec.id), now_s)
            for worker in group.workers.values()
        ],
    }


def _describe_worker(worker: Worker, problem: str | None, now_s: float) -> dict[str, Any]:
    spec, feed = worker.spec, worker.feed
    fed = "fresh" if feed else "stale"
    return {
        "id": spec.id,
        "url": spec.url,
        "up": worker.live,
        "down_reason": worker.down_reason,
        "draining": worker.draining,
        "breaker": worker.breaker.state.value,
        "slots": worker.slots,
        "slots_reported": feed.slots or None if feed else None,
        "free_slots": worker.free_slots,
        "in_flight": worker.in_flight,
        "load_tokens": worker.load_tokens,
        "kept_tokens": worker.kept_tokens if isinstance(worker, PrefillWorker) else None,
        "state_source": worker.source.value,
        "foreign_requests": worker.foreign.requests,
        "snapshots": fed if spec.snapshots else "none",
        "snapshots_problem": problem,
        "unreported": worker.unreported,
        "max_loras": feed.last.max_loras if feed else 0,
        "running": feed.running if feed else None,
        "snapshot_sequence": feed.sequence if feed else None,
        "snapshot_age_s": round(now_s - feed.received_s, 3) if feed else None,
    }


def add_generation(app: FastAPI, context: ServingContext) -> None:
    """Add the endpoints that generate as ASGI routes (``--data-plane asgi``)."""

    async def generate(request: Request) -> Response:
        relay = await relay_of(context, request.scope, await read_body(request))
        # The object is an ASGI application, and Starlette only calls it.
        return cast(Response, partial(serve, relay))

    for path in ENDPOINTS:
        app.router.routes.append(Route(path, generate, methods=["POST"]))
