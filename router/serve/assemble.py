"""Builds ``evenstep serve`` from its parts and runs it until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from fastapi import FastAPI
from starlette.types import ASGIApp

from router.admin.app import AddRoutes, create_admin
from router.admin.page import add_page
from router.admin.recording import add_recording
from router.admin.server import serving
from router.admin.settings import add_settings
from router.admin.streams import Streams
from router.admin.workers import add_workers
from router.api.app import create_app
from router.api.front import Front
from router.api.shared_routes import Render, add_instance, add_metrics
from router.config.live import Part, Reload
from router.config.settings import ServeSettings
from router.core.process_counts import ProcessCounts
from router.core.state.cluster import Cluster
from router.dispatch.dispatcher import Dispatcher
from router.file_limit import allow_connections
from router.http import uvicorn_api
from router.http.counts import HttpCounts
from router.http.lifecycle import Lifecycle
from router.http.listening import server_config
from router.http.plane import DataPlane
from router.logs import start_logging
from router.metrics.render import Metrics, Sources
from router.proxy.context import AppContext
from router.proxy.request_log import RequestLog
from router.proxy.splice import HotPath
from router.recording.file import RecordFile
from router.recording.recorder import Recorder
from router.serve import parts as wiring
from router.serve.access import Access
from router.serve.balancing import balancing, deciding
from router.serve.server import MainServer
from router.serve.sockets import admin_tls, opened

log = logging.getLogger(__name__)

_LOOK_S = 0.01


@dataclass(frozen=True, slots=True)
class Built:
    """The application and the objects that control it.

    Attributes:
        app: ASGI application; its lifespan runs the background parts.
        counts: counters of the main port's connections.
        hot: takes requests over ahead of the application; None: it does not.
    """

    app: ASGIApp
    lifecycle: Lifecycle
    reload: Reload
    counts: HttpCounts
    hot: HotPath | None
    made: wiring.Parts
    access: Access


def run(settings: ServeSettings, read: Callable[[], ServeSettings]) -> None:
    """Serve until SIGINT or SIGTERM; ``MainServer`` describes the shutdown.

    Raises:
        ConfigError: an address cannot be bound.
    """
    start_logging(settings.log_level, settings.log_format)
    tls = settings.tls
    with opened(settings) as ports:
        built = build(settings, read, tls, ports.admin)
        allow_connections(settings.max_connections)
        config = server_config(
            built.app, settings.http_limits, counts=built.counts, hot=built.hot, tls=tls
        )
        ports.announce(settings, tls)
        inherited = ports.inherited
        server = MainServer(config, built.lifecycle, built.reload, inherited=inherited)
        server.run(sockets=ports.listeners)


def build(
    settings: ServeSettings,
    read: Callable[[], ServeSettings],
    tls: ssl.SSLContext | None = None,
    admin: socket.socket | None = None,
    processes: ProcessCounts | None = None,
) -> Built:
    """Build the application and its background parts.

    Args:
        settings: settings in force.
        read: reads the settings again.
        tls: certificate of the main port.
        admin: listening socket of the admin port; None: no admin port.
        processes: counters of the router's processes; None: this is the only one.
    """
    lifecycle = Lifecycle(settings.drain_delay_s, settings.grace_s)
    access = Access(settings, time.monotonic)
    made = wiring.parts(settings, access)
    dispatcher, snapshots, cluster = made.dispatcher, made.snapshots, made.dispatcher.cluster
    requests, counts, streams = RequestLog(time.monotonic), HttpCounts(), Streams()
    cluster.watchers.append(requests)
    sources = _sources(made, access, counts, processes)
    metrics = Metrics(cluster, sources, time.monotonic, dispatcher.deciders).render
    recorder = Recorder(cluster, wiring.recorded(settings), time.monotonic, time.time())
    files = [RecordFile(Path(settings.record), recorder)] if settings.record else []
    routes = _admin_routes(lambda: reload, made, metrics, recorder, streams)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        snapshots.start()
        gc.freeze()
        operated = _operated(create_admin(routes, access.operators), streams, admin, tls)
        async with _running((*made.running, *files)), operated:
            await _all_checked(cluster, settings.health_timeout_s)
            yield
        snapshots.close()
        await made.client.aclose()
        log.info("ended; %s", _left(dispatcher))

    context = AppContext(
        *(dispatcher, made.models, made.relay, metrics, time.monotonic),
        *(snapshots.problem, lifecycle, access.door, processes),
    )
    app = Front(create_app(context, lifespan), lifecycle, requests)
    last = [wiring.recording(recorder), wiring.ending(lifecycle)]
    parts = *_guarded(tls, access), *_routing(settings, made), *last
    reload = Reload(settings, read, parts, deciding)
    hot = _hot_path(settings.data_plane, context, requests)
    return Built(app, lifecycle, reload, counts, hot, made, access)


def _hot_path(plane: DataPlane, context: AppContext, requests: RequestLog) -> HotPath | None:
    """Return the hot path if it is configured and uvicorn supports it."""
    if plane is DataPlane.ASGI:
        return None
    lacking = uvicorn_api.missing()
    if lacking:
        log.warning(
            "uvicorn is not as it should be for --data-plane splice: %s", ", ".join(lacking)
        )
        return None
    return HotPath(context, requests)


def _operated(
    app: ASGIApp, streams: Streams, admin: socket.socket | None, tls: ssl.SSLContext | None
) -> contextlib.AbstractAsyncContextManager[None]:
    """Serve the admin port, if there is one, until the block ends."""
    return serving(app, streams, admin, None if admin is None else admin_tls(admin, tls))


def _sources(
    made: wiring.Parts, access: Access, counts: HttpCounts, processes: ProcessCounts | None
) -> Sources:
    engines = made.snapshots, made.agents, made.health, made.gauges
    return Sources(*engines, access.limits, counts, processes or ProcessCounts())


def _guarded(tls: ssl.SSLContext | None, access: Access) -> list[Part]:
    return [*([] if tls is None else [wiring.certificate(tls)]), wiring.keys(access)]


def _routing(settings: ServeSettings, made: wiring.Parts) -> list[Part]:
    """Return the reloadable parts of routing; those that can reject settings come first."""
    decides = balancing(settings, made.dispatcher)
    watching = wiring.watching(made.health, made.gauges)
    return [wiring.workers(made.fleet), decides, watching, wiring.patience(made.relay)]


def _admin_routes(
    reload: Callable[[], Reload],
    made: wiring.Parts,
    metrics: Render,
    recorder: Recorder,
    streams: Streams,
) -> list[AddRoutes]:
    problem, emulated = made.snapshots.problem, made.health.emulated
    page = wiring.page(lambda: reload().settings, made.dispatcher, problem, emulated)
    return [
        partial(add_metrics, render=metrics),
        partial(add_instance, deciders=made.dispatcher.deciders),
        partial(add_page, render=page, streams=streams),
        partial(add_recording, recorder=recorder, streams=streams),
        partial(add_workers, fleet=made.fleet),
        partial(add_settings, reload=reload),
    ]


class _Runs(Protocol):
    async def run(self) -> None: ...


@contextlib.asynccontextmanager
async def _running(parts: Iterable[_Runs]) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(part.run()) for part in parts]
        yield
        for task in running:
            task.cancel()


async def _all_checked(cluster: Cluster, longest_s: float) -> None:
    """Wait for the first health check of every worker, so that early clients find workers."""
    workers = [worker for group in cluster.groups.values() for worker in group.workers.values()]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(longest_s):
            while not all(worker.checked for worker in workers):  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(_LOOK_S)


def _left(dispatcher: Dispatcher) -> str:
    """Describe the requests left at shutdown; after a clean one both counts are 0."""
    groups = dispatcher.cluster.groups.values()
    flying = sum(worker.in_flight for group in groups for worker in group.workers.values())
    waiting = sum(len(decider.pool) for decider in dispatcher.deciders.values())
    return f"{flying} requests in flight, {waiting} waiting"
