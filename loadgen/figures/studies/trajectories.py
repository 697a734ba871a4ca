"""Figures 6 and 7 of arXiv 2601.17855: loads and power over time."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from loadgen.figures.cases import Case
from loadgen.figures.samples import Outcomes
from loadgen.figures.study import NONE, ORACLE, Study, config
from loadgen.figures.tables import ENERGY, IMBALANCE, THROUGHPUT, Table, metric_table
from loadgen.model.power_model import PowerModel
from loadgen.report.charts import COLOURS, DASHES, finish, legend, panels, save, smoothed
from loadgen.simulator.decode.decode_results import StepRecords

_WAYS = ("fcfs", "jsq", NONE, ORACLE)
_POWER_WAYS = ("fcfs", NONE, ORACLE)
_POWER_POINTS = 120


def _records(outcomes: Outcomes, way: str) -> StepRecords:
    records = outcomes[(way,)].records
    assert records is not None
    return records


def _draw_power(outcomes: Outcomes, path: Path) -> None:
    figure, (axes,) = panels(1, height=4.0)
    for style, way in enumerate(_POWER_WAYS):
        records = _records(outcomes, way)
        mean_w = records.power_w(PowerModel()).mean(axis=1)
        times_s, watts = smoothed(records.seconds, mean_w, _POWER_POINTS)
        axes.plot(times_s, watts, label=way, color=COLOURS[style], linestyle=DASHES[style])
    finish(axes, "simulated time, s", "mean power of a worker, W")
    axes.set_ylim(300, 405)
    legend(axes)
    law = "100 + 300 u^0.7 W with u = L_g / max L"
    save(figure, path, f"modelled, not measured: {law}; 4,500 steps")


class TrajectoriesStudy(Study):
    title = "Loads and power over time (Figures 6 and 7)"
    conditions = "BurstGPT lengths, G=16, B=72, pool 128, 4,500 steps from empty workers, seed 0."

    def cases(self) -> Iterator[Case]:
        for way in _WAYS:
            yield Case((way,), config("burstgpt", way, warmup=0), seeds=1, keep_records=True)

    def tables(self, outcomes: Outcomes) -> list[Table]:
        samples = [(way, outcomes[(way,)]) for way in _WAYS]
        return [metric_table("", "policy", samples, (IMBALANCE, THROUGHPUT, ENERGY))]

    def draw(self, outcomes: Outcomes, path: Path) -> None:
        figure, every_axes = panels(2, rows=2, height=3.4)
        for axes, way in zip(every_axes, _WAYS, strict=True):
            loads = _records(outcomes, way).loads[::5] / 1e3
            axes.plot(5 * np.arange(len(loads)), loads, linewidth=0.6)
            finish(axes, "step", "load of a worker, 10³ KV tokens", way)
            axes.margins(x=0)
            axes.sharey(every_axes[0])
        every_axes[0].set_ylim(bottom=0)
        save(figure, path, "simulated; BurstGPT lengths, G=16, B=72, pool 128; one line per worker")
        _draw_power(outcomes, path.with_name("power.png"))

    def words(self, outcomes: Outcomes) -> str:
        return (
            "One run of each policy, start included. [Power over time](power.png): the same steps "
            "take less time and draw more power with bfio; by the paper's power model the energy "
            "of a step falls less than its time."
        )
