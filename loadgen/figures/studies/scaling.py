"""How gains grow with the workers G and their slots B.

BF-IO and baselines from 16 to 256 workers (BurstGPT lengths); and Theorems 1 to 3 of
arXiv 2601.17855: FCFS / BF-IO grows as sqrt(B log G).

Prompts of the theorems are uniform up to 1,000 tokens. Outputs are equal (Theorem 1), geometric
(2), or geometric with a growth per step other than one token (3). As in the theorems, BF-IO
considers the coming step only.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from loadgen.figures.cases import Case
from loadgen.figures.samples import Claim, Outcomes, at_least, at_most
from loadgen.figures.study import GREEDY, GREEDY_ORACLE, NONE, ORACLE, PAPER, Study, options_of
from loadgen.figures.tables import (
    IMBALANCE,
    MEAN_LOAD,
    PROMPT,
    THROUGHPUT,
    TPOT,
    Table,
    metric_table,
    shown,
)
from loadgen.figures.trials import SEEDS
from loadgen.report.charts import Line, draw_line, finish, legend, panels, save
from loadgen.report.intervals import Estimate, estimate
from loadgen.simulator.decode.decode_command import DecodeOptions

_FLEETS = (16, 32, 64, 128, 256)
FEWER_SEEDS, MORE_SEEDS = 3, 10
_WAYS = ("fcfs", GREEDY, GREEDY_ORACLE, NONE, ORACLE)
_GREEDY_UP_TO = 64
_REQUIRED_WORKERS = 32
GAIN_AT_128 = 0.22


class ScaleStudy(Study):
    title = "From 16 to 256 workers"
    conditions = (
        "BurstGPT lengths, B=72. G=16 and 32: pool 128, 4,500 steps; above: pool 4 G, 1,500 steps. "
        f"The first 500 steps are left out. {SEEDS} seeds, from G=128 on {FEWER_SEEDS}; "
        f"{MORE_SEEDS} for fcfs at G=32, which varies most from seed to seed. The greedy's "
        f"simulation is slow: up to G={_GREEDY_UP_TO} only."
    )

    def cases(self) -> Iterator[Case]:
        for workers, way in product(_FLEETS, _WAYS):
            if workers > _GREEDY_UP_TO and "balance_route" in way:
                continue
            large = workers > _REQUIRED_WORKERS
            changes = {"pool": 4 * workers, "steps": 1500} if large else {}
            seeds = FEWER_SEEDS if workers >= 128 else SEEDS
            if (workers, way) == (_REQUIRED_WORKERS, "fcfs"):
                seeds = MORE_SEEDS
            run = options_of("burstgpt", way, workers=workers, **changes)
            yield Case((str(workers), way), run, seeds=seeds)

    def tables(self, outcomes: Outcomes) -> list[Table]:
        samples = [(f"G={workers}, {way}", each) for (workers, way), each in outcomes.items()]
        columns = (IMBALANCE, THROUGHPUT, TPOT, MEAN_LOAD, PROMPT)
        return [metric_table("", "workers, policy", samples, columns)]

    def claims(self, outcomes: Outcomes) -> Iterator[Claim]:
        metric = IMBALANCE.metric
        for workers in _FLEETS:
            ours, first = outcomes[str(workers), NONE], outcomes[str(workers), "fcfs"]
            text = f"BurstGPT lengths, G={workers}: imbalance, {{}} / fcfs"
            yield at_most(text.format(NONE), ours.ratio(first, metric), 1.0)
            oracle = outcomes[str(workers), ORACLE]
            yield at_most(text.format(ORACLE), oracle.ratio(first, metric), 1.0)
            if workers in (32, 64):
                greedy = outcomes[str(workers), GREEDY_ORACLE]
                text = f"BurstGPT lengths, G={workers}: imbalance, {NONE} / {GREEDY_ORACLE}"
                yield at_most(text, ours.ratio(greedy, metric), 1.0)
        gain = outcomes["128", NONE].ratio(outcomes["128", "fcfs"], THROUGHPUT.metric) - 1
        text = f"BurstGPT lengths, G=128: gain in throughput of {NONE} over fcfs"
        yield at_least(text, gain, GAIN_AT_128)

    def draw(self, outcomes: Outcomes, path: Path) -> None:
        figure, (left, right) = panels(2)
        for style, way in enumerate(_WAYS):
            present = [workers for workers in _FLEETS if (str(workers), way) in outcomes]
            samples = [outcomes[str(workers), way] for workers in present]
            for axes, column in ((left, IMBALANCE), (right, THROUGHPUT)):
                draw_line(axes, column.line(way, present, samples, style))
        for axes, column in ((left, IMBALANCE), (right, THROUGHPUT)):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(_FLEETS, [str(workers) for workers in _FLEETS])
            finish(axes, "workers G", column.title)
        legend(left)
        save(figure, path, "simulated; BurstGPT lengths, B=72, pool 128 up to G=32, then 4 G")


@dataclass(frozen=True, slots=True)
class Setting:
    """One law of lengths and growth."""

    name: str
    lengths: str
    drift: float = 1

    @property
    def alike(self) -> bool:
        """Whether all outputs have one length, so that all requests end together."""
        return self.lengths.startswith("homogeneous")


SETTINGS = (
    Setting("Theorem 1: outputs alike", "homogeneous:1000,4"),
    Setting("Theorem 2: geometric outputs", "uniform:1000,50"),
    Setting("Theorem 3: drift 0", "uniform:1000,50", 0),
    Setting("Theorem 3: drift 0.5", "uniform:1000,50", 0.5),
    Setting("Theorem 3: drift 2", "uniform:1000,50", 2),
)
SLOTS = (16, 32, 64, 128, 256)
WORKERS = (4, 8, 16, 32, 64, 128)
AT_WORKERS, AT_SLOTS = 16, 64
_POINTS = [(AT_WORKERS, slots) for slots in SLOTS] + [
    (workers, AT_SLOTS) for workers in WORKERS if workers != AT_WORKERS
]
SLOPE = 0.5


def _run(setting: Setting, workers: int, slots: int, policy: str) -> DecodeOptions:
    size = workers * slots
    pool = 2 * size if setting.alike else max(4 * workers, math.ceil(4 * size / 50))
    return DecodeOptions(
        **PAPER,
        policy=policy,
        lengths=setting.lengths,
        workers=workers,
        slots=slots,
        pool=pool,
        steps=88 if setting.alike else 350,
        warmup=8 if setting.alike else 150,
        horizon=0 if policy == "bfio" else None,
        lead=0 if policy == "bfio" else None,
        drift=setting.drift,
    )


def ratios(outcomes: Outcomes, setting: Setting, workers: int, slots: int) -> list[float]:
    """Imbalance of FCFS over that of BF-IO (at least 1 token), one per seed."""
    first, ours = (
        outcomes[setting.name, str(workers), str(slots), policy].each(IMBALANCE.metric)
        for policy in ("fcfs", "bfio")
    )
    return [a / max(1.0, b) for a, b in zip(first, ours, strict=True)]


def slope(xs: Sequence[float], by_seed: Sequence[Sequence[float]]) -> Estimate:
    """Exponent of a power law in x, fitted to each seed's values; ``by_seed``: one row per x."""
    rows = np.log(np.array(by_seed))
    return estimate([float(np.polyfit(np.log(xs), column, 1)[0]) for column in rows.T])


