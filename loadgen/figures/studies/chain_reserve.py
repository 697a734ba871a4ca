"""Number of slots to reserve at placement, and the criterion for it: Figures 6 and 7.

The paper is "Serving Chain-structured Jobs with Large Memory Footprints", section 4.1.2.
"""

import math
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from statistics import fmean, median_low
from types import MappingProxyType

from loadgen.chains.chain_simulation import simulate_chains
from loadgen.chains.work import draw_work
from loadgen.figures.chain_cases import DEPLOYMENTS, LOWER, RESPONSE, UPPER, Computed, deployment
from loadgen.figures.fingerprints import CHAIN_FOLDERS
from loadgen.figures.samples import Claim, Outcomes, Sample, at_most
from loadgen.figures.study import Study
from loadgen.figures.tables import Column, Table, metric_table, shown
from loadgen.report.charts import Line, draw_line, finish, legend, panels, save
from loadgen.report.intervals import estimate
from router.core.placement.bounds import chain_bounds
from router.core.placement.gbp_cr import gbp_cr
from router.core.placement.gca import gca
from router.core.placement.model import total_rate

RATES = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2)
SHOWN = (0.2, 1.0)
RESERVED = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 17, 20, 24, 28, 32, 36, 40)
REQUESTS, WARMUP = 10_000, 1_000
SIMULATED, SURROGATE = RESPONSE, "surrogate_s"
COLUMNS = (
    Column("simulated, s", SIMULATED),
    Column("lower bound, s", LOWER),
    Column("upper bound, s", UPPER),
    Column("c K / rate, s", SURROGATE),
)
_CHOOSERS: Mapping[str, str] = MappingProxyType(
    {"simulation": SIMULATED, "lower bound": LOWER, "upper bound": UPPER, "c K": SURROGATE}
)
_TARGET = 1.1
_TOP_S = 50.0
CHOICE_PICTURE = "chain_demand.png"


def responded(seed: int, rate: float, reserved: int) -> dict[str, float | None]:
    """Mean response time with c reserved slots, and its predictors; None: unstable.

    ``rate``: arrivals, requests per second.
    """
    model, servers = deployment(seed)
    grouping = gbp_cr(model, servers, reserved, rate)
    chains = gca(grouping.placement)
    if total_rate(chains) <= rate:
        return dict.fromkeys((SIMULATED, LOWER, UPPER, SURROGATE))
    bounds = chain_bounds(chains, rate)
    served = simulate_chains(chains, "jffc", draw_work(rate, REQUESTS, seed))
    return {
        SIMULATED: float(served.after(WARMUP).response_s.mean()),
        LOWER: bounds.lower_s,
        UPPER: bounds.upper_s,
        SURROGATE: reserved * len(grouping.chains) / rate if grouping.enough else None,
    }


def _row(outcomes: Outcomes, rate: float) -> list[tuple[str, Sample]]:
    return [(f"c={c}", outcomes[f"{rate:g}/s", f"c={c}"]) for c in RESERVED]


def chosen(outcomes: Outcomes, rate: float, metric: str) -> list[int]:
    """Values of ``RESERVED`` that minimize a metric, one per deployment; the first of equals."""
    columns = [sample.values[metric] for _, sample in _row(outcomes, rate)]
    rows = [
        [math.inf if value is None else value for value in row]
        for row in zip(*columns, strict=True)
    ]
    return [row.index(min(row)) for row in rows]


def beside_best(outcomes: Outcomes, rate: float, metric: str) -> list[float]:
    """Simulated time at a metric's minimum over the least simulated one, per deployment."""
    columns = [sample.values[SIMULATED] for _, sample in _row(outcomes, rate)]
    places = zip(chosen(outcomes, rate, metric), chosen(outcomes, rate, SIMULATED), strict=True)
    return [
        (columns[here][seed] or math.nan) / (columns[best][seed] or math.nan)
        for seed, (here, best) in enumerate(places)
    ]


