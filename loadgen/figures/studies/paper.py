"""Table 1 and Figures 4, 6 and 7 of arXiv 2601.17855, and its authors' released code.

The table on both traces, with every policy and kind of look-ahead; the look-ahead's horizon, with
and without discount; loads and power over time; and the released code against ``balance_route``
here, by the release's own protocol.

The release's "BF-IO" is the greedy choice by F-scores (arXiv 2605.06113), not the integer program.
It reveals 4 G requests at a time. Its averages run from the start with empty workers until the last
request is assigned. It takes the imbalance after requests have ended and before their slots are
refilled.
"""

from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path

import numpy as np

from loadgen.figures.cases import BEFORE_REFILL, Case
from loadgen.figures.samples import Claim, Outcomes, at_most, within
from loadgen.figures.study import (
    GREEDY,
    GREEDY_ORACLE,
    NONE,
    ORACLE,
    PLAIN,
    TRACE_NAMES,
    WAYS,
    Study,
    mean_output_tokens,
    options_of,
    trace_tables,
)
from loadgen.figures.tables import (
    ENERGY,
    IMBALANCE,
    LONGEST_WAIT,
    MEAN_LOAD,
    PROMPT,
    THROUGHPUT,
    TPOT,
    Column,
    Table,
    chosen_parameters,
    metric_table,
)
from loadgen.model.power_model import PowerModel
from loadgen.report.charts import COLOURS, DASHES, draw_line, finish, legend, panels, save, smoothed
from loadgen.simulator.decode.decode_results import StepRecords

_COLUMNS = (IMBALANCE, THROUGHPUT, TPOT, ENERGY, MEAN_LOAD, PROMPT, LONGEST_WAIT)
# As printed: imbalance in 1e4 tokens, throughput in 1e4 tok/s, TPOT in ms, energy in kJ.
PRINTED: Mapping[str, tuple[float, ...]] = {
    "fcfs": (27.9, 8.00, 14.2, 396),
    "jsq": (28.2, 7.99, 14.2, 396),
    GREEDY: (2.92, 9.03, 12.6, 386),
    GREEDY_ORACLE: (1.65, 9.13, 12.5, 383),
}


def _side_by_side(outcomes: Outcomes) -> Table:
    columns = (IMBALANCE, THROUGHPUT, PROMPT)
    rows = [
        [way, *(column.cell(outcomes[trace, way]) for trace in TRACE_NAMES for column in columns)]
        for way in WAYS
    ]
    titles = [column.title for column in columns]
    header = ["policy"]
    for name in TRACE_NAMES.values():
        header += [f"{name}: {titles[0]}", *titles[1:]]
    return Table(header, rows, "Both traces")


def _printed(outcomes: Outcomes) -> Table:
    """BurstGPT lengths beside the paper's figures; the runs differ in length."""
    columns = (IMBALANCE, THROUGHPUT, TPOT)
    header = ["policy", *(f"{column.title}: here, printed" for column in columns)]
    rows = []
    for way, printed in PRINTED.items():
        sample = outcomes["burstgpt", way]
        pairs = zip(columns, printed, strict=False)
        cells = [f"{sample.mean(each.metric) / each.unit:.2f}, {value:g}" for each, value in pairs]
        rows.append([way, *cells])
    return Table(header, rows, "Beside the paper's Table 1 (BurstGPT lengths)")


class Table1Study(Study):
    title = "Table 1"
    conditions = (
        "G=16 workers, B=72 slots, 128 requests always waiting, step time 4.95 ms + 9.5e-8 s per "
        "KV token of the fullest worker, 4,500 steps of which the first 500 are left out."
    )

    def cases(self) -> Iterator[Case]:
        for trace, way in product(TRACE_NAMES, WAYS):
            yield Case((trace, way), options_of(trace, way))

    def tables(self, outcomes: Outcomes) -> list[Table]:
        tables = []
        plain = trace_tables(outcomes, "policy", {way: (way,) for way in WAYS}, _COLUMNS)
        for trace, table in zip(TRACE_NAMES, plain, strict=True):
            rows = [[*row, chosen_parameters(outcomes[trace, row[0]])] for row in table.rows]
            tables.append(Table([*table.header, "H, γ, μ, lead in force"], rows, table.title))
        return [_side_by_side(outcomes), *tables, _printed(outcomes)]

    def claims(self, outcomes: Outcomes) -> Iterator[Claim]:
        for trace, name in TRACE_NAMES.items():
            ratio = outcomes[trace, NONE].ratio(outcomes[trace, GREEDY_ORACLE], IMBALANCE.metric)
            yield at_most(f"{name}, G=16: imbalance, {NONE} / {GREEDY_ORACLE}", ratio, 1.0)

    def words(self, outcomes: Outcomes) -> str:
        return (
            "Deferring long prompts lowers the load and flatters imbalance and throughput alike: "
            "see mean load and mean admitted prompt. Without memory pressure vLLM's score of 2026 "
            "is join-the-shortest-queue. Energy is that of the steps shown, by the paper's power "
            "model."
        )


