"""Policies on given chains: Figure 5 of the paper on chains.

The paper is "Serving Chain-structured Jobs with Large Memory Footprints", section 4.1.2. Its other
policies have a queue per chain; two of them are also shown with one queue for all.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import MappingProxyType

from loadgen.chains.chains_config import ChainsOptions
from loadgen.figures.chain_cases import DEPLOYMENTS, LOWER, RESPONSE, SERVICE, UPPER, ChainCase
from loadgen.figures.fingerprints import CHAIN_FOLDERS
from loadgen.figures.samples import Claim, Outcomes, at_least, at_most
from loadgen.figures.study import Study
from loadgen.figures.tables import Column, Table, metric_table
from loadgen.report.charts import draw_line, finish, legend, panels, save
from loadgen.report.intervals import Estimate, estimate
from router.core.types import Dispatch

JFFC = "jffc"
_WAYS: Mapping[str, tuple[str, Dispatch]] = MappingProxyType(
    {
        JFFC: (JFFC, Dispatch.POOL),
        "sed": ("sed", Dispatch.INSTANT),
        "sa_jsq": ("sa_jsq", Dispatch.INSTANT),
        "jsq": ("jsq", Dispatch.INSTANT),
        "jiq": ("jiq", Dispatch.INSTANT),
        "jsq, one queue": ("jsq", Dispatch.POOL),
    }
)
LOADS = (10, 20, 30, 40, 50, 60, 70, 80, 90)
_RATE = 1.0  # requests/s that blocks are placed for; gives several chains, unlike the paper's 0.2
_REQUESTS = 10_000
_BOUNDS = (
    Column("jffc, s", RESPONSE),
    Column("of it in service, s", SERVICE),
    Column("lower bound, s", LOWER),
    Column("upper bound, s", UPPER),
)


def beside(outcomes: Outcomes, load: int, way: str, metric: str = RESPONSE) -> Estimate:
    """Ratio of jffc's mean response time to a metric of a way, paired by deployment."""
    ours, other = (outcomes[f"{load} %", each] for each in (JFFC, way))
    pairs = zip(ours.each(RESPONSE), other.each(metric), strict=True)
    return estimate([a / b for a, b in pairs])


class ChainPoliciesStudy(Study):
    title = "Chains: who gets a request (Figure 5 of the paper on chains)"
    conditions = (
        "BLOOM-176B on 20 servers, blocks placed for 1 request/s with c by the lower bound, cache "
        "by gca: the same chains for every policy; requests come at a share of what these "
        "complete. jffc has one queue for all, the others one for each chain but where said. "
        f"Poisson arrivals, exponential work, the same for all policies; {DEPLOYMENTS} "
        f"deployments, {_REQUESTS * 9 // 10:,} requests each after {_REQUESTS // 10:,} that are "
        "left out."
    )
    code = CHAIN_FOLDERS

    def cases(self) -> Iterator[ChainCase]:
        common = ChainsOptions(rate=_RATE, requests=_REQUESTS, warmup=_REQUESTS // 10)
        for load, (way, (policy, dispatch)) in product(LOADS, _WAYS.items()):
            options = replace(common, policy=policy, load=load / 100, dispatch=dispatch)
            yield ChainCase((f"{load} %", way), options)

    def tables(self, outcomes: Outcomes) -> list[Table]:
        loads = [f"{load} %" for load in LOADS]
        rows = [[load, *(_BOUNDS[0].cell(outcomes[load, way]) for way in _WAYS)] for load in loads]
        title = "Mean response time by the load, s"
        alone = [(load, outcomes[load, JFFC]) for load in loads]
        bounds = metric_table("jffc between the bounds", "load", alone, _BOUNDS)
        return [Table(["load", *_WAYS], rows, title), bounds]

    def claims(self, outcomes: Outcomes) -> Iterator[Claim]:
        for load in LOADS:
            others = {way: beside(outcomes, load, way) for way in _WAYS if way != JFFC}
            best, found = max(others.items(), key=lambda each: each[1].mean)
            text = f"load {load} %: mean response time, jffc / the best of the others"
            yield at_most(text, found.mean, 1.01, f"{best}; ± {found.half_width or 0:.3f}")
        low = [beside(outcomes, load, JFFC, LOWER) for load in LOADS]
        ends = [found.mean + (found.half_width or 0) for found in low]
        text = "all loads: jffc / its lower bound, least upper end of the intervals"
        yield at_least(text, min(ends), 1)
        high = [beside(outcomes, load, JFFC, UPPER) for load in LOADS]
        ends = [found.mean - (found.half_width or 0) for found in high]
        text = "all loads: jffc / its upper bound, largest lower end of the intervals"
        yield at_most(text, max(ends), 1)

    def draw(self, outcomes: Outcomes, path: Path) -> None:
        figure, (left, right) = panels(2)
        for style, way in enumerate(_WAYS):
            samples = [outcomes[f"{load} %", way] for load in LOADS]
            draw_line(left, _BOUNDS[0].line(way, LOADS, samples, style))
        samples = [outcomes[f"{load} %", JFFC] for load in LOADS]
        for style, column in enumerate(_BOUNDS):
            name = column.title.removesuffix(", s")
            draw_line(right, column.line(name, LOADS, samples, style))
        for axes, title in ((left, "policies"), (right, "jffc and its bounds")):
            finish(axes, "load, %", "mean response time, s", title)
            legend(axes)
        placed = f"blocks placed for {_RATE:g}/s, mean of {DEPLOYMENTS} deployments"
        save(figure, path, f"simulated; {placed}")

    def words(self, outcomes: Outcomes) -> str:
        return (
            "With one queue for all, sed and sa_jsq choose as jffc does: the fastest with a free "
            "slot."
        )
