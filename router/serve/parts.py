"""Builders of the parts of ``evenstep serve``, each from the settings and its dependencies."""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from router.admin.facts import Footing
from router.admin.status import PageSource, read
from router.config.live import Part, taken_by
from router.config.marks import TakenBy
from router.config.settings import ServeSettings
from router.core.errors import ConfigError
from router.core.policies.bfio.compiled import njit
from router.core.queue.fair_share import Weight, equal
from router.core.state.cluster import Cluster
from router.core.types import EngineFailed
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.membership import Fleet
from router.dispatch.models import ModelTable
from router.engines.client import HttpClient
from router.engines.gauges import GaugeReader
from router.engines.health import HealthMonitor
from router.engines.power_agents import PowerAgents
from router.engines.shared_urls import SharedUrls
from router.engines.snapshots import SnapshotClient
from router.http import tls
from router.http.lifecycle import Lifecycle
from router.proxy.attempts import Attempts
from router.proxy.mooncake import Bootstraps
from router.proxy.relay_context import KvTransfer, RelayContext
from router.recording.recorder import Recorder, Setting
from router.serve.access import Access
from router.serve.balancing import bounds, deciding

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts that route requests; monitoring and serving are built on top."""

    dispatcher: Dispatcher
    models: ModelTable
    snapshots: SnapshotClient
    gauges: GaugeReader
    agents: PowerAgents
    health: HealthMonitor
    client: HttpClient
    relay: RelayContext
    fleet: Fleet
    urls: SharedUrls

    @property
    def running(self) -> tuple[HealthMonitor, GaugeReader, PowerAgents, Fleet, Dispatcher]:
        return self.health, self.gauges, self.agents, self.fleet, self.dispatcher


def parts(settings: ServeSettings, access: Access) -> Parts:
    """Build all parts and connect them."""
    cluster = Cluster(
        settings.workers,
        settings.lockstep,
        settings.prefill_chunk,
        settings.levels,
        settings.breakers,
    )
    made = dispatcher(settings, cluster, access.weight)
    models = ModelTable(cluster, settings.aliases, settings.request_limits)
    attempts = Attempts()
    monitor = health(settings, made, models, attempts)
    client = HttpClient(settings.connect_timeout_s, settings.worker_key)
    urls = SharedUrls(settings.workers)
    relays = relay(settings, made, client, monitor, attempts, urls)
    snapshots, gauges, agents = sources(settings, made)
    followers = (urls, agents, gauges, models, monitor, snapshots)
    fleet = Fleet(cluster, made.lanes, followers, attempts.break_off, settings.workers)
    return Parts(made, models, snapshots, gauges, agents, monitor, client, relays, fleet, urls)


def health(
    settings: ServeSettings, dispatcher: Dispatcher, models: ModelTable, attempts: Attempts
) -> HealthMonitor:
    """Build the monitor that checks the engines."""
    return HealthMonitor(
        settings.workers,
        dispatcher.apply,
        models.learn,
        lambda worker_id: give_engine_up(worker_id, dispatcher, attempts),
        interval_s=settings.health_interval_s,
        timeout_s=settings.health_timeout_s,
        failures=settings.health_failures,
        key=settings.worker_key,
    )


def relay(
    settings: ServeSettings,
    dispatcher: Dispatcher,
    client: HttpClient,
    health: HealthMonitor,
    attempts: Attempts,
    urls: SharedUrls,
) -> RelayContext:
    """Build the state that all relays share."""
    return RelayContext(
        port=dispatcher,
        client=client,
        trouble=health.probe_now,
        ranked=urls,
        max_attempts=settings.max_attempts,
        clock=time.monotonic,
        attempts=attempts,
        deadlines=settings.deadlines,
        transfer=KvTransfer(
            dispatcher,
            settings.kv_expiry_s if settings.kv_transfer == "params" else None,
            Bootstraps(client),
        ),
        tells=settings.worker_headers,
    )


def recorded(settings: ServeSettings) -> Setting:
    """Return the settings that a recording's header shows."""
    return Setting("serve", settings.policy, settings.dispatch.value, settings.levels)


def page(
    current: Callable[[], ServeSettings],
    dispatcher: Dispatcher,
    problem: Callable[[str], str | None],
    emulated: Callable[[str], bool],
) -> Callable[[], bytes]:
    """Return a function that renders the status page's state under the settings then in force."""

    def source() -> PageSource:
        settings = current()
        return PageSource(
            dispatcher.cluster,
            time.monotonic,
            dispatcher.deciders,
            settings.policy,
            Footing(settings.lookahead, njit is not None, settings.power_levels is not None),
            problem,
            emulated,
        )

    return lambda: msgspec.json.encode(read(source()))