HORIZONS = (0, 4, 8, 12, 20, 40, 100)
_KINDS: Mapping[str, Mapping[str, float]] = {"plain": PLAIN, "discounted": {}}
_STEPS = 1500


def best(outcomes: Outcomes, trace: str, kind: str) -> tuple[int, float]:
    """The horizon with the least imbalance, and that imbalance in tokens."""
    found = {h: outcomes[trace, kind, str(h)].mean(IMBALANCE.metric) for h in HORIZONS}
    horizon = min(found, key=found.__getitem__)
    return horizon, found[horizon]


class HorizonStudy(Study):
    title = "Look-ahead (Figure 4)"
    conditions = (
        f"G=16, B=72, pool 128, oracle of ends, {_STEPS:,} steps without the first 500. Plain: the "
        "paper's objective with ties broken evenly; discounted: gamma, mu and lead by the rule."
    )

    def cases(self) -> Iterator[Case]:
        for trace, (kind, changes), h in product(TRACE_NAMES, _KINDS.items(), HORIZONS):
            run = options_of(trace, ORACLE, horizon=h, steps=_STEPS, **changes)
            yield Case((trace, kind, str(h)), run)

    def tables(self, outcomes: Outcomes) -> list[Table]:
        rows = {f"{kind}, H={h}": (kind, str(h)) for kind, h in product(_KINDS, HORIZONS)}
        return trace_tables(outcomes, "program, H", rows, (IMBALANCE, THROUGHPUT))

    def draw(self, outcomes: Outcomes, path: Path) -> None:
        figure, every_axes = panels(2)
        for axes, (trace, name) in zip(every_axes, TRACE_NAMES.items(), strict=True):
            for style, kind in enumerate(_KINDS, 1):
                samples = [outcomes[trace, kind, str(horizon)] for horizon in HORIZONS]
                draw_line(axes, IMBALANCE.line(kind, HORIZONS, samples, style))
            axes.set_xscale("symlog", linthresh=2)
            axes.set_xticks(HORIZONS, [str(horizon) for horizon in HORIZONS])
            axes.set_yscale("log")
            finish(axes, "look-ahead H, steps", IMBALANCE.title, name)
            legend(axes)
        save(figure, path, f"simulated; G=16, B=72, pool 128, oracle of ends, {_STEPS:,} steps")

    def words(self, outcomes: Outcomes) -> str:
        parts = []
        for trace, name in TRACE_NAMES.items():
            (plain, least), (ours, lower) = (best(outcomes, trace, kind) for kind in _KINDS)
            parts.append(
                f"{name}: best plain H is {plain} ({least / 1e4:.2f}e4), best discounted H {ours} "
                f"({lower / 1e4:.2f}e4)."
            )
        return " ".join(parts)


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


POWER_PICTURE = "power.png"


class TrajectoriesStudy(Study):
    title = "Loads and power over time (Figures 6 and 7)"
    conditions = "BurstGPT lengths, G=16, B=72, pool 128, 4,500 steps from empty workers, seed 0."
    further_pictures = (POWER_PICTURE,)

    def cases(self) -> Iterator[Case]:
        for way in _WAYS:
            yield Case((way,), options_of("burstgpt", way, warmup=0), seeds=1, keep_records=True)

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
        _draw_power(outcomes, path.with_name(POWER_PICTURE))

    def words(self, outcomes: Outcomes) -> str:
        return (
            f"One run of each policy, start included. [Power over time]({POWER_PICTURE}): the same "
            "steps take less time and draw more power with bfio; by the paper's power model the "
            "energy of a step falls less than its time."
        )


