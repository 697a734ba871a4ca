"""Placement of blocks: greedy against random, Figure 3 of the paper on chains.

The paper is "Serving Chain-structured Jobs with Large Memory Footprints", section 4.1.2.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np

from loadgen.figures.chain_cases import DEPLOYMENTS, Computed, deployment, worst_ratio
from loadgen.figures.fingerprints import CHAIN_FOLDERS
from loadgen.figures.samples import Claim, Outcomes, Sample, at_most
from loadgen.figures.study import Study
from loadgen.figures.tables import Column, Table, metric_table
from loadgen.report.charts import COLOURS, finish, legend, panels, save
from router.core.placement.gbp_cr import Fleet, gbp_cr, rooms

EQUAL, UNEQUAL = "equal memory", "unequal memory"
SERVERS = 100
RESERVED = (1, 3, 5, 10, 20, 30)
_RANDOM = 1000
_SHARE, _LOAD = 0.5, 0.7
_FIVE = ("least", "lower_quartile", "median", "upper_quartile", "most")
_MARKS = ("whislo", "q1", "med", "q3", "whishi")  # of these in matplotlib's boxes
GREEDY, BEATEN, TIED = "gbp_cr", "share_beating_gbp_cr", "share_as_good"
_METRICS = (GREEDY, *_FIVE, BEATEN, TIED, "share_feasible")
COLUMNS = (
    Column("gbp_cr", GREEDY),
    Column("best of the random", "least"),
    Column("median", "median"),
    Column("worst", "most"),
    Column("as good as gbp_cr, %", TIED, 0.01, 1),
    Column("better, %", BEATEN, 0.01, 1),
)


def _named(outcomes: Outcomes, memory: str) -> list[tuple[str, Sample]]:
    return [(f"c={reserved}", outcomes[memory, f"c={reserved}"]) for reserved in RESERVED]


def compared(seed: int, memory: str, reserved: int) -> dict[str, float]:
    """Job servers c K over the arrival rate in requests/s, for GBP-CR and random placements.

    ``EQUAL`` gives every server the memory of the larger ones; ``reserved`` is c.
    """
    model, servers = deployment(seed, servers=SERVERS)
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
    orders = (generator.permutation(SERVERS).tolist() for _ in range(_RANDOM))
    counts = [_chains_needed(order, blocks, times_s, model.blocks, needed) for order in orders]
    found = [count for count in counts if count is not None]
    scale = reserved / rate
    five = np.percentile(found, (0, 25, 50, 75, 100)) * scale if found else [np.nan] * len(_FIVE)
    return {
        GREEDY: ours * scale,
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
        f"BLOOM-176B on {SERVERS} servers, a fifth of them fast (120 TFLOPS, 1.02 TB/s, 40 GB; the "
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
        return [
            metric_table(
                f"Job servers / arrival rate, s: {memory}", "c", _named(outcomes, memory), COLUMNS
            )
            for memory in (EQUAL, UNEQUAL)
        ]

    def claims(self, outcomes: Outcomes) -> Iterator[Claim]:
        for memory in (EQUAL, UNEQUAL):
            ratios = [worst_ratio(each, GREEDY, "least") for _, each in _named(outcomes, memory)]
            text = f"gbp_cr / best of {_RANDOM:,} random placements, worst c and deployment"
            yield at_most(f"{memory}: {text}", max(ratios), 1)

    def draw(self, outcomes: Outcomes, path: Path) -> None:
        figure, every_axes = panels(2)
        for axes, memory in zip(every_axes, (EQUAL, UNEQUAL), strict=True):
            samples = [sample for _, sample in _named(outcomes, memory)]
            boxes = [
                {mark: sample.mean(metric) for mark, metric in zip(_MARKS, _FIVE, strict=True)}
                for sample in samples
            ]
            places = range(len(samples))
            axes.bxp(boxes, positions=places, showfliers=False, widths=0.5)
            ours = [sample.mean(GREEDY) for sample in samples]
            axes.plot(places, ours, "D", color=COLOURS[1], label="gbp_cr")
            axes.set_xticks(places, [str(reserved) for reserved in RESERVED])
            finish(axes, "reserved slots c", "job servers / arrival rate, s", memory)
        legend(every_axes[0])
        save(figure, path, f"{_RANDOM:,} random placements; mean of {DEPLOYMENTS} deployments")
