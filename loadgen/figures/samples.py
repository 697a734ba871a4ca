"""Repeated simulations of one case."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from loadgen.report.intervals import Estimate, estimate
from loadgen.simulator.decode.results import StepRecords

Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """The runs of one case, one a seed.

    Attributes:
        values: by metric, one a seed; a metric that a run does not have is None.
        command: what repeats them; None where the command line cannot say it.
        differs: settings that are not the conditions of the paper.
        records: every step of the first run, where asked for.
    """

    values: Mapping[str, Sequence[float | None]]
    command: str | None = None
    differs: Mapping[str, object] | None = None
    records: StepRecords | None = None

    def each(self, metric: str) -> list[float]:
        """Of every seed that has it."""
        return [value for value in self.values[metric] if value is not None]

    def of(self, metric: str) -> Estimate | None:
        """Mean and interval; None where no run has it."""
        values = self.each(metric)
        return estimate(values) if values else None

    def mean(self, metric: str) -> float:
        """Mean over the seeds; not a number where no run has it."""
        values = self.each(metric)
        return fmean(values) if values else math.nan

    def ratio(self, other: Sample, metric: str) -> float:
        """Ratio of the means."""
        return self.mean(metric) / other.mean(metric)


Outcomes = Mapping[Key, Sample]
