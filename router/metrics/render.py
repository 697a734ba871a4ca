"""Prometheus metrics, read from the router's counters at each scrape."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any, TypeVar

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
from router.core.rounds.decider import Decider
from router.core.state.cluster import Cluster
from router.metrics import groups
from router.metrics.other import ACCESS_ROWS, BUILD_ROWS, KEY_ROWS, key_readings
from router.metrics.rows import Row, Table
from router.metrics.workers import LIVE_WORKER_ROWS, READING_ROWS, WORKER_ROWS, Reading

# Cached, because the lookup reads files.
_VERSION = version("evenstep")

T = TypeVar("T")
Labels = Sequence[str]
Value = float | Mapping[str, float] | None

_PIECE_SAMPLES = 128
_number: Callable[[float], str] = floatToGoString


class _Alone(CollectorRegistry):
    def __init__(self, family: Metric) -> None:
        super().__init__()
        self._family = family

    def collect(self) -> Iterator[Metric]:
        yield self._family


@dataclass(slots=True)
class Metrics:
    """Renders the workers' states and the router's counters.

    Attributes:
        counters: tables without labels, each with what it is read from.
        deciders: deciders by group, with their counters; empty if nothing is routed.
        limits: counts by API key.
    """

    cluster: Cluster
    clock: Clock
    counters: Sequence[tuple[Table[Any], object]]
    deciders: Mapping[str, Decider] = field(default_factory=dict)
    limits: KeyLimits | None = None
    _process: ProcessCollector = field(
        default_factory=lambda: ProcessCollector(registry=CollectorRegistry())
    )

    async def render(self) -> bytes:
        """Return all metrics in the Prometheus text format.

        Each metric is read at once and written in pieces, with a yield to the event loop between
        pieces. So a scrape of hundreds of workers blocks no stream for long. Samples are written
        here, as ``prometheus_client`` checks every label name each time and takes twice as long.
        """
        parts = []
        for family in chain(self._collect(), self._process.collect()):
            heading = Metric(family.name, family.documentation, family.type, family.unit)
            parts.append(generate_latest(_Alone(heading)))
            for first in range(0, len(family.samples), _PIECE_SAMPLES):
                await asyncio.sleep(0)
                piece = family.samples[first : first + _PIECE_SAMPLES]
                parts.append("".join(map(_line, piece)).encode())
            await asyncio.sleep(0)
        return b"".join(parts)

    def _collect(self) -> Iterator[Metric]:
        for rows, subject in ((BUILD_ROWS, _VERSION), *self.counters):
            yield from _families(rows, (), [((), subject)])
        if self.deciders:
            yield from self._routed()
        if self.limits is not None:
            keys = list(key_readings(self.limits, self.deciders))
            yield from _families(ACCESS_ROWS, (), [((), self.limits)])
            yield from _families(KEY_ROWS, ("key",), keys)
        yield from self._observed()

    def _routed(self) -> Iterator[Metric]:
        deciders = [((name,), decider) for name, decider in self.deciders.items()]
        prefills = [each for each in deciders if each[1].group.serves is not None]
        aheads = [(i, each.look_ahead) for i, each in deciders if each.look_ahead is not None]
        yield from _families(groups.DECIDER_ROWS, ("group",), deciders)
        yield from _families(groups.PREFILL_ROWS, ("group",), prefills)
        for name, row in groups.HISTOGRAMS.items():
            family = HistogramMetricFamily(name, row.help, labels=("group",))
            for labels, decider in deciders:
                histogram = row.read(decider.stats)
                bounds = [*map(_number, histogram.bounds), "+Inf"]
                buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
                family.add_metric(labels, buckets, histogram.total)
            yield family
        yield from _families(groups.LOOK_AHEAD_ROWS, ("group",), aheads)

    def _observed(self) -> Iterator[Metric]:
        known, now_s = self.cluster.groups, self.clock()
        named = [((name,), group) for name, group in known.items()]
        totals = [
            ((name, state.value), each)
            for name, group in known.items()
            for state, each in group.totals.items()
        ]
        workers = [
            ((name, spec.id, "" if spec.rank is None else str(spec.rank)), each)
            for name, group in known.items()
            for each in group.workers.values()
            for spec in (each.spec,)
        ]
        live = [(labels, worker) for labels, worker in workers if worker.live]
        readings = [
            (labels, Reading(worker, now_s, known[labels[0]].prefixes.held(worker.spec.id)))
            for labels, worker in live
        ]
        # While they are written a worker may go down, or tell another state.
        of_workers = (
            _read(WORKER_ROWS, workers),
            _read(LIVE_WORKER_ROWS, live),
            _read(READING_ROWS, readings),
        )
        yield from _families(groups.GROUP_ROWS, ("group",), named)
        yield from _families(groups.STEP_ROWS, ("group", "pool"), totals)
        for rows, values in of_workers:
            yield from _families(rows, ("group", "worker", "rank"), values)


def _line(sample: Sample) -> str:
    labels = ",".join([f'{name}="{_escaped(v)}"' for name, v in sorted(sample.labels.items())])
    braced = f"{{{labels}}}" if labels else ""
    return f"{sample.name}{braced} {_number(sample.value)}\n"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _read(
    rows: Table[T], subjects: Sequence[tuple[Labels, T]]
) -> tuple[Table[Sequence[Value]], Sequence[tuple[Labels, Sequence[Value]]]]:
    """The rows and what they tell of the subjects now."""
    told = [(labels, [row.read(each) for row in rows.values()]) for labels, each in subjects]
    named = enumerate(rows.items())
    return {name: Row(row.help, itemgetter(at), row.label) for at, (name, row) in named}, told


def _families(
    rows: Table[T], names: Labels, subjects: Sequence[tuple[Labels, T]]
) -> Iterator[Metric]:
    for name, row in rows.items():
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        labels = names if row.label is None else (*names, row.label)
        family = kind(name, row.help, labels=labels)
        for values, subject in subjects:
            value = row.read(subject)
            if isinstance(value, Mapping):
                for each, part in value.items():
                    family.add_metric((*values, each), part)
            elif value is not None:
                family.add_metric(values, value)
        yield family