def sources(
    settings: ServeSettings, dispatcher: Dispatcher
) -> tuple[SnapshotClient, GaugeReader, PowerAgents]:
    """Build the sources of the workers' states and power."""
    cluster, keys = dispatcher.cluster, settings.keys
    snapshots = SnapshotClient(
        settings.workers,
        dispatcher.apply,
        lambda worker_id: cluster.worker(worker_id).full_wanted,
        time.monotonic,
        keys,
        lambda worker_id: cluster.worker(worker_id).live,
        lambda: dispatcher.lanes.waiting,
    )
    dispatcher.lanes.incoming = snapshots
    gauges = GaugeReader(
        settings.workers,
        dispatcher.apply,
        lambda worker_id: _gauges_wanted(cluster, worker_id),
        time.monotonic,
        interval_s=settings.metrics_interval_s,
        timeout_s=settings.health_timeout_s,
    )
    agents = PowerAgents(settings.workers, dispatcher.apply, time.monotonic, keys)
    return snapshots, gauges, agents


def dispatcher(settings: ServeSettings, cluster: Cluster, weight: Weight = equal) -> Dispatcher:
    """Build pools and policies over a cluster; ``weight`` returns the weight of a key's share."""
    chosen = deciding(settings)
    return Dispatcher(
        cluster,
        chosen.policy,
        fallback=chosen.fallback,
        settings=bounds(settings),
        clock=time.monotonic,
        make_look_ahead=chosen.look_ahead,
        weight=weight,
    )


def give_engine_up(worker_id: str, dispatcher: Dispatcher, attempts: Attempts) -> None:
    """End requests that have no hope left after an engine failed its checks.

    A single broken connection is no reason to. In lockstep it would end all streams of a healthy
    group. For a prefill worker it would discard KV that other requests wait for.
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


def _gauges_wanted(cluster: Cluster, worker_id: str) -> bool:
    worker = cluster.worker(worker_id)
    return worker.live and worker.feed is None


def watching(health: HealthMonitor, gauges: GaugeReader) -> Part:
    """Reloadable settings of health checks and metrics polling."""

    def take(settings: ServeSettings) -> None:
        health.configure(settings.health_interval_s, settings.health_failures)
        gauges.configure(settings.metrics_interval_s)

    return Part(taken_by(TakenBy.WATCHING), take)


def patience(relay: RelayContext) -> Part:
    """Reloadable settings of attempts, timeouts and worker headers, for new requests."""

    def take(settings: ServeSettings) -> None:
        relay.max_attempts, relay.deadlines = settings.max_attempts, settings.deadlines
        relay.tells = settings.worker_headers

    return Part(taken_by(TakenBy.RELAY), take)


def workers(fleet: Fleet) -> Part:
    """Reloadable set of workers."""

    def take(settings: ServeSettings) -> None:
        fleet.change(settings.workers, settings.lockstep)

    def check(settings: ServeSettings) -> None:
        fleet.check(settings.workers)

    return Part(taken_by(TakenBy.WORKERS), take, check)


def recording(recorder: Recorder) -> Part:
    """Reloadable header of recordings."""

    def take(settings: ServeSettings) -> None:
        recorder.change(recorded(settings))

    return Part(frozenset(), take)


def ending(lifecycle: Lifecycle) -> Part:
    """Reloadable times of the router's shutdown."""

    def take(settings: ServeSettings) -> None:
        lifecycle.drain_delay_s, lifecycle.grace_s = settings.drain_delay_s, settings.grace_s

    return Part(taken_by(TakenBy.ENDING), take)


def keys(access: Access) -> Part:
    """Reloadable keys; files are read again even if their names are unchanged."""
    return Part(access.read_again, access.take, access.check)


def certificate(shown: ssl.SSLContext) -> Part:
    """Reloadable certificate for new clients, read again even if the file names are unchanged."""

    def check(settings: ServeSettings) -> None:
        if settings.certificate is None:
            raise ConfigError("tls_cert is gone: a port that speaks HTTPS does so until it ends")

    def take(settings: ServeSettings) -> None:
        if settings.certificate is not None:
            tls.load(shown, *settings.certificate)

    return Part(taken_by(TakenBy.CERTIFICATE), take, check)
