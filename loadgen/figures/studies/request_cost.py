"""Remaining gain when each running request adds a cost of its own (t_r) to a step."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from loadgen.figures.cases import Case
from loadgen.figures.samples import Outcomes
from loadgen.figures.study import NONE, ORACLE, TRACE_NAMES, Study, config
from loadgen.figures.tables import IMBALANCE, THROUGHPUT, TPOT, Table
from router.core.forecast.forecast import WorkProfile
from router.core.step_time import PAPER_STEP_TIME

REQUEST_TOKENS = 800
FITTED = replace(PAPER_STEP_TIME, per_request_s=REQUEST_TOKENS * PAPER_STEP_TIME.per_token_s)
_WAYS = ("fcfs", NONE, ORACLE)
_COSTS = {"t_r = 0": PAPER_STEP_TIME, "t_r fitted": FITTED}
UNAWARE = f"{NONE}, not knowing t_r"


def _rows(cost: str) -> list[str]:
    return [*_WAYS, UNAWARE] if _COSTS[cost] is FITTED else list(_WAYS)


def gain(outcomes: Outcomes, trace: str, cost: str, way: str) -> float:
    """Relative throughput gain over FCFS at the same cost."""
    first = outcomes[trace, cost, "fcfs"]
    return outcomes[trace, cost, way].ratio(first, THROUGHPUT.metric) - 1


class RequestCostStudy(Study):
    title = "A cost per running request"
    conditions = (
        "As Table 1; t_r fitted: each running request costs as much as 800 KV tokens, as fits to a "
        "dense 8B model show."
    )

    def cases(self) -> Iterator[Case]:
        for trace, (cost, time) in product(TRACE_NAMES, _COSTS.items()):
            runs = {way: config(trace, way, step_time=time) for way in _WAYS}
            runs[UNAWARE] = replace(runs[NONE], known_profile=WorkProfile())
            for way in _rows(cost):
                yield Case((trace, cost, way), runs[way])

    def tables(self, outcomes: Outcomes) -> list[Table]:
        columns = (THROUGHPUT, TPOT, IMBALANCE)
        rows = [
            [
                f"{name}, {cost}, {way}",
                *(column.cell(outcomes[trace, cost, way]) for column in columns),
                f"{gain(outcomes, trace, cost, way):+.1%}",
            ]
            for trace, name in TRACE_NAMES.items()
            for cost in _COSTS
            for way in _rows(cost)
        ]
        titles = [column.title for column in columns]
        return [Table(["", *titles, "throughput over fcfs"], rows)]
