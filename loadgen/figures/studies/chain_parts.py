"""Chains, part by part: where blocks lie, who gets the cache, how many slots to reserve.

Figures 3, 4, 6 and 7 of "Serving Chain-structured Jobs with Large Memory Footprints", section
4.1.2, each with one part against others.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean, median_low

import numpy as np

from loadgen.chains.chain_simulation import simulate_chains
from loadgen.chains.work import draw_work
from loadgen.figures.chain_cases import (
    DEPLOYMENTS,
    LOWER,
    RESPONSE,
    UPPER,
    Computed,
    deployment,
    worst_ratio,
)
from loadgen.figures.fingerprints import CHAIN_FOLDERS
from loadgen.figures.samples import Claim, Outcomes, Sample, at_most
from loadgen.figures.study import Study
from loadgen.figures.tables import Column, Table, metric_table, shown
from loadgen.report.charts import COLOURS, Line, draw_line, finish, legend, panels, save
from loadgen.report.intervals import estimate
from router.core.placement.bounds import chain_bounds
from router.core.placement.gbp_cr import Fleet, gbp_cr, rooms
from router.core.placement.gca import gca
from router.core.placement.model import Chain, total_rate

EQUAL, UNEQUAL = "equal memory", "unequal memory"
_MANY = 100
RESERVED = (1, 3, 5, 10, 20, 30)
_RANDOM = 1000
_SHARE, _LOAD = 0.5, 0.7
_FIVE = ("least", "lower_quartile", "median", "upper_quartile", "most")
_MARKS = ("whislo", "q1", "med", "q3", "whishi")  # of these in matplotlib's boxes
GBP_CR, BEATEN, TIED = "gbp_cr", "share_beating_gbp_cr", "share_as_good"
_METRICS = (GBP_CR, *_FIVE, BEATEN, TIED, "share_feasible")
_PLACED = (
    Column("gbp_cr", GBP_CR),
    Column("best of the random", "least"),
    Column("median", "median"),
    Column("worst", "most"),
    Column("as good as gbp_cr, %", TIED, 0.01, 1),
    Column("better, %", BEATEN, 0.01, 1),
)


def _by_c(outcomes: Outcomes, memory: str) -> list[tuple[str, Sample]]:
    return [(f"c={reserved}", outcomes[memory, f"c={reserved}"]) for reserved in RESERVED]


def compared(seed: int, memory: str, reserved: int) -> dict[str, float]:
    """Job servers c K over the arrival rate in requests/s, for GBP-CR and random placements.

    ``EQUAL`` gives every server the memory of the larger ones; ``reserved`` is c.
    """
    model, servers = deployment(seed, servers=_MANY)
    if memory == EQUAL:
        most = max(server.memory_bytes for server in servers)
        servers = [replace(server, memory_bytes=most) for server in servers]
    blocks = rooms(model, Fleet.of(servers), reserved).tolist()
    times_s = [server.time_s(held) for server, held in zip(servers, blocks, strict=True)]
    whole = gbp_cr(model, servers, reserved, float("inf")).chains
    needed = _SHARE * sum(chain.service_rate for chain in whole)
    rate = needed * _LOAD * reserved
    ours = len(gbp_cr(model, servers, reserved, rate, _LOAD).chains)
    generator = np.random.default_rng(seed)
    orders = (generator.permutation(_MANY).tolist() for _ in range(_RANDOM))
    counts = [_chains_needed(order, blocks, times_s, model.blocks, needed) for order in orders]
    found = [count for count in counts if count is not None]
    scale = reserved / rate
    five = np.percentile(found, (0, 25, 50, 75, 100)) * scale if found else [np.nan] * len(_FIVE)
    return {
        GBP_CR: ours * scale,
        **{name: float(value) for name, value in zip(_FIVE, five, strict=True)},
        BEATEN: sum(count < ours for count in found) / _RANDOM,
        TIED: sum(count == ours for count in found) / _RANDOM,
        "share_feasible": len(found) / _RANDOM,
    }


def _chains_needed(
    order: Sequence[int], held: Sequence[int], times_s: Sequence[float], length: int, needed: float
) -> int | None:
    """Number of chains, formed in order of servers, with the needed rate; None: never enough."""
    count, rate, blocks, service_s = 0, 0.0, 0, 0.0
    for server in order:
        blocks += held[server]
        service_s += times_s[server]
        if blocks >= length:
            count, rate = count + 1, rate + 1 / service_s
            blocks, service_s = 0, 0.0
            if rate >= needed:
                return count
    return None


class ChainBlocksStudy(Study):
    title = "Chains: where blocks lie (Figure 3 of the paper on chains)"
    conditions = (
        f"BLOOM-176B on {_MANY} servers, a fifth of them fast (120 TFLOPS, 1.02 TB/s, 40 GB; the "
        "others 80, 0.51, 20), round trips by a synthetic law (lognormal, median 20 ms, and 18 ms "
        "more): the paper's are from the RIPE Atlas network. Equal memory: 40 GB each. Each server "
        "holds as many blocks as leave c slots for each of them; a random placement chains servers "
        "in a random order. Chains are counted until they complete half of what all of gbp_cr's "
        f"do. Computed, not simulated; {DEPLOYMENTS} deployments, {_RANDOM:,} placements each."
    )
    code = CHAIN_FOLDERS

    def cases(self) -> Iterator[Computed]:
        for memory, reserved in product((EQUAL, UNEQUAL), RESERVED):
            given = {"memory": memory, "reserved": reserved}
            yield Computed((memory, f"c={reserved}"), compared, _METRICS, given)

    def tables(self, outcomes: Outcomes) -> list[Table]:
        title = "Job servers / arrival rate, s: {}"
        return [
            metric_table(title.format(memory), "c", _by_c(outcomes, memory), _PLACED)
            for memory in (EQUAL, UNEQUAL)
        ]

    def claims(self, outcomes: Outcomes) -> Iterator[Claim]:
        for memory in (EQUAL, UNEQUAL):
            ratios = [worst_ratio(each, GBP_CR, "least") for _, each in _by_c(outcomes, memory)]
            text = f"gbp_cr / best of {_RANDOM:,} random placements, worst c and deployment"
            yield at_most(f"{memory}: {text}", max(ratios), 1)

    def draw(self, outcomes: Outcomes, path: Path) -> None:
        figure, every_axes = panels(2)
        for axes, memory in zip(every_axes, (EQUAL, UNEQUAL), strict=True):
            samples = [sample for _, sample in _by_c(outcomes, memory)]
            boxes = [
                {mark: sample.mean(metric) for mark, metric in zip(_MARKS, _FIVE, strict=True)}
                for sample in samples
            ]
            places = range(len(samples))
            axes.bxp(boxes, positions=places, showfliers=False, widths=0.5)
            ours = [sample.mean(GBP_CR) for sample in samples]
            axes.plot(places, ours, "D", color=COLOURS[1], label="gbp_cr")
            axes.set_xticks(places, [str(reserved) for reserved in RESERVED])
            finish(axes, "reserved slots c", "job servers / arrival rate, s", memory)
        legend(every_axes[0])
        save(figure, path, f"{_RANDOM:,} random placements; mean of {DEPLOYMENTS} deployments")


SERVERS, _SLOTS = 40, 4
SHARES = (10, 20, 30, 40, 50, 60, 70, 80, 90)
LIGHT = 30
GCA, OPTIMAL, LEAST = "gca", "ilp", "lower_bound"
_DISJOINT = "disjoint"
_WAYS = (
    Column("disjoint, c slots each", _DISJOINT, 1.0, 1),
    Column("gca", GCA, 1.0, 1),
    Column("ILP over gca's chains", OPTIMAL, 1.0, 1),
    Column("lower bound", LEAST, 1.0, 1),
)


def allocated(seed: int, share: int) -> dict[str, float | None]:
    """Job servers (slots of chains) that complete a rate together; None where none suffice.

    ``share``: the rate, in percent of what all chains of GCA complete.
    """
    model, servers = deployment(seed, servers=SERVERS)
    from loadgen.chains.ilp import fewest_slots  # Needs HiGHS, as nothing else here.

    grouping = gbp_cr(model, servers, _SLOTS, math.inf)
    chains = gca(grouping.placement)
    needed = share / 100 * total_rate(chains)
    disjoint = grouping.chains
    return {
        _DISJOINT: job_servers(disjoint, [_SLOTS] * len(disjoint), needed),
        GCA: job_servers(chains, [chain.slots for chain in chains], needed),
        OPTIMAL: sum(chain.slots for chain in fewest_slots(chains, grouping.placement, needed)),
        LEAST: math.ceil(needed / chains[0].service_rate),
    }


def job_servers(chains: Sequence[Chain], slots: Sequence[int], needed: float) -> int | None:
    """Least number of slots, the fastest chains' first, that complete a rate in requests/s."""
    count, left = 0, needed
    pairs = sorted(zip(chains, slots, strict=True), key=lambda pair: pair[0].service_s)
    for chain, most in pairs:
        here = min(most, math.ceil(left / chain.service_rate - 1e-9))
        count, left = count + here, left - here * chain.service_rate
        if left <= 1e-9 * needed:
            return count
    return None


