"""Prometheus metrics, read from the router's counters at each scrape."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import accumulate, chain
from types import MappingProxyType
from typing import TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from router.access.key_limits import KeyLimits
from router.core.clock import Clock
from router.core.energy.levels import STATES
from router.core.process_counts import ProcessCounts
from router.core.rounds.decider import Decider
from router.core.state.barrier import StepTotals
from router.core.state.cluster import Cluster
from router.core.state.group import Group
from router.core.state.worker_status import WorkerStatus, status_of
from router.core.types import ADMISSION_ENDED, Outcome, StateSource
from router.engines.gauges import GaugeReader
from router.engines.health_checks import HealthMonitor
from router.engines.power_agents import PowerAgents
from router.engines.snapshots import SnapshotClient
from router.http.refusal import HttpCounts
from router.metrics import http as http_rows
from router.metrics.groups import (
    ADMISSION_WORKERS,
    BUILD,
    ENERGY_ROWS,
    FEED_ROWS,
    FITTED_POWER,
    GROUP_ROWS,
    HISTOGRAMS,
    LOOK_AHEAD_ROWS,
    METERED_SECONDS,
    PREFILL_ROWS,
    REQUESTS,
    STEP_ROWS,
    WORKERS,
)
from router.metrics.keys import KEY_LIMITED, KEY_ROWS, UNAUTHORIZED, limited, readings
from router.metrics.processes import BROKEN, PROCESSES, RESTARTS
from router.metrics.rows import Row
from router.metrics.workers import (
    AGENT_ROWS,
    GAUGE_ROWS,
    HEALTH_ROWS,
    LIVE_WORKER_ROWS,
    SNAPSHOT_ROWS,
    STATE_SOURCE,
    WORKER_ROWS,
)

# Cached, because the lookup reads files.
_VERSION = version("evenstep")

T = TypeVar("T")
Labels = Sequence[str]

_PIECE_SAMPLES = 128
_number: Callable[[float], str] = floatToGoString


class _Alone(CollectorRegistry):
    """A registry of a single metric."""

    def __init__(self, family: Metric) -> None:
        super().__init__()
        self._family = family

    def collect(self) -> Iterator[Metric]:
        yield self._family


class Metrics:
    """Renders the workers' states and the router's counters.

    All sources from ``deciders`` on are absent in ``evenstep observe``.

    Args:
        deciders: deciders by group, with their counters; empty if nothing is routed.
        limits: counts by API key.
        http: counts of the clients' connections.
    """

    def __init__(
        self,
        cluster: Cluster,
        clock: Clock,
        *,
        snapshots: SnapshotClient,
        agents: PowerAgents,
        deciders: Mapping[str, Decider] = MappingProxyType({}),
        health: HealthMonitor | None = None,
        gauges: GaugeReader | None = None,
        limits: KeyLimits | None = None,
        http: HttpCounts | None = None,
        processes: ProcessCounts | None = None,
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._snapshots = snapshots
        self._agents = agents
        self._deciders = deciders
        self._health = health
        self._gauges = gauges
        self._limits = limits
        self._http = http
        self._processes = processes
        self._process = ProcessCollector(registry=CollectorRegistry())

    async def render(self) -> bytes:
        """Return all metrics in the Prometheus text format.

        Each metric is read at once and written in pieces, with a yield to the event loop between
        pieces. So a scrape of hundreds of workers blocks no stream for long.
        """
        parts = []
        for family in chain(self._collect(), self._process.collect()):
            for piece in _pieces(family):
                parts.append(piece)
                await asyncio.sleep(0)
        return b"".join(parts)

    def _collect(self) -> Iterator[Metric]:
        groups = list(self._cluster.groups.values())
        yield _family(*BUILD, ("version",), [((_VERSION,), 1)])
        yield from _families(SNAPSHOT_ROWS, (), [((), self._snapshots)])
        yield from _families(AGENT_ROWS, (), [((), self._agents)])
        if self._health is not None:
            yield from _families(HEALTH_ROWS, (), [((), self._health)])
        if self._gauges is not None:
            yield from _families(GAUGE_ROWS, (), [((), self._gauges)])
        if self._deciders:
            yield from self._routed()
        if self._limits is not None:
            yield from self._keyed(self._limits)
        if self._http is not None:
            yield _family(*http_rows.CONNECTIONS, (), [((), self._http.connections)])
            yield _family(*http_rows.REFUSED, ("status",), http_rows.refused(self._http))
        if self._processes is not None:
            yield _family(*PROCESSES, ("role",), self._processes.up())
            yield _family(*RESTARTS, ("role",), self._processes.restarts())
            yield _family(*BROKEN, (), [((), self._processes.broken)])
        named = [((group.name,), group) for group in groups]
        yield _family(*WORKERS, ("group", "source"), _known(groups))
        yield _family(*ADMISSION_WORKERS, ("group", "admission"), _admissions(groups))
        yield from _families(FEED_ROWS, ("group",), named)
        yield from _families(ENERGY_ROWS, ("group",), named)
        yield _family(*METERED_SECONDS, ("group", "state"), _metered(groups))
        yield _family(*FITTED_POWER, ("group", "state"), _fitted(groups))
        yield from _families(STEP_ROWS, ("group", "pool"), _totals(groups))
        workers = list(self._workers())
        live = [(labels, worker) for labels, worker in workers if worker.up]
        names = ("group", "worker", "rank")
        yield from _families(WORKER_ROWS, names, workers)
        yield from _families(LIVE_WORKER_ROWS, names, live)
        yield _family(*STATE_SOURCE, (*names, "source"), _sources(live))

    def _routed(self) -> Iterator[Metric]:
        deciders = [((name,), decider) for name, decider in self._deciders.items()]
        prefills = [each for each in deciders if each[1].group.serves is not None]
        aheads = [(i, each.look_ahead) for i, each in deciders if each.look_ahead is not None]
        yield _family(*REQUESTS, ("group", "outcome"), _outcomes(self._deciders))
        yield from _families(GROUP_ROWS, ("group",), deciders)
        yield from _families(PREFILL_ROWS, ("group",), prefills)
        yield from _histograms(self._deciders)
        yield from _families(LOOK_AHEAD_ROWS, ("group",), aheads)

    def _keyed(self, limits: KeyLimits) -> Iterator[Metric]:
        keys = readings(limits, self._deciders)
        yield _family(*UNAUTHORIZED, (), [((), limits.unauthorized)])
        yield from _families(KEY_ROWS, ("key",), keys)
        yield _family(*KEY_LIMITED, ("key", "limit"), limited(keys))

    def _workers(self) -> Iterator[tuple[Labels, WorkerStatus]]:
        now_s = self._clock()
        for group in self._cluster.groups.values():
            for worker in group.workers.values():
                rank = "" if worker.spec.rank is None else str(worker.spec.rank)
                yield (group.name, worker.spec.id, rank), status_of(worker, now_s)


def _outcomes(deciders: Mapping[str, Decider]) -> Iterator[tuple[Labels, int]]:
    for name, decider in deciders.items():
        stats = decider.stats
        for outcome in Outcome:
            yield (name, outcome.value), stats.outcomes.get(outcome, 0)
        yield (name, "rejected"), stats.rejected
        yield (name, "unserved"), stats.unserved


def _pieces(family: Metric) -> Iterator[bytes]:
    """Yield a metric as text: ``prometheus_client``'s heading, then some samples at a time.

    The library's own lines take twice as long: it checks every label name each time.
    """
    heading = Metric(family.name, family.documentation, family.type, family.unit)
    yield generate_latest(_Alone(heading))
    for first in range(0, len(family.samples), _PIECE_SAMPLES):
        yield "".join(map(_line, family.samples[first : first + _PIECE_SAMPLES])).encode()


def _line(sample: Sample) -> str:
    labels = ",".join([f'{name}="{_escaped(v)}"' for name, v in sorted(sample.labels.items())])
    braced = f"{{{labels}}}" if labels else ""
    return f"{sample.name}{braced} {_number(sample.value)}\n"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _known(groups: Iterable[Group]) -> Iterator[tuple[Labels, int]]:
    for group in groups:
        counts = Counter(worker.source for worker in group.live_workers())
        for source in StateSource:
            yield (group.name, source.value), counts[source]


def _admissions(groups: Iterable[Group]) -> Iterator[tuple[Labels, int]]:
    for group in groups:
        feeds = [worker.feed for worker in group.live_workers() if worker.feed is not None]
        counts = Counter(feed.admission or "engine" for feed in feeds)
        for admission in sorted({*counts, ADMISSION_ENDED, "engine"}):
            yield (group.name, admission), counts[admission]


def _metered(groups: Iterable[Group]) -> Iterator[tuple[Labels, float]]:
    for group in groups:
        for state, seconds in zip(STATES, group.level_fit.seconds, strict=True):
            yield (group.name, state), seconds
        yield (group.name, "unknown"), group.level_fit.unknown_s


def _fitted(groups: Iterable[Group]) -> Iterator[tuple[Labels, float]]:
    for group in groups:
        found = group.level_fit.fitted()
        for state, watts in zip(STATES, found.watts if found else (), strict=False):
            yield (group.name, state), watts


def _sources(workers: Iterable[tuple[Labels, WorkerStatus]]) -> Iterator[tuple[Labels, int]]:
    for labels, worker in workers:
        yield (*labels, worker.source.value), 1


def _totals(groups: Iterable[Group]) -> list[tuple[Labels, StepTotals]]:
    return [
        ((group.name, state.value), totals)
        for group in groups
        for state, totals in group.totals.items()
    ]


def _histograms(deciders: Mapping[str, Decider]) -> Iterator[Metric]:
    for name, text, read in HISTOGRAMS:
        family = HistogramMetricFamily(name, text, labels=("group",))
        for group, decider in deciders.items():
            histogram = read(decider.stats)
            bounds = [*map(_number, histogram.bounds), "+Inf"]
            buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
            family.add_metric((group,), buckets, histogram.total)
        yield family


def _families(
    rows: Sequence[Row[T]], names: Labels, subjects: Sequence[tuple[Labels, T]]
) -> Iterator[Metric]:
    for row in rows:
        values = ((labels, row.read(subject)) for labels, subject in subjects)
        yield _family(row.name, row.help, names, values)


def _family(
    name: str, text: str, names: Labels, values: Iterable[tuple[Labels, float | None]]
) -> Metric:
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family = kind(name, text, labels=names)
    for labels, value in values:
        if value is not None:
            family.add_metric(labels, value)
    return family