REQUESTS = 60_000
SLOTS = 72
TOLERANCE = 0.10
# (trace, G, way): imbalance in tokens and tok/s of the release on the same lengths.
RELEASE: Mapping[tuple[str, int, str], tuple[float, float | None]] = {
    ("burstgpt", 16, "fcfs"): (28.5e4, 8.05e4),
    ("burstgpt", 16, "jsq"): (28.2e4, 8.06e4),
    ("burstgpt", 16, GREEDY): (2.79e4, 9.23e4),
    ("burstgpt", 16, GREEDY_ORACLE): (1.72e4, 9.28e4),
    ("azure-conv", 16, "fcfs"): (17.9e4, None),
    ("azure-conv", 16, GREEDY): (3.07e4, None),
    ("azure-conv", 16, GREEDY_ORACLE): (2.95e4, None),
    ("burstgpt", 64, "fcfs"): (155e4, None),
    ("burstgpt", 64, GREEDY): (22.7e4, None),
    ("burstgpt", 64, GREEDY_ORACLE): (9.0e4, None),
}
_THEIRS = Column("imbalance before refill, 10⁴ tokens", BEFORE_REFILL, 1e4)
# At G=64 such a run is nearly all start; the study also shows twice as many requests.
SHOWN = (
    *((*run, REQUESTS) for run in RELEASE),
    *(("burstgpt", 64, way, 2 * REQUESTS) for way in ("fcfs", GREEDY)),
)


def steps(trace: str, workers: int, requests: int = REQUESTS) -> int:
    """Approximate number of steps until the last request is assigned."""
    return round(requests * mean_output_tokens(trace) / (workers * SLOTS))


class ReleaseStudy(Study):
    title = "The authors' release"
    conditions = (
        f"The release's protocol: 4 G requests revealed at a time, averages from the start until "
        f"{REQUESTS:,} requests are assigned, imbalance taken after requests have ended and before "
        f"their slots are filled; B={SLOTS}. A step's own imbalance stands beside it."
    )

    def cases(self) -> Iterator[Case]:
        for trace, workers, way, requests in SHOWN:
            size = {"workers": workers, "slots": SLOTS, "pool": 4 * workers}
            until = {"steps": steps(trace, workers, requests), "warmup": 0}
            key = (trace, str(workers), way, str(requests))
            yield Case(key, options_of(trace, way, **size, **until), before_refill=True)

    def tables(self, outcomes: Outcomes) -> list[Table]:
        rows = []
        for trace, workers, way, requests in SHOWN:
            targets = RELEASE[trace, workers, way]
            sample = outcomes[trace, str(workers), way, str(requests)]
            cells = [IMBALANCE.cell(sample)]
            for column, target in zip((_THEIRS, THROUGHPUT), targets, strict=True):
                cells.append(column.cell(sample))
                cells += ["–", "–"] if target is None else column.beside(sample, target)
            name = f"{TRACE_NAMES[trace]}, G={workers}, {way}, {requests:,} requests"
            rows.append([name, *cells])
        header = ["", IMBALANCE.title, _THEIRS.title, "release", "", THROUGHPUT.title]
        return [Table([*header, "release", ""], rows)]

    def claims(self, outcomes: Outcomes) -> Iterator[Claim]:
        for (trace, workers, way), (imbalance, throughput) in RELEASE.items():
            sample = outcomes[trace, str(workers), way, str(REQUESTS)]
            name = f"{TRACE_NAMES[trace]}, G={workers}, {way}, against the release"
            yield within(f"{name}: imbalance", sample, BEFORE_REFILL, imbalance, TOLERANCE)
            if throughput is not None:
                metric = THROUGHPUT.metric
                yield within(f"{name}: throughput", sample, metric, throughput, TOLERANCE)

    def words(self, outcomes: Outcomes) -> str:
        return (
            f"At G=64 {REQUESTS:,} requests are assigned in some 740 steps, while loads still "
            "grow; how many the release was given there is not known."
        )
