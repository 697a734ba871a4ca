"""Prometheus metrics: what the router has counted, read when somebody scrapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from itertools import accumulate
from typing import TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from router.barrier import StepTotals
from router.decider import Clock
from router.dispatch import Dispatcher
from router.engines.gauges import GaugeReader
from router.engines.health import HealthMonitor
from router.engines.snapshots import SnapshotClient
from router.lookahead import LookAhead
from router.metric_table import (
    BUILD,
    GAUGE_ROWS,
    GROUP_ROWS,
    HEALTH_ROWS,
    HISTOGRAMS,
    LIVE_WORKER_ROWS,
    LOOK_AHEAD_ROWS,
    PREFILL_ROWS,
    REQUESTS,
    SNAPSHOT_ROWS,
    STATE_SOURCE,
    STEP_ROWS,
    WORKER_ROWS,
    GroupReading,
    Row,
    WorkerReading,
)
from router.types import Outcome, StateSource

T = TypeVar("T")
Labels = Sequence[str]


class Metrics(Collector):
    """Renders the counters of the router's parts.

    Args:
        dispatcher: counters of requests and rounds, and the cluster.
        snapshots: counters of the state stream.
        health: counters of health checks.
        gauges: counters of readings of engines' metrics.
        clock: the dispatcher's.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        snapshots: SnapshotClient,
        health: HealthMonitor,
        gauges: GaugeReader,
        clock: Clock,
    ) -> None:
        self._dispatcher = dispatcher
        self._snapshots = snapshots
        self._health = health
        self._gauges = gauges
        self._clock = clock
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        """All metrics in the Prometheus text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """See ``prometheus_client``."""
        groups = self._groups()
        yield _family(*BUILD, ("version",), [((version("evenstep"),), 1)])
        yield from _families(SNAPSHOT_ROWS, (), [((), self._snapshots)])
        yield from _families(HEALTH_ROWS, (), [((), self._health)])
        yield from _families(GAUGE_ROWS, (), [((), self._gauges)])
        yield _family(*REQUESTS, ("group", "outcome"), _outcomes(groups))
        yield from _families(GROUP_ROWS, ("group",), [((r.group.name,), r) for r in groups])
        prefills = [reading for reading in groups if reading.group.serves is not None]
        yield from _families(PREFILL_ROWS, ("group",), [((r.group.name,), r) for r in prefills])
        yield from _histograms(groups)
        yield from _families(LOOK_AHEAD_ROWS, ("group",), _look_aheads(groups))
        yield from _families(STEP_ROWS, ("group", "pool"), _totals(groups))
        workers = list(self._workers())
        live = [(labels, reading) for labels, reading in workers if reading.worker.live]
        names = ("group", "worker", "rank")
        yield from _families(WORKER_ROWS, names, workers)
        yield from _families(LIVE_WORKER_ROWS, names, live)
        yield _family(*STATE_SOURCE, (*names, "source"), _sources(live))

    def _groups(self) -> list[GroupReading]:
        return [GroupReading(decider) for decider in self._dispatcher.deciders.values()]

    def _workers(self) -> Iterator[tuple[Labels, WorkerReading]]:
        now_s = self._clock()
        for group in self._dispatcher.cluster.groups.values():
            for worker in group.workers.values():
                rank = "" if worker.spec.rank is None else str(worker.spec.rank)
                yield (group.name, worker.spec.id, rank), WorkerReading(worker, now_s)


def _outcomes(groups: Iterable[GroupReading]) -> Iterator[tuple[Labels, int]]:
    for reading in groups:
        name, stats = reading.group.name, reading.stats
        for outcome in Outcome:
            yield (name, outcome.value), stats.outcomes.get(outcome, 0)
        yield (name, "rejected"), stats.rejected
        yield (name, "unserved"), stats.unserved


def _sources(workers: Iterable[tuple[Labels, WorkerReading]]) -> Iterator[tuple[Labels, int]]:
    for labels, reading in workers:
        for source in StateSource:
            yield (*labels, source.value), int(reading.worker.source is source)


def _look_aheads(groups: Iterable[GroupReading]) -> list[tuple[Labels, LookAhead]]:
    return [
        ((reading.group.name,), reading.decider.look_ahead)
        for reading in groups
        if reading.decider.look_ahead is not None
    ]


def _totals(groups: Iterable[GroupReading]) -> list[tuple[Labels, StepTotals]]:
    return [
        ((reading.group.name, state.value), totals)
        for reading in groups
        for state, totals in reading.group.totals.items()
    ]


def _histograms(groups: Sequence[GroupReading]) -> Iterator[Metric]:
    for name, text, read in HISTOGRAMS:
        family = HistogramMetricFamily(name, text, labels=("group",))
        for reading in groups:
            histogram = read(reading.stats)
            bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
            buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
            family.add_metric((reading.group.name,), buckets, histogram.total)
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
