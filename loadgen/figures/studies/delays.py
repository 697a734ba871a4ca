"""Cost of delays.

Of a deadline, by which no request waits for longer than W steps; and between decision and engine,
with how much over-commit recovers.
"""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

from loadgen.figures.cases import Case
from loadgen.figures.samples import Claim, Outcomes, at_most
from loadgen.figures.study import NONE, ORACLE, TRACE_NAMES, Study, options_of, trace_tables
from loadgen.figures.tables import (
    BUBBLE,
    IMBALANCE,
    LONGEST_WAIT,
    PROMPT,
    THROUGHPUT,
    TPOT,
    Table,
)
from loadgen.report.charts import draw_line, finish, legend, panels, save

DEADLINES = {0: "none", 200: "W=200", 100: "W=100"}
_CLAIMED = 200
LONGEST = 210
RATIOS = {NONE: 1.2, ORACLE: 1.5}


class DeadlinesStudy(Study):
    title = "Deadlines"
    conditions = "As Table 1; a request that has waited W steps takes the next free slot."

    def cases(self) -> Iterator[Case]:
        for trace, way, steps in product(TRACE_NAMES, RATIOS, DEADLINES):
            yield Case((trace, way, str(steps)), options_of(trace, way, deadline_steps=steps))

    def tables(self, outcomes: Outcomes) -> list[Table]:
        rows = {
            f"{way}, {shown}": (way, str(steps))
            for way, (steps, shown) in product(RATIOS, DEADLINES.items())
        }
        columns = (IMBALANCE, THROUGHPUT, LONGEST_WAIT, PROMPT)
        return trace_tables(outcomes, "policy, deadline", rows, columns)

    def claims(self, outcomes: Outcomes) -> Iterator[Claim]:
        for trace, name in TRACE_NAMES.items():
            for way, bound in RATIOS.items():
                free, held = outcomes[trace, way, "0"], outcomes[trace, way, str(_CLAIMED)]
                text = f"{name}, {way}, W={_CLAIMED}"
                longest = max(held.each(LONGEST_WAIT.metric))
                yield at_most(f"{text}: longest wait, steps", longest, LONGEST)
                ratio = held.ratio(free, IMBALANCE.metric)
                yield at_most(f"{text}: imbalance / without deadline", ratio, bound)


DELAYS = (0, 1, 2, 4)
OVERCOMMITS = (0, 1, 2)
_STEPS = 2000


class DispatchStudy(Study):
    title = "Dispatch delay and over-commit"
    conditions = (
        f"bfio without look-ahead, G=16, B=72, pool 128, {_STEPS:,} steps without the first 500. "
        "Over-commit: so many requests more than slots may be sent to each worker."
    )

    def cases(self) -> Iterator[Case]:
        for trace, delay, more in product(TRACE_NAMES, DELAYS, OVERCOMMITS):
            run = options_of(trace, NONE, dispatch_delay=delay, overcommit=more, steps=_STEPS)
            yield Case((trace, str(delay), str(more)), run)

    def tables(self, outcomes: Outcomes) -> list[Table]:
        rows = {
            f"{delay} steps, {more}": (str(delay), str(more))
            for delay, more in product(DELAYS, OVERCOMMITS)
        }
        columns = (IMBALANCE, THROUGHPUT, TPOT, BUBBLE)
        return trace_tables(outcomes, "delay, over-commit", rows, columns)

    def draw(self, outcomes: Outcomes, path: Path) -> None:
        figure, every_axes = panels(2, rows=2, height=3.4)
        for column, (trace, name) in enumerate(TRACE_NAMES.items()):
            for row, metric in enumerate((IMBALANCE, THROUGHPUT)):
                axes = every_axes[2 * row + column]
                for style, more in enumerate(OVERCOMMITS):
                    samples = [outcomes[trace, str(delay), str(more)] for delay in DELAYS]
                    draw_line(axes, metric.line(f"over-commit {more}", DELAYS, samples, style))
                finish(axes, "dispatch delay, steps", metric.title, name)
                axes.set_xticks(DELAYS)
        legend(every_axes[0])
        save(figure, path, f"simulated; bfio without look-ahead, G=16, B=72, {_STEPS:,} steps")
