"""Chains under a real trace, which is burstier than the theory assumes: Table 1 of the paper.

The paper is "Serving Chain-structured Jobs with Large Memory Footprints", section 4.2. It measured
PETALS itself on slices of three GPUs; this study does not.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from loadgen.chains.chains_config import Blocks, ChainsOptions
from loadgen.chains.work import Arrivals, Service
from loadgen.figures.chain_cases import RESPONSE, SERVICE, TAIL, WAITING, ChainCase
from loadgen.figures.fingerprints import CHAIN_FOLDERS
from loadgen.figures.samples import Claim, Outcomes, at_most
from loadgen.figures.study import Study
from loadgen.figures.tables import Column, Table, metric_table

_SEEDS = 10
_TRACED = ChainsOptions(arrivals=Arrivals.TRACE, service=Service.TRACE)
_SETTINGS: Mapping[str, ChainsOptions] = MappingProxyType(
    {
        "BLOOM-176B, 20 servers, 0.2/s": replace(_TRACED, rate=0.2),
        "BLOOM-176B, 20 servers, 0.4/s": replace(_TRACED, rate=0.4),
        "Llama-2-7B, 9 servers, 2.5/s": replace(_TRACED, scenario="llama2-7b", rate=2.5),
        "Llama-2-7B, 9 servers, 40/s": replace(_TRACED, scenario="llama2-7b", rate=40.0),
    }
)
_WAYS: Mapping[str, Blocks] = MappingProxyType(
    {
        "gbp_cr, gca, jffc": Blocks.GBP_CR,
        "whole model, jffc": Blocks.WHOLE,
        "petals": Blocks.PETALS,
        "bprr": Blocks.BPRR,
    }
)
_OURS, _WHOLE = tuple(_WAYS)[:2]
COLUMNS = (
    Column("response mean, s", RESPONSE),
    Column("p99, s", TAIL, 1.0, 1),
    Column("waiting mean, s", WAITING),
    Column("service mean, s", SERVICE),
    Column("slots kept, c", "reserved_slots", 1.0, 1),
)


def _ways(setting: str) -> list[str]:
    """Ways to serve a setting; no server holds BLOOM-176B whole."""
    return [way for way in _WAYS if way != _WHOLE or setting.startswith("Llama")]


class ChainTraceStudy(Study):
    title = "Chains: a trace's arrivals and lengths (Table 1 of the paper on chains)"
    conditions = (
        "Gaps between requests and their lengths are those of the Azure conversation trace, from a "
        "row drawn at random on; gaps are stretched to the rate, and work is what a request of "
        f"these lengths takes, with mean 1. {_SEEDS} deployments, 18,000 requests each after 2,000 "
        "that are left out. BLOOM-176B as in the studies before; Llama-2-7B in 16 bits on three "
        "fast and six slow servers. Blocks are placed for the rate as if arrivals were Poisson."
    )
    code = CHAIN_FOLDERS

    def cases(self) -> Iterator[ChainCase]:
        for setting, options in _SETTINGS.items():
            for way in _ways(setting):
                placed = replace(options, placement=_WAYS[way])
                yield ChainCase((setting, way), placed, seeds=_SEEDS)

    def tables(self, outcomes: Outcomes) -> list[Table]:
        rows = {name: [(way, outcomes[name, way]) for way in _ways(name)] for name in _SETTINGS}
        return [metric_table(name, "", samples, COLUMNS) for name, samples in rows.items()]

    def claims(self, outcomes: Outcomes) -> Iterator[Claim]:
        for setting in _SETTINGS:
            for way in _ways(setting)[1:]:
                ratio = outcomes[setting, _OURS].ratio(outcomes[setting, way], RESPONSE)
                yield at_most(f"{setting}: mean response time, {_OURS} / {way}", ratio, 1)

    def words(self, outcomes: Outcomes) -> str:
        return (
            "The paper measured PETALS itself, with the code trace of Azure, on slices of three "
            "A100s; here its placements are simulated, with the conversation trace, which is the "
            "one at hand. Where waiting is hundreds of seconds more comes than is completed: the "
            "figure grows with the number of requests."
        )
