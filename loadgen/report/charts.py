"""Charts of studies, for the width of a README. Needs the extra ``plots``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from loadgen.report.intervals import Estimate
from router.core.forecast.forecast import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 100
# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vPX"
DASHES = ("-", "--", "-.", ":", "-", "--", "-.")


@dataclass(frozen=True, slots=True)
class Line:
    """Points of one curve; the same ``style`` looks the same in every panel."""

    name: str
    xs: Sequence[float]
    ys: Sequence[Estimate | None]
    unit: float = 1.0
    style: int = 0


def panels(
    count: int, rows: int = 1, height: float = 4.2, *, sharex: bool = False, sharey: bool = False
) -> tuple[Figure, list[Axes]]:
    """Create a figure of the README's width with panels side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.0, height * rows), dpi=DPI, layout="constrained")
    every_axes = figure.subplots(rows, count, sharex=sharex, sharey=sharey, squeeze=False)
    return figure, list(every_axes.flat)


def draw_line(axes: Axes, line: Line) -> None:
    """Draw one curve with its 95 % intervals as bars."""
    points = [(x, y) for x, y in zip(line.xs, line.ys, strict=True) if y is not None]
    axes.errorbar(
        [x for x, _ in points],
        [y.mean / line.unit for _, y in points],
        yerr=[(y.half_width or 0.0) / line.unit for _, y in points],
        label=line.name,
        color=COLOURS[line.style],
        marker=MARKERS[line.style],
        linestyle=DASHES[line.style],
        markersize=5,
        linewidth=1.6,
        capsize=3,
    )


def smoothed(
    seconds: Floats, values: Floats, points: int, span_s: float | None = None
) -> tuple[Floats, Floats]:
    """Values of steps averaged over equal parts of a span: the parts' midpoints in s, averages."""
    ends_s = np.cumsum(seconds)
    span_s = span_s or float(ends_s[-1])
    part = np.minimum((ends_s / span_s * points).astype(np.int64), points - 1)
    in_part = np.bincount(part, seconds, points)
    sums = np.bincount(part, seconds * values, points)
    filled = in_part > 0
    middles_s = (np.arange(points) + 0.5) * span_s / points
    return middles_s[filled], sums[filled] / in_part[filled]


def finish(axes: Axes, x_label: str, y_label: str, title: str = "") -> None:
    """Add labels, grid and frame."""
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_title(title, fontsize=11)
    axes.grid(visible=True, color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def legend(axes: Axes, place: Literal["best", "lower left"] = "best") -> None:
    """Add the names of the curves."""
    axes.legend(frameon=False, fontsize=9, loc=place)


def save(figure: Figure, path: Path, caption: str) -> None:
    """Write a PNG with a caption; without a date, so equal figures give equal files."""
    figure.supxlabel(caption, fontsize=9, color="0.35")
    figure.savefig(path, format="png", metadata={"Software": None})
