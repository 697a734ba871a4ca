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
    """The runs of one trial, one per seed."""

    values: Mapping[str, Sequence[float | None]]  # by metric; None where a run lacks it
    command: str | None = None
    differs: Mapping[str, object] | None = None
    records: StepRecords | None = None  # every step of the first run, if kept

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
        return self.mean(metric) / other.mean(metric)


Outcomes = Mapping[Key, Sample]