def _by_share(outcomes: Outcomes) -> list[tuple[str, Sample]]:
    return [(f"{share} %", outcomes[(f"{share} %",)]) for share in SHARES]


class ChainCachesStudy(Study):
    title = "Chains: who gets the cache (Figure 4 of the paper on chains)"
    conditions = (
        f"BLOOM-176B on {SERVERS} servers, all of them chained by gbp_cr with c={_SLOTS}. Job "
        "servers: slots of chains. Needed are so many, the fastest first, as complete the rate "
        "together, which is a share of what all chains of gca complete; the lower bound takes all "
        f"to be as fast as the fastest. Computed, not simulated; {DEPLOYMENTS} deployments. A "
        "dash: all of them are too few on every deployment."
    )
    code = CHAIN_FOLDERS

    def cases(self) -> Iterator[Computed]:
        metrics = tuple(column.metric for column in _WAYS)
        for share in SHARES:
            yield Computed((f"{share} %",), allocated, metrics, {"share": share})

    def tables(self, outcomes: Outcomes) -> list[Table]:
        return [metric_table("Job servers needed", "rate needed", _by_share(outcomes), _WAYS)]

    def claims(self, outcomes: Outcomes) -> Iterator[Claim]:
        samples = dict(zip(SHARES, (sample for _, sample in _by_share(outcomes)), strict=True))
        ratio = max(worst_ratio(each, GCA, _DISJOINT) for each in samples.values())
        text = "all rates: job servers, gca / disjoint with c slots, worst deployment"
        yield at_most(text, ratio, 1)
        light = [sample for share, sample in samples.items() if share <= LIGHT]
        ratio = max(worst_ratio(each, GCA, OPTIMAL) for each in light)
        yield at_most(f"rates to {LIGHT} %: job servers, gca / ILP, worst deployment", ratio, 1)

    def draw(self, outcomes: Outcomes, path: Path) -> None:
        figure, (axes,) = panels(1)
        samples = [sample for _, sample in _by_share(outcomes)]
        for style, column in enumerate(_WAYS):
            draw_line(axes, column.line(column.title, SHARES, samples, style))
        finish(axes, "rate needed, % of what gca's chains complete", "job servers")
        legend(axes)
        save(figure, path, f"J={SERVERS}, c={_SLOTS}; mean of {DEPLOYMENTS} deployments")


