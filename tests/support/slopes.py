"""A straight line through what was measured over time, and how surely it rises."""

import math
from collections.abc import Sequence
from statistics import fmean, linear_regression

from loadgen.report.intervals import Estimate

_PARTS = 10
_T_95 = 2.306
"""Two-sided 95 % point of Student's t for ten points on a line."""


def slope(points: Sequence[tuple[float, float]]) -> Estimate:
    """By least squares, of the means of ten parts: neighbouring measurements are much alike.

    Args:
        points: x and y, in the order of x, at least ten.
    """
    size = len(points) // _PARTS
    points = points[-size * _PARTS :]
    parts = [points[at : at + size] for at in range(0, len(points), size)]
    xs = [fmean(x for x, _ in part) for part in parts]
    ys = [fmean(y for _, y in part) for part in parts]
    line = linear_regression(xs, ys)
    off = [y - line.slope * x - line.intercept for x, y in zip(xs, ys, strict=True)]
    spread = sum((x - fmean(xs)) ** 2 for x in xs)
    error = math.sqrt(sum(one**2 for one in off) / (len(parts) - 2) / spread)
    return Estimate(line.slope, _T_95 * error)
