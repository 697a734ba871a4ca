"""``evenstep serve`` from top to bottom: every part of the router, and how long each runs."""

import asyncio
import contextlib
import gc
import logging
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import msgspec

from router.admin.admin_port import create_admin, serving
from router.admin.facts import Footing
from router.admin.operator_routes import add_recording, add_settings
from router.admin.page_state import Status
from router.admin.status_page import Streams, add_page
from router.admin.worker_routes import add_workers
from router.api.app import create_app
from router.api.front import Front
from router.api.shared_routes import add_instance, add_metrics
from router.config.live import Part, Reload
from router.config.serve_settings import ServeSettings
from router.core.errors import ConfigError
from router.core.events import EngineFailed
from router.core.policies.bfio.compiled import njit
from router.core.queue.fair_share import Weight, equal
from router.core.request_limits import RequestLimits
from router.core.state.breaker import BreakerSettings
from router.core.state.cluster import Cluster
from router.core.types import WorkerSpec
from router.core.worker_specs import authority
from router.discovery.sources import Found, source_of
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.group_queue import DispatchSettings
from router.dispatch.membership import Fleet
from router.dispatch.models import ModelTable
from router.engines.gauges import GaugeReader
from router.engines.health_checks import HealthMonitor, HealthSettings
from router.engines.http_client import HttpClient
from router.engines.kv_event_reader import KvEventReader
from router.engines.power_agents import PowerAgents
from router.engines.snapshots import SnapshotClient
from router.engines.worker_identity import SharedUrls
from router.file_limit import allow_connections
from router.http import uvicorn_api
from router.http.listening import server_config, url
from router.http.port import DataPlane, Lifecycle
from router.http.refusal import HttpCounts
from router.http.tls import peer_context
from router.kubernetes import Kubernetes
from router.logs import start_logging
from router.metrics.other import HTTP_ROWS, PICK_ROWS, REPLICA_ROWS
from router.metrics.render import Metrics
from router.metrics.workers import AGENT_ROWS, GAUGE_ROWS, HEALTH_ROWS, KV_EVENT_ROWS, SNAPSHOT_ROWS
from router.pick.pick import Addressed, PickCounts
from router.pick.picks import Picks
from router.proxy.attempts import Attempts
from router.proxy.context import RelayContext, RelaySettings
from router.proxy.kv_transfer import Bootstraps, KvTransfer
from router.proxy.model_tokenizer import tokenizer_of
from router.proxy.passed import LeaderWatch
from router.proxy.request_log import RequestLog
from router.proxy.splice import HotPath
from router.recording.record_file import RecordFile
from router.recording.recorder import Recorder, Setting
from router.replicas.leading import Leading, reachable, replica_name
from router.serve.access import Access
from router.serve.balancing import balancing, deciding
from router.serve.main_server import MainServer
from router.serve.sockets import admin_tls, certificate, opened
from router.tracing import Tracer

log = logging.getLogger(__name__)


def run(settings: ServeSettings, read: Callable[[], ServeSettings]) -> None:
    """Serve until SIGINT or SIGTERM; ConfigError: an address cannot be bound."""
    start_logging(settings.log_level, settings.log_format)
    tls = settings.tls
    with opened(settings) as ports:
        own = settings.replica_url or reachable(url(ports.listener, tls))
        router = Router(settings, read, tls, ports.admin, own)
        allow_connections(settings.max_connections)
        config = server_config(
            router.app, settings.http_limits, counts=router.counts, hot=router.hot, tls=tls
        )
        ports.announce(settings, tls)
        server = MainServer(config, router.lifecycle, router.reload, inherited=ports.inherited)
        router.tasks, router.end = server.server_state.tasks, server.end
        server.run(sockets=[ports.listener])
    if router.failed:
        raise SystemExit(1)


class _Runs(Protocol):
    async def run(self) -> None: ...


