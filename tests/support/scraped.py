"""A router's parts without sockets, and what a scrape of them shows."""

from collections.abc import Mapping, Sequence

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from router.access.key_limits import KeyLimits
from router.config.serve_settings import ServeSettings
from router.core.events import SnapshotReceived
from router.core.policies.policy_table import POLICIES, PolicySettings
from router.core.state.cluster import Cluster
from router.core.types import RunningRequest, Snapshot, WorkerSpec
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.interface import Deciding
from router.engines.gauges import GaugeReader
from router.engines.health_checks import HealthMonitor, HealthSettings
from router.engines.kv_event_reader import KvEventReader
from router.engines.power_agents import PowerAgents
from router.engines.snapshots import SnapshotClient
from router.http.refusal import HttpCounts
from router.metrics.other import HTTP_ROWS
from router.metrics.render import Metrics
from router.metrics.workers import AGENT_ROWS, GAUGE_ROWS, HEALTH_ROWS, KV_EVENT_ROWS, SNAPSHOT_ROWS
from tests.support.dispatching import dispatch_settings

SPECS = [
    WorkerSpec("a", "http://h:1", "g", rank=0, slots=4, snapshots="tcp://h:5", service_rate=0.5),
    WorkerSpec("b", "http://h:1", group="g", rank=1, slots=4, snapshots="tcp://h:7"),
    WorkerSpec("c", "http://h:2", group="other", slots=8),
]
BASE = Snapshot("full", "g", "x", 0, "epoch", 1, 1, 0.0, 0.5, power_w=100.0)
TELLING = msgspec.structs.replace(
    BASE, admissible_kv_tokens=700, admission="headroom", waited_s=0.1
)

Samples = dict[tuple[str, tuple[str, ...]], float]


class Bench:
    """Real parts without sockets, and what a scrape of them shows."""

    def __init__(self, specs: Sequence[WorkerSpec] = SPECS) -> None:
        self.now_s = 100.0
        self.dispatcher = Dispatcher(
            Cluster(specs),
            Deciding(
                lambda: POLICIES["jsq"].make(PolicySettings()),
                lambda: POLICIES["jsq"].make(PolicySettings()),
            ),
            dispatch_settings(),
            lambda: self.now_s,
        )
        apply = self.dispatcher.apply
        self.snapshots = SnapshotClient(specs, apply, lambda _: False, lambda: self.now_s)
        self.health = HealthMonitor(
            specs, apply, lambda *_: None, lambda _: None, ServeSettings().of(HealthSettings)
        )
        self.gauges = GaugeReader(specs, apply, lambda _: False, lambda: self.now_s, 1, 1)
        self.agents = PowerAgents(specs, apply, lambda: self.now_s)
        self.limits = KeyLimits()
        kv_events = KvEventReader([], apply, bool, lambda: self.now_s, self.snapshots.sockets)
        counters = (
            (SNAPSHOT_ROWS, self.snapshots),
            (AGENT_ROWS, self.agents),
            (HEALTH_ROWS, self.health),
            (GAUGE_ROWS, self.gauges),
            (KV_EVENT_ROWS, kv_events),
            (HTTP_ROWS, HttpCounts()),
        )
        cluster, deciders = self.dispatcher.cluster, self.dispatcher.deciders
        self.metrics = Metrics(cluster, lambda: self.now_s, counters, deciders, self.limits)

    def step(self, step: int, **loads_tokens: int) -> None:
        """Let workers report a step with these loads."""
        for worker_id, load in loads_tokens.items():
            running = (RunningRequest("cmpl-x", load, 0),)
            told = msgspec.structs.replace(TELLING, sequence=step, step=step, running=running)
            self.dispatcher.apply(SnapshotReceived(worker_id, told, self.now_s))

    def text(self) -> str:
        """What a scrape gets, in one go."""
        rendering = self.metrics.render()
        try:
            while True:
                rendering.send(None)
        except StopIteration as done:
            return str(done.value, "utf-8")

    def scrape(self) -> Samples:
        families = text_string_to_metric_families(self.text())
        samples = [sample for family in families for sample in family.samples]
        return {(s.name.removeprefix("evenstep_"), _values(s.labels)): s.value for s in samples}


def _values(labels: Mapping[str, str]) -> tuple[str, ...]:
    """Values in the order of the labels' names."""
    return tuple(labels[name] for name in sorted(labels))
