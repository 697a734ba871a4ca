"""Steps that cost more than the KV tokens read.

What gain remains when each running request adds a cost of its own (t_r) to a step; what bfio makes
of prompts that the decode workers compute, and what it loses unaware of them.

A computed prompt token costs as much time as beta KV tokens read. For a dense model of 8e9
parameters it takes 2 * 8e9 FLOP, which is 103 us at half of an A100's 312 TFLOP/s. Reading a KV
token takes 0.095 us (t_l of these studies, fitted to such a model on an A100), so beta is about
1,000. beta = 100 stands for prompts with nine tenths in the prefix cache.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from loadgen.figures.cases import Case
from loadgen.figures.samples import Claim, Outcomes, at_least
from loadgen.figures.study import COMPUTING, NONE, ORACLE, TRACE_NAMES, Study, options_of
from loadgen.figures.tables import IMBALANCE, THROUGHPUT, TPOT, TTFT, Table
from router.core.step_time import PAPER_STEP_TIME

REQUEST_TOKENS = 800
FITTED = replace(PAPER_STEP_TIME, per_request_s=REQUEST_TOKENS * PAPER_STEP_TIME.per_token_s)
_WAYS = ("fcfs", NONE, ORACLE)
_COSTS: Mapping[str, Mapping[str, Any]] = {
    "t_r = 0": {},
    "t_r fitted": {"step_time": str(FITTED)},
}
NOT_KNOWING = f"{NONE}, not knowing t_r"


def _rows(cost: str) -> list[str]:
    return [*_WAYS, NOT_KNOWING] if _COSTS[cost] else list(_WAYS)


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
        for trace, (cost, changes) in product(TRACE_NAMES, _COSTS.items()):
            for way in _rows(cost):
                unaware = way == NOT_KNOWING
                run = options_of(trace, NONE if unaware else way, **changes)
                yield Case((trace, cost, way), run, unaware=unaware)

    def tables(self, outcomes: Outcomes) -> list[Table]:
        columns = (THROUGHPUT, TPOT, IMBALANCE)
        rows = []
        for (trace, name), cost in product(TRACE_NAMES.items(), _COSTS):
            for way in _rows(cost):
                cells = [column.cell(outcomes[trace, cost, way]) for column in columns]
                over = gain(outcomes, trace, cost, way)
                rows.append([f"{name}, {cost}, {way}", *cells, f"{over:+.1%}"])
        titles = [column.title for column in columns]
        return [Table(["", *titles, "throughput over fcfs"], rows)]


BETAS = (100.0, 1000.0)
CHUNK = 512
SEEDS = 3
SERVED = "bfio, serve's defaults"
UNAWARE = f"{NONE}, unaware of prompts"
# Throughput of serve's defaults over that of fcfs.
GAINS: Mapping[float, float] = {100.0: 1.2, 1000.0: 1.4}
_STEPS = 2000
_ROWS: Mapping[str, Mapping[str, Any]] = {
    "fcfs": {"policy": "fcfs"},
    SERVED: {"lookahead": "auto", "overcommit": None, "deadline_steps": None},
    NONE: {},
    UNAWARE: {},
}


class PrefillStudy(Study):
    title = "Prefill on the decode workers"
    conditions = (
        f"BurstGPT lengths, G=16, B=72, pool 128, {_STEPS:,} steps without the first 500. A prompt "
        f"token costs beta KV tokens' worth, in chunks of {CHUNK} per request and step; beta = "
        "1,000: 2 x 8e9 FLOP at half of 312 TFLOP/s against 9.5e-8 s per KV token read (a dense 8B "
        "model on an A100); beta = 100: nine tenths of the prompts in the prefix cache. bfio "
        "learns the cost from the steps, unless unaware; serve's defaults: with survival curve, "
        f"starvation after 5 s, over-commit as measured. {SEEDS} seeds. Imbalance: KV tokens alone."
    )
    physics = COMPUTING

    def cases(self) -> Iterator[Case]:
        for beta in BETAS:
            for way, changes in _ROWS.items():
                cost = f"{beta:g},{CHUNK}"
                run = options_of("burstgpt", NONE, steps=_STEPS, prefill_cost=cost, **changes)
                yield Case((f"{beta:g}", way), run, seeds=SEEDS, unaware=way == UNAWARE)

    def tables(self, outcomes: Outcomes) -> list[Table]:
        columns = (THROUGHPUT, TPOT, TTFT, IMBALANCE)
        rows = []
        for beta in BETAS:
            first = outcomes[f"{beta:g}", "fcfs"]
            for way in _ROWS:
                sample = outcomes[f"{beta:g}", way]
                over = sample.ratio(first, THROUGHPUT.metric) - 1
                cells = [column.cell(sample) for column in columns]
                rows.append([f"beta {beta:g}, {way}", *cells, f"{over:+.1%}"])
        return [Table(["", *(column.title for column in columns), "throughput over fcfs"], rows)]

    def claims(self, outcomes: Outcomes) -> Iterator[Claim]:
        for beta, gain in GAINS.items():
            ours, fcfs = outcomes[f"{beta:g}", SERVED], outcomes[f"{beta:g}", "fcfs"]
            ratio = ours.ratio(fcfs, THROUGHPUT.metric)
            yield at_least(f"beta {beta:g}, {SERVED}: throughput over fcfs", ratio, gain)