def _slopes(outcomes: Outcomes, setting: Setting) -> tuple[Estimate, Estimate]:
    """Exponents in B at fixed G, and in log G at fixed B."""
    by_slots = [ratios(outcomes, setting, AT_WORKERS, slots) for slots in SLOTS]
    by_workers = [ratios(outcomes, setting, workers, AT_SLOTS) for workers in WORKERS]
    return slope(SLOTS, by_slots), slope([math.log(w) for w in WORKERS], by_workers)


class TheoremsStudy(Study):
    title = "Scaling with B and G (Theorems 1 to 3)"
    conditions = (
        "Prompts uniform from 1 to 1,000 tokens. Theorem 1: all outputs of 4 tokens, twice as many "
        "requests waiting as run, 20 rounds a seed. Else: geometric outputs of mean 50, a pool of "
        f"four steps' free slots and at least 4 G, 350 steps without the first 150. {SEEDS} seeds."
    )

    def cases(self) -> Iterator[Case]:
        for setting, (workers, slots), policy in product(SETTINGS, _POINTS, ("fcfs", "bfio")):
            key = (setting.name, str(workers), str(slots), policy)
            yield Case(key, _run(setting, workers, slots, policy))

    def tables(self, outcomes: Outcomes) -> list[Table]:
        tables = []
        for name, points in (
            (f"Ratio FCFS / BF-IO against B (G={AT_WORKERS})", [(AT_WORKERS, b) for b in SLOTS]),
            (f"Ratio FCFS / BF-IO against G (B={AT_SLOTS})", [(g, AT_SLOTS) for g in WORKERS]),
        ):
            by_slots = points[0][0] == points[1][0]
            header = [f"B={slots}" if by_slots else f"G={workers}" for workers, slots in points]
            rows = []
            for setting in SETTINGS:
                cells = [shown(estimate(ratios(outcomes, setting, *at)), 1.0, 1) for at in points]
                fitted = _slopes(outcomes, setting)[0 if by_slots else 1]
                rows.append([setting.name, *cells, shown(fitted, 1.0, 2)])
            exponent = "exponent of B" if by_slots else "exponent of log G"
            tables.append(Table(["", *header, exponent], rows, name))
        return tables

    def claims(self, outcomes: Outcomes) -> Iterator[Claim]:
        for setting in SETTINGS:
            for name, found in zip(("B", "log G"), _slopes(outcomes, setting), strict=True):
                text = f"{setting.name}: exponent of {name} in FCFS / BF-IO (theory: 0.5 or more)"
                yield at_least(text, found.mean, SLOPE, f"± {found.half_width or 0:.2f}")

    def draw(self, outcomes: Outcomes, path: Path) -> None:
        figure, (left, right) = panels(2)
        for style, setting in enumerate(SETTINGS, 1):
            by_slots = [estimate(ratios(outcomes, setting, AT_WORKERS, b)) for b in SLOTS]
            by_workers = [estimate(ratios(outcomes, setting, g, AT_SLOTS)) for g in WORKERS]
            draw_line(left, Line(setting.name, SLOTS, by_slots, style=style))
            draw_line(right, Line(setting.name, WORKERS, by_workers, style=style))
        first = SETTINGS[1]
        for axes, xs, at in ((left, SLOTS, (AT_WORKERS, 0)), (right, WORKERS, (0, AT_SLOTS))):
            bounds = [math.sqrt((at[1] or x) * math.log(at[0] or x)) for x in xs]
            start = estimate(ratios(outcomes, first, at[0] or xs[0], at[1] or xs[0])).mean
            ys = [start * bound / bounds[0] for bound in bounds]
            axes.plot(xs, ys, color="0.4", linewidth=3, alpha=0.4, label="sqrt(B log G), scaled")
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
            axes.set_xticks(xs, [str(x) for x in xs])
            axes.yaxis.set_major_formatter("{x:g}")
        finish(left, f"slots B (G={AT_WORKERS})", "imbalance, FCFS / BF-IO (H=0)")
        finish(right, f"workers G (B={AT_SLOTS})", "imbalance, FCFS / BF-IO (H=0)")
        legend(left)
        caption = "prompts uniform to 1,000 tokens, geometric outputs of mean 50"
        save(figure, path, f"simulated; {caption}")
