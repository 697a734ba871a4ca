"""``evenstep serve``: the parts put together, and run until a signal ends them."""

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

from router import wiring
from router.access.access import Access
from router.admin.app import AddRoutes, Render, add_instance, add_metrics, create_admin
from router.admin.page import add_page
from router.admin.recording import add_recording
from router.admin.server import serving
from router.admin.settings import add_settings
from router.admin.streams import Streams
from router.admin.workers import add_workers
from router.app import create_app
from router.balancing import balancing, deciding
from router.cluster import Cluster
from router.dispatch import Dispatcher
from router.file_limit import allow_connections
from router.front import Front
from router.http import uvicorn_api
from router.http.counts import HttpCounts
from router.http.plane import DataPlane
from router.lifecycle import Lifecycle
from router.listening import server_config
from router.logs import start_logging
from router.main_server import MainServer
from router.metrics.render import Metrics, Sources
from router.ports import admin_tls, opened
from router.processes.counts import ProcessCounts
from router.proxy.context import AppContext
from router.proxy.exchange import HotPath
from router.recording.file import RecordFile
from router.recording.recorder import Recorder
from router.reload import Part, Reload
from router.request_log import RequestLog
from router.settings.serve import ServeSettings

log = logging.getLogger(__name__)

_LOOK_S = 0.01


@dataclass(frozen=True, slots=True)
class Built:
    """What is served, and what moves it.

    Attributes:
        app: the application with all that runs beside it.
        lifecycle: how far from its end it is.
        reload: has the settings read again.
        counts: of the main port's connections.
        hot: takes requests over before the application has them, if it is to.
        made: what routes requests.
        access: all keys.
    """

    app: ASGIApp
    lifecycle: Lifecycle
    reload: Reload
    counts: HttpCounts
    hot: HotPath | None
    made: wiring.Parts
    access: Access


def run(settings: ServeSettings, read: Callable[[], ServeSettings]) -> None:
    """Serve until SIGINT or SIGTERM; see ``MainServer`` for how it ends.

    Args:
        settings: those to begin with.
        read: reads them anew.

    Raises:
        ConfigError: an address cannot be listened on.
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
    """The application with all that runs beside it.

    Args:
        settings: see ``ServeSettings``.
        read: reads them anew.
        tls: what the main port's clients are shown.
        admin: where the admin port listens; None: there is none.
        processes: of the router; None: this is the only one.
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
    """What takes requests over, if it is to, and can."""
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
    """The admin port, if there is one, while the block lasts."""
    return serving(app, streams, admin, None if admin is None else admin_tls(admin, tls))


def _sources(
    made: wiring.Parts, access: Access, counts: HttpCounts, processes: ProcessCounts | None
) -> Sources:
    """What metrics are read of beside the cluster."""
    engines = made.snapshots, made.agents, made.health, made.gauges
    return Sources(*engines, access.limits, counts, processes or ProcessCounts())


def _guarded(tls: ssl.SSLContext | None, access: Access) -> list[Part]:
    """What is shown to clients, and what they have to show."""
    return [*([] if tls is None else [wiring.certificate(tls)]), wiring.keys(access)]


def _routing(settings: ServeSettings, made: wiring.Parts) -> list[Part]:
    """What of it takes other settings while it runs; first who may refuse them."""
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
    """What the admin port answers."""
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
    """What runs beside the server, until the block ends."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(part.run()) for part in parts]
        yield
        for task in running:
            task.cancel()


async def _all_checked(cluster: Cluster, longest_s: float) -> None:
    """Wait until each worker has been looked at, so that who can connect can be served."""
    workers = [worker for group in cluster.groups.values() for worker in group.workers.values()]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(longest_s):
            while not all(worker.checked for worker in workers):  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(_LOOK_S)


def _left(dispatcher: Dispatcher) -> str:
    """What is counted at the end: nothing, if everything was ended as it should be."""
    groups = dispatcher.cluster.groups.values()
    flying = sum(worker.in_flight for group in groups for worker in group.workers.values())
    waiting = sum(len(decider.pool) for decider in dispatcher.deciders.values())
    return f"{flying} requests in flight, {waiting} waiting"
