"""Means of repeated simulations with their 95 % intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

# Two-sided 95 % points of Student's t by degrees of freedom, from 1.
_T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its 95 % interval, mean ± half_width; a single value has none."""

    mean: float
    half_width: float | None


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and interval by Student's t; needs independent values, at least one."""
    count = len(values)
    if count < 2:
        return Estimate(fmean(values), None)
    point = _T_95[min(count - 1, len(_T_95)) - 1]
    return Estimate(fmean(values), point * stdev(values) / math.sqrt(count))


def paired(one: Sequence[float], other: Sequence[float]) -> Estimate:
    """Return the relative difference of pairs (of one seed each), one / other - 1.

    Where ``other`` is zero, the difference is 0 for a zero and ±1 for anything else.
    """
    return estimate(
        [(a / b - 1 if b else math.copysign(bool(a), a)) for a, b in zip(one, other, strict=True)]
    )
