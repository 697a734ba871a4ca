"""Repeated simulations of one case, and claims about them, each a bound on a number."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from loadgen.report.intervals import Estimate, estimate, paired
from loadgen.report.numbers import number
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


@dataclass(frozen=True, slots=True)
class Claim:
    """A bound on a number, from above or else from below, and the number found."""

    text: str  # without the number
    found: float  # NaN counts as missed
    bound: float
    remark: str = ""
    at_most: bool = True

    @property
    def met(self) -> bool:
        return self.found <= self.bound if self.at_most else self.found >= self.bound

    def row(self) -> list[str]:
        """A table row: claim, bound, found, verdict."""
        sign = "≤" if self.at_most else "≥"
        verdict = "met" if self.met else "**missed**"
        found = number(float(self.found), 3) + (f" ({self.remark})" if self.remark else "")
        return [self.text, f"{sign} {number(float(self.bound), 3)}", found, verdict]


# Claims that a number is not above the bound, and that it is not below.
at_most, at_least = partial(Claim, at_most=True), partial(Claim, at_most=False)


def within(text: str, sample: Sample, metric: str, target: float, share: float) -> Claim:
    """Claim that a metric's mean differs by at most a share from a target."""
    found = sample.of(metric)
    mean = math.nan if found is None else found.mean
    spread = "" if found is None or found.half_width is None else f" ± {found.half_width:,.0f}"
    return Claim(
        f"{text}: deviation from {number(float(target), 3)}",
        abs(mean / target - 1),
        share,
        f"{number(mean, 3)}{spread}, {mean / target - 1:+.1%}",
    )


def paired_at_most(text: str, sample: Sample, other: Sample, metric: str, bound: float) -> Claim:
    """Claim that a metric, seed by seed, is surely at most so many times another sample's.

    The number found is the upper end of the ratio's 95 % interval.
    """
    ratio = paired(sample.each(metric), other.each(metric))
    width = ratio.half_width or 0.0
    remark = f"{1 + ratio.mean:.3f} ± {width:.3f}"
    return Claim(text, 1 + ratio.mean + width, bound, remark)
