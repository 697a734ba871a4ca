"""Cost of a delay between decision and engine, and how much over-commit recovers."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

from loadgen.figures.cases import Case
from loadgen.figures.samples import Outcomes
from loadgen.figures.study import NONE, TRACE_NAMES, Study, config
from loadgen.figures.tables import BUBBLE, IMBALANCE, THROUGHPUT, TPOT, Table, metric_table
from loadgen.report.charts import draw_line, finish, legend, panels, save

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
            run = config(trace, NONE, dispatch_delay=delay, overcommit=more, steps=_STEPS)
            yield Case((trace, str(delay), str(more)), run)

    def tables(self, outcomes: Outcomes) -> list[Table]:
        return [
            metric_table(
                name,
                "delay, over-commit",
                [
                    (f"{delay} steps, {more}", outcomes[trace, str(delay), str(more)])
                    for delay, more in product(DELAYS, OVERCOMMITS)
                ],
                (IMBALANCE, THROUGHPUT, TPOT, BUBBLE),
            )
            for trace, name in TRACE_NAMES.items()
        ]

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
