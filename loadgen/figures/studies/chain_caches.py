"""Cache allocation for placed blocks: greedy against others, Figure 4 of the paper.

The paper is "Serving Chain-structured Jobs with Large Memory Footprints", section 4.1.2.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from loadgen.figures.chain_cases import DEPLOYMENTS, Computed, deployment, worst_ratio
from loadgen.figures.fingerprints import CHAIN_FOLDERS
from loadgen.figures.samples import Claim, Outcomes, Sample, at_most
from loadgen.figures.study import Study
from loadgen.figures.tables import Column, Table, metric_table
from loadgen.report.charts import draw_line, finish, legend, panels, save
from router.core.placement.gbp_cr import gbp_cr
from router.core.placement.gca import gca
from router.core.placement.model import Chain, total_rate

SERVERS, RESERVED = 40, 4
SHARES = (10, 20, 30, 40, 50, 60, 70, 80, 90)
LIGHT = 30
GREEDY, OPTIMAL, LEAST = "gca", "ilp", "lower_bound"
_DISJOINT = "disjoint"
COLUMNS = (
    Column("disjoint, c slots each", _DISJOINT, 1.0, 1),
    Column("gca", GREEDY, 1.0, 1),
    Column("ILP over gca's chains", OPTIMAL, 1.0, 1),
    Column("lower bound", LEAST, 1.0, 1),
)


def allocated(seed: int, share: int) -> dict[str, float | None]:
    """Job servers (slots of chains) that complete a rate together; None where none suffice.

    ``share``: the rate, in percent of what all chains of GCA complete.
    """
    model, servers = deployment(seed, servers=SERVERS)
    from loadgen.chains.ilp import fewest_slots  # Needs HiGHS, as nothing else here.

    grouping = gbp_cr(model, servers, RESERVED, math.inf)
    chains = gca(grouping.placement)
    needed = share / 100 * total_rate(chains)
    disjoint = grouping.chains
    return {
        _DISJOINT: job_servers(disjoint, [RESERVED] * len(disjoint), needed),
        GREEDY: job_servers(chains, [chain.slots for chain in chains], needed),
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


def _named(outcomes: Outcomes) -> list[tuple[str, Sample]]:
    return [(f"{share} %", outcomes[(f"{share} %",)]) for share in SHARES]


class ChainCachesStudy(Study):
    title = "Chains: who gets the cache (Figure 4 of the paper on chains)"
    conditions = (
        f"BLOOM-176B on {SERVERS} servers, all of them chained by gbp_cr with c={RESERVED}. Job "
        "servers: slots of chains. Needed are so many, the fastest first, as complete the rate "
        "together, which is a share of what all chains of gca complete; the lower bound takes all "
        f"to be as fast as the fastest. Computed, not simulated; {DEPLOYMENTS} deployments. A "
        "dash: all of them are too few on every deployment."
    )
    code = CHAIN_FOLDERS

    def cases(self) -> Iterator[Computed]:
        metrics = tuple(column.metric for column in COLUMNS)
        for share in SHARES:
            yield Computed((f"{share} %",), allocated, metrics, {"share": share})

    def tables(self, outcomes: Outcomes) -> list[Table]:
        return [metric_table("Job servers needed", "rate needed", _named(outcomes), COLUMNS)]

    def claims(self, outcomes: Outcomes) -> Iterator[Claim]:
        samples = dict(zip(SHARES, (sample for _, sample in _named(outcomes)), strict=True))
        ratio = max(worst_ratio(each, GREEDY, _DISJOINT) for each in samples.values())
        text = "all rates: job servers, gca / disjoint with c slots, worst deployment"
        yield at_most(text, ratio, 1)
        light = [sample for share, sample in samples.items() if share <= LIGHT]
        ratio = max(worst_ratio(each, GREEDY, OPTIMAL) for each in light)
        yield at_most(f"rates to {LIGHT} %: job servers, gca / ILP, worst deployment", ratio, 1)

    def draw(self, outcomes: Outcomes, path: Path) -> None:
        figure, (axes,) = panels(1)
        samples = [sample for _, sample in _named(outcomes)]
        for style, column in enumerate(COLUMNS):
            draw_line(axes, column.line(column.title, SHARES, samples, style))
        finish(axes, "rate needed, % of what gca's chains complete", "job servers")
        legend(axes)
        save(figure, path, f"J={SERVERS}, c={RESERVED}; mean of {DEPLOYMENTS} deployments")