RATES = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2)
SHOWN = (0.2, 1.0)
CHOICES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 17, 20, 24, 28, 32, 36, 40)
REQUESTS, WARMUP = 10_000, 1_000
SIMULATED, SURROGATE = RESPONSE, "surrogate_s"
TIMES = (
    Column("simulated, s", SIMULATED),
    Column("lower bound, s", LOWER),
    Column("upper bound, s", UPPER),
    Column("c K / rate, s", SURROGATE),
)
_CHOOSERS: Mapping[str, str] = {
    "simulation": SIMULATED,
    "lower bound": LOWER,
    "upper bound": UPPER,
    "c K": SURROGATE,
}
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
    return [(f"c={c}", outcomes[f"{rate:g}/s", f"c={c}"]) for c in CHOICES]


def chosen(outcomes: Outcomes, rate: float, metric: str) -> list[int]:
    """Values of ``CHOICES`` that minimize a metric, one per deployment; the first of equals."""
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
    further_pictures = (CHOICE_PICTURE,)

    def cases(self) -> Iterator[Computed]:
        metrics = tuple(column.metric for column in TIMES)
        for rate, c in product(RATES, CHOICES):
            given = {"rate": rate, "reserved": c}
            yield Computed((f"{rate:g}/s", f"c={c}"), responded, metrics, given)

    def tables(self, outcomes: Outcomes) -> list[Table]:
        title = "Mean response time by the slots that are reserved, {:g} requests/s"
        shown_rates = [
            metric_table(title.format(rate), "c", _row(outcomes, rate), TIMES) for rate in SHOWN
        ]
        rows = []
        for rate in RATES:
            cells = [f"{rate:g}/s"]
            for metric in _CHOOSERS.values():
                longer = shown(estimate(beside_best(outcomes, rate, metric)), 1.0, 3)
                cells.append(f"{CHOICES[median_low(chosen(outcomes, rate, metric))]} ({longer})")
            rows.append(cells)
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
            for style, column in enumerate(TIMES):
                draw_line(axes, column.line(column.title[:-3], CHOICES, samples, style))
            finish(axes, "reserved slots c", "s", f"{rate:g} requests/s")
            axes.set_ylim(0, _TOP_S)
        legend(every_axes[0])
        conditions = f"mean of {DEPLOYMENTS} deployments, {REQUESTS:,} requests each"
        save(figure, path, conditions)
        figure, (axes,) = panels(1)
        for style, (name, metric) in enumerate(_CHOOSERS.items()):
            places = [[CHOICES[at] for at in chosen(outcomes, rate, metric)] for rate in RATES]
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
