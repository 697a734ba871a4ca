"""The parts of ``evenstep serve``, each made from the settings and from those that it needs."""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from router import tls
from router.access.access import Access
from router.access.shares import Weight, equal
from router.admin.footing import Footing
from router.admin.state import PageSource, read
from router.balancing import bounds, deciding
from router.cluster import Cluster
from router.dispatch import Dispatcher
from router.engines.agents import PowerAgents
from router.engines.gauges import GaugeReader
from router.engines.health import HealthMonitor
from router.engines.shared_urls import SharedUrls
from router.engines.snapshots import SnapshotClient
from router.engines.upstream import HttpClient
from router.errors import ConfigError
from router.fleet import Fleet
from router.lifecycle import Lifecycle
from router.models import ModelTable
from router.policies.compiled import njit
from router.proxy.attempts import Attempts
from router.proxy.mooncake import Bootstraps
from router.proxy.relay_context import KvTransfer, RelayContext
from router.recording.recorder import Recorder, Setting
from router.reload import Part
from router.settings.serve import ServeSettings
from router.types import EngineFailed

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """What routes requests; who watches it, and how it is served, comes on top."""

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
        """Those that run beside the server."""
        return self.health, self.gauges, self.agents, self.fleet, self.dispatcher


def parts(settings: ServeSettings, access: Access) -> Parts:
    """All of them, joined to each other."""
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
    """Who watches whether engines answer."""
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
    """What all relays share."""
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
    """What a recording says of its router."""
    return Setting("serve", settings.policy, settings.dispatch.value, settings.levels)


def page(
    current: Callable[[], ServeSettings],
    dispatcher: Dispatcher,
    problem: Callable[[str], str | None],
    emulated: Callable[[str], bool],
) -> Callable[[], bytes]:
    """What renders the status page's state, under the settings that are in force then."""

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
    """Where the workers' states come from, and their power."""
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
    """Pools and policies, over a cluster; ``weight`` is that of a key's share."""
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
    elif group.serving or (group.serves and group.serves.serving):
        attempts.recall(worker_id, "the worker does not answer its health checks")


def _gauges_wanted(cluster: Cluster, worker_id: str) -> bool:
    worker = cluster.worker(worker_id)
    return worker.live and worker.feed is None


def watching(health: HealthMonitor, gauges: GaugeReader) -> Part:
    """How often engines are looked at."""

    def take(settings: ServeSettings) -> None:
        health.configure(settings.health_interval_s, settings.health_failures)
        gauges.configure(settings.metrics_interval_s)

    names = {"health_interval_s", "health_failures", "metrics_interval_s"}
    return Part(frozenset(names), take)


def patience(relay: RelayContext) -> Part:
    """How often and for how long workers are tried, and what is told, for requests from now on."""

    def take(settings: ServeSettings) -> None:
        relay.max_attempts, relay.deadlines = settings.max_attempts, settings.deadlines
        relay.tells = settings.worker_headers

    names = {"max_attempts", "request_timeout_s", "first_byte_timeout_s", "stream_idle_timeout_s"}
    return Part(frozenset(names | {"worker_headers"}), take)


def workers(fleet: Fleet) -> Part:
    """Which workers there are."""

    def take(settings: ServeSettings) -> None:
        fleet.change(settings.workers, settings.lockstep)

    def check(settings: ServeSettings) -> None:
        fleet.check(settings.workers)

    return Part(frozenset({"workers", "lockstep"}), take, check)


def recording(recorder: Recorder) -> Part:
    """What recordings say from now on."""

    def take(settings: ServeSettings) -> None:
        recorder.change(recorded(settings))

    return Part(frozenset(), take)


def ending(lifecycle: Lifecycle) -> Part:
    """How long the router takes to end."""

    def take(settings: ServeSettings) -> None:
        lifecycle.drain_delay_s, lifecycle.grace_s = settings.drain_delay_s, settings.grace_s

    return Part(frozenset({"drain_delay_s", "grace_s"}), take)


def keys(access: Access) -> Part:
    """Who may ask; also when the files are the same, with something else in them."""
    return Part(access.read_again, access.take, access.check)


def certificate(shown: ssl.SSLContext) -> Part:
    """What new clients are shown; also when the files are the same, with something else in them."""

    def check(settings: ServeSettings) -> None:
        if settings.certificate is None:
            raise ConfigError("tls_cert is gone: a port that speaks HTTPS does so until it ends")

    def take(settings: ServeSettings) -> None:
        if settings.certificate is not None:
            tls.load(shown, *settings.certificate)

    return Part(frozenset({"tls_cert", "tls_key"}), take, check)
