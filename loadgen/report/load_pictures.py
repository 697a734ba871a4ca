"""Pictures of a demo's runs, over time and as bars. Needs the extra ``plots``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from loadgen.emulator.record import StepRecord
from loadgen.report.numbers import number
from router.core.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INCHES = (12.0, 4.8)
DPI = 100
# Power is averaged over intervals; this many cover the whole axis.
POWER_POINTS = 150


@dataclass(frozen=True, slots=True)
class Panel:
    """One run to draw."""

    name: str
    figure: str
    record: Sequence[StepRecord]  # all steps, in order; at least one
    # First and last step of the averages' window; None: no window.
    steady: tuple[int, int] | None = None


def require_matplotlib() -> None:
    """Check that pictures can be drawn."""
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "pictures need matplotlib, which is not installed: pip install matplotlib "
            "(the extra plots of evenstep)"
        )


def draw_loads(path: Path, panels: Sequence[Panel], caption: str) -> None:
    """KV tokens of every worker over the steps, a panel per run, on one scale (PNG)."""
    figure = _figure()
    every_axes = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    for axes, panel in zip(every_axes, panels, strict=True):
        steps = [row.step for row in panel.record]
        for loads in zip(*(row.load_tokens for row in panel.record), strict=True):
            axes.plot(steps, [load / 1000 for load in loads], linewidth=0.9)
        if panel.steady is not None:
            axes.axvspan(*panel.steady, color="0.5", alpha=0.1, linewidth=0)
        axes.set_title(f"{panel.name}: {panel.figure}", fontsize=11)
        axes.set_xlabel("barrier step")
        _finish(axes)
    every_axes[0].set_ylim(bottom=0)
    every_axes[0].set_ylabel("load of a worker (thousand KV tokens)")
    _save(figure, path, caption)


def draw_power(path: Path, panels: Sequence[Panel], caption: str) -> None:
    """Mean power of a worker over engine seconds, one curve per run (PNG)."""
    figure = _figure()
    axes = figure.subplots()
    longest_s = max(sum(row.step_s for row in panel.record) for panel in panels)
    for panel in panels:
        times_s, watts = _smooth_power(panel.record, longest_s / POWER_POINTS)
        axes.plot(times_s, watts, linewidth=1.6, label=panel.name)
    axes.set_xlabel("time (engine seconds)")
    axes.set_ylabel("mean power of a worker (W)")
    axes.set_ylim(bottom=0)
    axes.set_title("power of a worker, mean of all: the area below a curve is energy", fontsize=11)
    axes.legend(frameon=False, loc="lower left")
    _finish(axes)
    _save(figure, path, caption)


def draw_bars(
    path: Path, names: Sequence[str], figures: Mapping[str, Sequence[float]], caption: str
) -> None:
    """A panel per figure with a bar per run, the last one's highlighted (PNG)."""
    figure = _figure()
    every_axes = figure.subplots(1, len(figures), sharey=True, squeeze=False)[0]
    colours = ["0.65"] * (len(names) - 1) + ["C0"]
    for axes, (title, values) in zip(every_axes, figures.items(), strict=True):
        labels = [number(value, 3) for value in values]
        axes.bar_label(axes.barh(names, values, color=colours), labels, padding=3)
        axes.set_title(title, fontsize=11)
        _finish(axes)
        axes.set_xlim(0, 1.4 * max(values) or 1)
    every_axes[0].invert_yaxis()
    _save(figure, path, caption)


def _smooth_power(
    record: Sequence[StepRecord], interval_s: float
) -> tuple[list[float], list[float]]:
    """Averages over consecutive intervals, at the middle of each."""
    ends_s = accumulate(row.step_s for row in record)
    buckets: dict[int, list[StepRecord]] = {}
    for end_s, row in zip(ends_s, record, strict=True):
        buckets.setdefault(int(end_s / interval_s), []).append(row)
    watts = [
        sum(fmean(row.power_w) * row.step_s for row in rows) / sum(row.step_s for row in rows)
        for rows in buckets.values()
    ]
    return [(index + 0.5) * interval_s for index in buckets], watts


def _figure() -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=INCHES, dpi=DPI, layout="constrained")


def _finish(axes: Axes) -> None:
    axes.grid(visible=True, color="0.9")
    axes.set_axisbelow(True)
    axes.margins(x=0)
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure: Figure, path: Path, caption: str) -> None:
    figure.supxlabel(caption, fontsize=9, color="0.35")
    figure.savefig(path, format="png")
