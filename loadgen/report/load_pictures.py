"""Pictures of a demo's runs, over time and as bars. Needs the extra ``plots``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from loadgen.emulator.record import StepRecord
from loadgen.report.charts import finish, legend, panels, save, smoothed
from loadgen.report.numbers import number
from router.core.errors import ConfigError

HEIGHT = 4.8  # inches
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


def draw_loads(path: Path, runs: Sequence[Panel], caption: str) -> None:
    """KV tokens of every worker over the steps, a panel per run, on one scale (PNG)."""
    figure, every_axes = panels(len(runs), height=HEIGHT, sharex=True, sharey=True)
    for axes, run in zip(every_axes, runs, strict=True):
        steps = [row.step for row in run.record]
        for loads in zip(*(row.load_tokens for row in run.record), strict=True):
            axes.plot(steps, [load / 1000 for load in loads], linewidth=0.9)
        if run.steady is not None:
            axes.axvspan(*run.steady, color="0.5", alpha=0.1, linewidth=0)
        finish(axes, "barrier step", "", f"{run.name}: {run.figure}")
        axes.margins(x=0)
    every_axes[0].set_ylim(bottom=0)
    every_axes[0].set_ylabel("load of a worker (thousand KV tokens)")
    save(figure, path, caption)


def draw_power(path: Path, runs: Sequence[Panel], caption: str) -> None:
    """Mean power of a worker over engine seconds, one curve per run (PNG)."""
    figure, (axes,) = panels(1, height=HEIGHT)
    longest_s = max(sum(row.step_s for row in run.record) for run in runs)
    for run in runs:
        seconds = np.array([row.step_s for row in run.record])
        mean_w = np.array([row.power_w for row in run.record]).mean(axis=1)
        times_s, watts = smoothed(seconds, mean_w, POWER_POINTS, longest_s)
        axes.plot(times_s, watts, linewidth=1.6, label=run.name)
    title = "power of a worker, mean of all: the area below a curve is energy"
    finish(axes, "time (engine seconds)", "mean power of a worker (W)", title)
    axes.margins(x=0)
    axes.set_ylim(bottom=0)
    legend(axes, "lower left")
    save(figure, path, caption)


def draw_bars(
    path: Path, names: Sequence[str], figures: Mapping[str, Sequence[float]], caption: str
) -> None:
    """A panel per figure with a bar per run, the last one's highlighted (PNG)."""
    figure, every_axes = panels(len(figures), height=HEIGHT, sharey=True)
    colours = ["0.65"] * (len(names) - 1) + ["C0"]
    for axes, (title, values) in zip(every_axes, figures.items(), strict=True):
        labels = [number(value, 3) for value in values]
        axes.bar_label(axes.barh(names, values, color=colours), labels, padding=3)
        finish(axes, "", "", title)
        axes.set_xlim(0, 1.4 * max(values) or 1)
    every_axes[0].invert_yaxis()
    save(figure, path, caption)
