"""Cost of a deadline: no request waits for longer than W steps."""

from collections.abc import Iterator
from itertools import product

from loadgen.figures.cases import Case
from loadgen.figures.samples import Claim, Outcomes, at_most
from loadgen.figures.study import NONE, ORACLE, TRACE_NAMES, Study, config
from loadgen.figures.tables import IMBALANCE, LONGEST_WAIT, PROMPT, THROUGHPUT, Table, metric_table

DEADLINES = {0: "none", 200: "W=200", 100: "W=100"}
_CLAIMED = 200
LONGEST = 210
RATIOS = {NONE: 1.2, ORACLE: 1.5}


class DeadlinesStudy(Study):
    title = "Deadlines"
    conditions = "As Table 1; a request that has waited W steps takes the next free slot."

    def cases(self) -> Iterator[Case]:
        for trace, way, steps in product(TRACE_NAMES, RATIOS, DEADLINES):
            yield Case((trace, way, str(steps)), config(trace, way, deadline_steps=steps))

    def tables(self, outcomes: Outcomes) -> list[Table]:
        return [
            metric_table(
                name,
                "policy, deadline",
                [
                    (f"{way}, {shown}", outcomes[trace, way, str(steps)])
                    for way, (steps, shown) in product(RATIOS, DEADLINES.items())
                ],
                (IMBALANCE, THROUGHPUT, LONGEST_WAIT, PROMPT),
            )
            for trace, name in TRACE_NAMES.items()
        ]

    def claims(self, outcomes: Outcomes) -> Iterator[Claim]:
        for trace, name in TRACE_NAMES.items():
            for way, bound in RATIOS.items():
                free, held = outcomes[trace, way, "0"], outcomes[trace, way, str(_CLAIMED)]
                text = f"{name}, {way}, W={_CLAIMED}"
                longest = max(held.each(LONGEST_WAIT.metric))
                yield at_most(f"{text}: longest wait, steps", longest, LONGEST)
                ratio = held.ratio(free, IMBALANCE.metric)
                yield at_most(f"{text}: imbalance / without deadline", ratio, bound)
