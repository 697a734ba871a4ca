"""``evenstep serve``: the parts put together, and run until a signal ends them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator
from importlib.metadata import version

import uvicorn
from fastapi import FastAPI

from router.app import AppContext, create_app
from router.cluster import Cluster
from router.config import ServeSettings
from router.dispatch import Dispatcher
from router.engines.curve import read_key_pair
from router.engines.gauges import GaugeReader
from router.engines.health import HealthMonitor
from router.engines.snapshots import SnapshotClient
from router.engines.upstream import HttpClient
from router.errors import ConfigError
from router.lane import DispatchSettings
from router.lookahead import SIGNALS, LookAhead
from router.metrics import Metrics
from router.models import ModelTable
from router.policies import POLICIES, PolicySettings
from router.policies.calibration import moves_within, must_compile
from router.policies.solver import DEFAULT_MOVES
from router.proxy.mooncake import Bootstraps
from router.proxy.relay import Attempts, KvTransfer, RelayContext
from router.types import DEFAULT_SLOTS, EngineFailed, Policy
from router.workload import WorkProfile

log = logging.getLogger(__name__)

_GRACE_S = 10


def run(settings: ServeSettings) -> None:
    """Serve until SIGINT or SIGTERM; running streams then get a few seconds to end.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    with _listen(settings.host, settings.port) as listener:
        config = uvicorn.Config(
            build(settings),
            loop="uvloop",
            http="httptools",
            ws="none",
            access_log=False,
            server_header=False,
            date_header=False,
            log_config=None,
            timeout_graceful_shutdown=_GRACE_S,
        )
        log.info(
            "evenstep %s: %s, %s dispatch, %d workers, http://%s:%d",
            *(version("evenstep"), settings.policy, settings.dispatch.value),
            *(len(settings.workers), *listener.getsockname()[:2]),
        )
        uvicorn.Server(config).run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}; try another --port") from None
    return listener


def build(settings: ServeSettings) -> FastAPI:
    """The application with all that runs beside it."""
    cluster = Cluster(settings.workers, settings.lockstep, settings.prefill_chunk)
    dispatcher = _dispatcher(settings, cluster)
    models = ModelTable(cluster)
    snapshots, gauges = _sources(settings, dispatcher)
    attempts = Attempts()
    health = HealthMonitor(
        settings.workers,
        dispatcher.apply,
        models.learn,
        lambda worker_id: _give_engine_up(worker_id, dispatcher, attempts),
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
        attempts=attempts,
        transfer=KvTransfer(
            settings.kv_expiry_s if settings.kv_transfer == "params" else None, Bootstraps(client)
        ),
    )

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        snapshots.start()
        gc.freeze()
        async with asyncio.TaskGroup() as tasks:
            parts = (health.run(), gauges.run(), dispatcher.run())
            running = [tasks.create_task(part) for part in parts]
            yield
            for task in running:
                task.cancel()
        snapshots.close()
        await client.aclose()

    metrics = Metrics(dispatcher, snapshots, health, gauges, time.monotonic).render
    context = AppContext(dispatcher, models, relay, metrics, time.monotonic, snapshots.problem)
    return create_app(context, lifespan)


def _sources(settings: ServeSettings, dispatcher: Dispatcher) -> tuple[SnapshotClient, GaugeReader]:
    """Where the workers' states come from."""
    cluster, keys = dispatcher.cluster, settings.secret_key_file
    snapshots = SnapshotClient(
        settings.workers,
        dispatcher.apply,
        lambda worker_id: _full_wanted(cluster, worker_id),
        time.monotonic,
        None if keys is None else read_key_pair(keys),
        lambda worker_id: cluster.worker(worker_id).live,
    )
    gauges = GaugeReader(
        settings.workers,
        dispatcher.apply,
        lambda worker_id: _gauges_wanted(cluster, worker_id),
        time.monotonic,
        interval_s=settings.metrics_interval_s,
        timeout_s=settings.health_timeout_s,
    )
    return snapshots, gauges


def _dispatcher(settings: ServeSettings, cluster: Cluster) -> Dispatcher:
    chosen = PolicySettings(seed=settings.seed, moves=_moves(settings))
    row = POLICIES[settings.policy]

    def make_policy() -> Policy:
        return row.make(chosen)

    def make_look_ahead() -> LookAhead | None:
        return _look_ahead(settings) if row.looks_ahead else None

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
            overcommit=settings.overcommit,
        ),
        clock=time.monotonic,
        make_look_ahead=make_look_ahead,
    )


def _moves(settings: ServeSettings) -> int:
    """What the solver's time buys on this machine, for the largest group."""
    if settings.policy != "bfio" or not settings.workers:
        return DEFAULT_MOVES
    decoding = [worker for worker in settings.workers if worker.role != "prefill"]
    workers = max(Counter(worker.group for worker in decoding).values())
    slots = decoding[0].slots or DEFAULT_SLOTS
    compiling = "; compiling it takes half a minute, once" if must_compile() else ""
    log.info("bfio: looking how fast its search is here%s", compiling)
    moves = moves_within(settings.solver_ms / 1000, workers, slots, time.perf_counter)
    log.info("bfio: %d moves of its search take %g ms here", moves, settings.solver_ms)
    return moves


def _look_ahead(settings: ServeSettings) -> LookAhead:
    profile = WorkProfile(
        growth=settings.drift,
        window=settings.window,
        window_share=settings.window_share,
        request_tokens=settings.request_tokens,
        prefill_beta=settings.prefill_beta,
        prefill_chunk=settings.prefill_chunk,
    )
    return LookAhead(
        SIGNALS[settings.lookahead](profile),
        profile,
        settings.horizon,
        settings.discount,
        settings.tie_weight,
        settings.lead_tokens,
    )


def _give_engine_up(worker_id: str, dispatcher: Dispatcher, attempts: Attempts) -> None:
    """End what can be hoped for no longer, now that an engine has failed its checks.

    One request's broken connection is no reason: in lockstep it would end all the streams of a
    healthy group, and a prefill worker would be taken to have lost what others wait for.
    """
    dispatcher.apply(EngineFailed(worker_id))
    group = dispatcher.cluster.group_of(worker_id)
    if group.lockstep:
        for worker in group.workers.values():
            if worker.down_reason is not None:
                attempts.break_off(worker.spec.id, worker.down_reason)
    # Alone in its group it may still be better than nothing: busy engines answer late.
    elif group.live_workers() or (group.serves and group.serves.live_workers()):
        attempts.recall(worker_id, "the worker does not answer its health checks")


def _full_wanted(cluster: Cluster, worker_id: str) -> bool:
    feed = cluster.worker(worker_id).feed
    return feed is None or feed.full_wanted


def _gauges_wanted(cluster: Cluster, worker_id: str) -> bool:
    worker = cluster.worker(worker_id)
    return worker.live and worker.feed is None


def _shared_urls(settings: ServeSettings) -> frozenset[str]:
    counts = Counter(worker.url for worker in settings.workers)
    return frozenset(url for url, count in counts.items() if count > 1)