class Router:
    """Every part of a router.

    ``read`` reads the settings again. ``tls`` is the certificate of the clients' port, ``admin``
    the listening socket of the admin port. ``own_url`` is for other replicas.
    """

    failed = False
    end: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self,
        settings: ServeSettings,
        read: Callable[[], ServeSettings],
        tls: ssl.SSLContext | None = None,
        admin: socket.socket | None = None,
        own_url: str = "",
    ) -> None:
        self.clock = time.monotonic
        self._tls, self._admin = tls, admin
        self._start_s = settings.health_timeout_s
        self.lifecycle = Lifecycle(settings.drain_delay_s, settings.grace_s)
        # Who may enter, and who goes to which worker.
        self.access = Access(settings, self.clock)
        self.door = self.access.door
        self.cluster = Cluster(
            settings.workers,
            settings.lockstep,
            settings.levels,
            settings.of(BreakerSettings),
            settings.fixed_step_time,
        )
        self.leading = Leading(settings.lock, replica_name(), url=own_url)
        self.lifecycle.on_drain = self.leading.release
        self.dispatcher = make_dispatcher(settings, self.cluster, self.access.weight, self.leading)
        limits = settings.of(RequestLimits)
        self.models = ModelTable(self.cluster, settings.aliases, limits, settings.tokenizers)
        self.models.on_shared = self.dispatcher.share
        for folder in settings.tokenizers.values():  # before the first request needs it
            tokenizer_of(folder)
        self._connect(settings)
        api = partial(Kubernetes, settings.kubernetes_api)
        self.found = Found([source_of(each, api) for each in settings.sources], self._find)
        self.leading.know(self.dispatcher, self.snapshots.ask)
        # What clients and operators see, and what may change while all this runs.
        collector = settings.otlp_traces_endpoint
        self._tracer = None if collector is None else Tracer(collector)
        self.requests = RequestLog(self.clock, self._tracer)
        self.counts, self.streams = HttpCounts(), Streams()
        self.cluster.watchers.append(self.requests)
        self.recorder = Recorder(self.cluster, _recorded(settings), self.clock, time.time())
        self._files = [RecordFile(Path(settings.record), self.recorder)] if settings.record else []
        # Parts that may reject new settings come first.
        parts = [
            *([] if tls is None else [certificate(tls)]),
            self.access.part,
            Part(self._take, lambda settings: self.fleet.check(self._workers(settings))),
            balancing(settings, self.dispatcher),
        ]
        self.reload = Reload(settings, read, parts, deciding)
        # Requests that gateways serve; None: there are no gateways.
        self.picks = None if settings.grpc_port is None else self._make_picks(settings)
        self.tasks: set[asyncio.Task[None]] = set()  # those of open requests
        self._show()
        # Application of the clients' port; its lifespan is ``running``.
        self.app = Front(create_app(self, self.running), self.lifecycle, self.requests, self.door)
        # Takes requests over ahead of the application.
        self.hot = self._hot_path(settings.data_plane)

    def _connect(self, settings: ServeSettings) -> None:
        specs, cluster, dispatcher = settings.workers, self.cluster, self.dispatcher
        # Keys are read from their files.
        worker_key, keys, connect_s = settings.worker_key, settings.keys, settings.connect_timeout_s
        self.client, self.attempts = HttpClient(connect_s, worker_key), Attempts()
        self.health = HealthMonitor(
            specs,
            dispatcher.apply,
            self.models.learn,
            partial(give_engine_up, dispatcher, self.attempts),
            settings.of(HealthSettings),
            key=worker_key,
        )
        self.snapshots = SnapshotClient(
            specs,
            dispatcher.apply,
            lambda worker_id: cluster.worker(worker_id).full_wanted,
            self.clock,
            keys,
            lambda worker_id: cluster.worker(worker_id).live,
            lambda: dispatcher.waiting,
            dispatcher.prompt_budget,
        )
        self.kv_events = KvEventReader(
            specs,
            dispatcher.apply,
            lambda worker_id: cluster.group_of(worker_id).prefixes.tells(worker_id),
            self.clock,
            self.snapshots.sockets,
        )
        dispatcher.read_before_rounds(self.snapshots.sockets)
        self.gauges = GaugeReader(
            specs,
            dispatcher.apply,
            lambda worker_id: cluster.worker(worker_id).gauges_wanted,
            self.clock,
            settings.health_timeout_s,
            settings.metrics_interval_s,
        )
        self.agents = PowerAgents(specs, dispatcher.apply, self.clock, keys)
        self.urls = SharedUrls(specs)
        kept_s = settings.kv_expiry_s if settings.kv_transfer == "params" else None
        self.relay = RelayContext(
            port=dispatcher,
            client=self.client,
            trouble=self.health.probe_now,
            ranked=self.urls.shared,
            settings=settings.of(RelaySettings),
            clock=self.clock,
            attempts=self.attempts,
            transfer=KvTransfer(dispatcher, kept_s, Bootstraps(self.client)),
            replicas=HttpClient(connect_s, tls=self._peers),
            leading=self.leading,
        )
        # In this order a worker that joins gets known.
        streams = self.snapshots, self.kv_events
        followers = self.urls, self.agents, self.gauges, self.models, self.health, *streams
        self.fleet = Fleet(cluster, dispatcher, followers, self.attempts.break_off, specs)

    def _peers(self) -> ssl.SSLContext:
        pair = self.reload.settings.certificate
        return ssl.create_default_context() if pair is None else peer_context(pair[0])

    def _workers(self, settings: ServeSettings) -> list[WorkerSpec]:
        return [*settings.workers, *self.found.workers]

    def _find(self) -> None:
        settings = self.reload.settings
        self.fleet.change(self._workers(settings), settings.lockstep)

    def _take(self, settings: ServeSettings) -> None:
        self.fleet.change(self._workers(settings), settings.lockstep)
        self.health.settings = settings.of(HealthSettings)
        self.gauges.interval_s = settings.metrics_interval_s
        self.relay.settings = settings.of(RelaySettings)
        self.recorder.change(_recorded(settings))
        self.lifecycle.drain_delay_s = settings.drain_delay_s
        self.lifecycle.grace_s = settings.grace_s

    def _show(self) -> None:
        self.problem = self.snapshots.problem
        counters = (
            (SNAPSHOT_ROWS, self.snapshots),
            (AGENT_ROWS, self.agents),
            (HEALTH_ROWS, self.health),
            (GAUGE_ROWS, self.gauges),
            (KV_EVENT_ROWS, self.kv_events),
            (HTTP_ROWS, self.counts),
            (REPLICA_ROWS, self.leading),
            (PICK_ROWS, PickCounts() if self.picks is None else self.picks.counts),
        )
        self.metrics = Metrics(
            self.cluster, self.clock, counters, self.dispatcher.deciders, self.access.limits
        ).render
        status = Status(
            self.cluster, self.clock, self.dispatcher.deciders, self.problem, self.health.emulated
        )

        def page() -> bytes:
            settings = self.reload.settings
            calibrated = settings.power_levels is not None
            leading = self.leading
            replica = None if leading.alone else leading.standing
            footing = Footing(
                settings.policy, settings.lookahead, njit is not None, calibrated, replica
            )
            return msgspec.json.encode(status.read(footing))

        self.admin = create_admin(
            [
                partial(add_metrics, render=self.metrics),
                partial(add_instance, deciders=self.dispatcher.deciders),
                partial(add_page, render=page, streams=self.streams),
                partial(add_recording, recorder=self.recorder, streams=self.streams),
                partial(add_workers, fleet=self.fleet),
                partial(add_settings, reload=self.reload),
            ],
            self.access.operators,
        )

    def _hot_path(self, plane: DataPlane) -> HotPath | None:
        if plane is DataPlane.ASGI:
            return None
        if lacking := uvicorn_api.missing():
            names = ", ".join(lacking)
            log.warning("uvicorn is not as it should be for --data-plane splice: %s", names)
            return None
        if self.picks is not None:
            return HotPath(self, self.requests, self.picks.others)
        return HotPath(self, self.requests)

    def _make_picks(self, settings: ServeSettings) -> Picks:
        if not (find_spec("grpc_health") and find_spec("envoy")):
            raise ConfigError("evenstep pick needs gRPC: pip install 'evenstep[gateway]'")
        addressed = Addressed()
        for spec in settings.workers:
            addressed.join(spec)
        self.fleet.followers.insert(0, addressed)
        picks = Picks(self, self.requests, tells_key=settings.tell_worker_api_key)
        self.attempts.watchers.append(picks.recalled)
        return picks

    def _gateways(self) -> tuple[_Runs, ...]:
        settings = self.reload.settings
        if self.picks is None or settings.grpc_port is None:
            return ()
        from router.pick.grpc_port import GrpcPort

        address = authority(settings.host, settings.grpc_port)
        bounds = settings.queue_timeout_s, settings.max_body_bytes
        port = GrpcPort(self.picks, address, settings.certificate, self.tasks, *bounds)
        return self.picks, port

    async def _run(self, part: _Runs) -> None:
        """If it fails, the router ends as on SIGTERM: whoever started it may start it again."""
        try:
            await part.run()
        except Exception:
            log.exception("the router ends: %s has failed", type(part).__name__)
            if not (self.failed or self.lifecycle.draining):
                self.end()
            self.failed = True

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Background work; the block begins when each engine was checked once."""
        self.snapshots.start()
        self.kv_events.start()
        gc.freeze()
        parts: tuple[_Runs, ...] = (
            self.health,
            self.gauges,
            self.agents,
            self.fleet,
            self.dispatcher,
            self.leading,
            LeaderWatch(self.relay),
            self.found,
            *self._files,
            *self._gateways(),
        )
        tls = None if self._admin is None else admin_tls(self._admin, self._tls)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._run(part)) for part in parts]
            async with serving(self.admin, self.streams, self._admin, tls):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.health.first_checks(), self._start_s)
                yield
            for task in running:
                task.cancel()
        self.snapshots.close()
        self.kv_events.close()
        await self.client.aclose()
        await self.relay.replicas.aclose()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)
        # After a clean end both are 0.
        waiting, flying = self.dispatcher.under_way
        log.info("ended; %d requests in flight, %d waiting", flying, waiting)


def _recorded(settings: ServeSettings) -> Setting:
    return Setting("serve", settings.policy, settings.dispatch.value, settings.levels)


def make_dispatcher(
    settings: ServeSettings,
    cluster: Cluster,
    weight: Weight = equal,
    leading: Leading | None = None,
) -> Dispatcher:
    """Pools and policies over a cluster; ``weight``: of a key's share."""
    limits = settings.of(DispatchSettings)
    dispatcher = Dispatcher(cluster, deciding(settings), limits, time.monotonic, weight, leading)
    dispatcher.bound_prompts_by(settings.prompt_rule)
    return dispatcher


def give_engine_up(dispatcher: Dispatcher, attempts: Attempts, worker_id: str) -> None:
    """End requests that have no hope left after an engine failed its checks.

    A broken connection is too little: in lockstep all streams of a healthy group would end, and the
    KV of a prefill worker would be lost.
    """
    dispatcher.apply(EngineFailed(worker_id))
    group = dispatcher.cluster.group_of(worker_id)
    if group.lockstep:
        for worker in group.workers.values():
            if worker.down_reason is not None:
                attempts.break_off(worker.spec.id, worker.down_reason)
    # An engine alone in its group is kept: busy engines answer late.
    elif group.serving or (group.serves and group.serves.serving):
        attempts.recall(worker_id, "the worker does not answer its health checks")
