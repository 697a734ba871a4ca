"""``evenstep serve``: the parts put together, and run until a signal ends them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator

import uvicorn
from fastapi import FastAPI

from router.app import AppContext, create_app
from router.cluster import Cluster
from router.config import ServeSettings
from router.dispatch import Dispatcher, DispatchSettings
from router.engines.health import HealthMonitor
from router.engines.snapshots import SnapshotClient
from router.engines.upstream import HttpClient
from router.metrics import Metrics
from router.models import ModelTable
from router.policies import POLICIES, PolicySettings
from router.proxy.relay import RelayContext
from router.types import Policy

_GRACE_S = 10


def run(settings: ServeSettings) -> None:
    """Serve until SIGINT or SIGTERM; running streams then get a few seconds to end."""
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    uvicorn.run(
        build(settings),
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http="httptools",
        ws="none",
        access_log=False,
        server_header=False,
        date_header=False,
        log_config=None,
        timeout_graceful_shutdown=_GRACE_S,
    )


def build(settings: ServeSettings) -> FastAPI:
    """The application with all that runs beside it."""
    cluster = Cluster(settings.workers)
    dispatcher = _dispatcher(settings, cluster)
    models = ModelTable(cluster)
    snapshots = SnapshotClient(
        settings.workers, dispatcher.apply, lambda i: _full_wanted(cluster, i), time.monotonic
    )
    health = HealthMonitor(
        settings.workers,
        dispatcher.apply,
        models.learn,
        interval_s=settings.health_interval_s,
        timeout_s=settings.health_timeout_s,
        failures=settings.health_failures,
    )
    client = HttpClient(settings.connect_timeout_s)
    relay = RelayContext(
        port=dispatcher,
        client=client,
        trouble=health.probe_now,
        ranked=_shared_urls(settings),
        max_attempts=settings.max_attempts,
        clock=time.monotonic,
    )
    metrics = Metrics(dispatcher, snapshots, health, time.monotonic)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        snapshots.start()
        gc.freeze()
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(health.run()), tasks.create_task(dispatcher.run())]
            yield
            for task in running:
                task.cancel()
        snapshots.close()
        await client.aclose()

    context = AppContext(dispatcher, models, relay, metrics.render, time.monotonic)
    return create_app(context, lifespan)


def _dispatcher(settings: ServeSettings, cluster: Cluster) -> Dispatcher:
    chosen = PolicySettings(seed=settings.seed, tie_weight=settings.tie_weight)

    def make_policy() -> Policy:
        return POLICIES[settings.policy].make(chosen)

    return Dispatcher(
        cluster,
        make_policy,
        fallback=lambda: POLICIES["least_tokens"].make(chosen),
        settings=DispatchSettings(
            dispatch=settings.dispatch,
            pool_limit=settings.pool_size,
            patience_s=settings.starvation_s,
            queue_timeout_s=settings.queue_timeout_s,
            snapshot_stale_s=settings.snapshot_stale_s,
        ),
        clock=time.monotonic,
    )


def _full_wanted(cluster: Cluster, worker_id: str) -> bool:
    feed = cluster.worker(worker_id).feed
    return feed is None or feed.full_wanted


def _shared_urls(settings: ServeSettings) -> frozenset[str]:
    counts = Counter(worker.url for worker in settings.workers)
    return frozenset(url for url, count in counts.items() if count > 1)
