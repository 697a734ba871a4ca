"""Cost of a deadline: no request waits for longer than W steps."""

from collections.abc import Iterator

from loadgen.figures.cases import Case
from loadgen.figures.claims import Claim, at_most
from loadgen.figures.laboratory import Laboratory
from loadgen.figures.samples import Outcomes
from loadgen.figures.study import NONE, ORACLE, TRACE_NAMES, Study, config
from loadgen.figures.tables import IMBALANCE, LONGEST_WAIT, PROMPT, THROUGHPUT, Table, metric_table

DEADLINES = (0, 200, 100)
_CLAIMED = 200
LONGEST = 210
RATIOS = {NONE: 1.2, ORACLE: 1.5}


class DeadlinesStudy(Study):
    title = "Deadlines"
    conditions = "As Table 1; a request that has waited W steps takes the next free slot."

    def measure(self, laboratory: Laboratory) -> Outcomes:
        return laboratory.run(
            [
                Case((trace, way, str(steps)), config(trace, way, deadline_steps=steps))
                for trace in TRACE_NAMES
                for way in RATIOS
                for steps in DEADLINES
            ]
        )

    def tables(self, outcomes: Outcomes) -> list[Table]:
        return [
            metric_table(
                name,
                "policy, deadline",
                [
                    (
                        f"{way}, {f'W={steps}' if steps else 'none'}",
                        outcomes[trace, way, str(steps)],
                    )
                    for way in RATIOS
                    for steps in DEADLINES
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
                yield at_most(
                    f"{text}: longest wait, steps", max(held.each(LONGEST_WAIT.metric)), LONGEST
                )
                ratio = held.ratio(free, IMBALANCE.metric)
                yield at_most(f"{text}: imbalance / without deadline", ratio, bound)