class ChainReserveStudy(Study):
    title = "Chains: slots to reserve (Figures 6 and 7 of the paper on chains)"
    conditions = (
        "BLOOM-176B on 20 servers; gbp_cr with c slots reserved for each block, gca, jffc. Poisson "
        f"arrivals, exponential work; {DEPLOYMENTS} deployments, {REQUESTS - WARMUP:,} requests "
        f"each after {WARMUP:,} that are left out, the same for every c. K: chains of gbp_cr. A "
        "dash: the chains cannot keep up; means are over the deployments that can."
    )
    code = CHAIN_FOLDERS

    def cases(self) -> Iterator[Computed]:
        metrics = tuple(column.metric for column in COLUMNS)
        for rate, c in product(RATES, RESERVED):
            given = {"rate": rate, "reserved": c}
            yield Computed((f"{rate:g}/s", f"c={c}"), responded, metrics, given)

    def tables(self, outcomes: Outcomes) -> list[Table]:
        title = "Mean response time by the slots that are reserved, {:g} requests/s"
        shown_rates = [
            metric_table(title.format(rate), "c", _row(outcomes, rate), COLUMNS) for rate in SHOWN
        ]
        rows = [
            [f"{rate:g}/s"]
            + [
                f"{RESERVED[median_low(chosen(outcomes, rate, metric))]} "
                f"({shown(estimate(beside_best(outcomes, rate, metric)), 1.0, 3)})"
                for metric in _CHOOSERS.values()
            ]
            for rate in RATES
        ]
        header = ["arrivals", *_CHOOSERS]
        title = "c by what is made least, median; simulated time there / the least simulated"
        return [*shown_rates, Table(header, rows, title)]

    def claims(self, outcomes: Outcomes) -> Iterator[Claim]:
        for rate in RATES:
            text = f"{rate:g}/s: simulated time at the c of the lower bound / least simulated"
            yield at_most(text, fmean(beside_best(outcomes, rate, LOWER)), _TARGET)
        for metric, name in ((UPPER, "upper bound"), (SURROGATE, "surrogate c K")):
            others = fmean(fmean(beside_best(outcomes, rate, metric)) for rate in RATES)
            lower = fmean(fmean(beside_best(outcomes, rate, LOWER)) for rate in RATES)
            text = f"all rates: simulated time, c of the lower bound / of the {name}"
            yield at_most(text, lower / others, 1)

    def draw(self, outcomes: Outcomes, path: Path) -> None:
        figure, every_axes = panels(len(SHOWN))
        for axes, rate in zip(every_axes, SHOWN, strict=True):
            samples = [sample for _, sample in _row(outcomes, rate)]
            for style, column in enumerate(COLUMNS):
                draw_line(axes, column.line(column.title[:-3], RESERVED, samples, style))
            finish(axes, "reserved slots c", "s", f"{rate:g} requests/s")
            axes.set_ylim(0, _TOP_S)
        legend(every_axes[0])
        conditions = f"mean of {DEPLOYMENTS} deployments, {REQUESTS:,} requests each"
        save(figure, path, conditions)
        figure, (axes,) = panels(1)
        for style, (name, metric) in enumerate(_CHOOSERS.items()):
            places = [[RESERVED[at] for at in chosen(outcomes, rate, metric)] for rate in RATES]
            draw_line(axes, Line(name, RATES, [estimate(each) for each in places], style=style))
        finish(axes, "requests/s", "c at the least value")
        axes.set_xscale("log")
        legend(axes)
        save(figure, path.with_name(CHOICE_PICTURE), conditions)

    def words(self, outcomes: Outcomes) -> str:
        return (
            f"[Which c is best by the rate]({CHOICE_PICTURE}): means over the deployments. c K "
            "counts where the chains are enough at a load of 0.7, as equation (14) has it. At low "
            "rates it reserves too little, as the paper finds; at high ones, where few c have "
            "enough chains, too much. So does the upper bound in between: it is least where a "
            "single chain is left."
        )
