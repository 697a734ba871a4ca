"""Repeated simulations of one case."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from loadgen.report.intervals import Estimate, estimate
from loadgen.simulator.decode.decode_results import StepRecords

Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """The runs of one case, one per seed.

    Attributes:
        values: values by metric, one per seed; None for a metric that a run lacks.
        command: command that repeats the first run; None if flags cannot express it.
        differs: settings that differ from the paper's conditions.
        records: every step of the first run, if kept.
    """

    values: Mapping[str, Sequence[float | None]]
    command: str | None = None
    differs: Mapping[str, object] | None = None
    records: StepRecords | None = None

    def each(self, metric: str) -> list[float]:
        """Values of every seed that has the metric."""
        return [value for value in self.values[metric] if value is not None]

    def of(self, metric: str) -> Estimate | None:
        """Mean and interval; None if no run has the metric."""
        values = self.each(metric)
        return estimate(values) if values else None

    def mean(self, metric: str) -> float:
        """Mean over the seeds; NaN if no run has the metric."""
        values = self.each(metric)
        return fmean(values) if values else math.nan

    def ratio(self, other: Sample, metric: str) -> float:
        """Ratio of the means."""
        return self.mean(metric) / other.mean(metric)


Outcomes = Mapping[Key, Sample]
