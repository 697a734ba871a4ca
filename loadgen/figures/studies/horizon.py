"""Figure 4 of arXiv 2601.17855: the look-ahead's horizon, with and without discount."""

from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path

from loadgen.figures.cases import Case
from loadgen.figures.samples import Outcomes
from loadgen.figures.study import ORACLE, PLAIN, TRACE_NAMES, Study, config
from loadgen.figures.tables import IMBALANCE, THROUGHPUT, Table, metric_table
from loadgen.report.charts import draw_line, finish, legend, panels, save

HORIZONS = (0, 4, 8, 12, 20, 40, 100)
_KINDS: Mapping[str, Mapping[str, float]] = {"plain": PLAIN, "discounted": {}}
_STEPS = 1500


def best(outcomes: Outcomes, trace: str, kind: str) -> tuple[int, float]:
    """The horizon with the least imbalance, and that imbalance in tokens."""
    found = {h: outcomes[trace, kind, str(h)].mean(IMBALANCE.metric) for h in HORIZONS}
    horizon = min(found, key=found.__getitem__)
    return horizon, found[horizon]


class HorizonStudy(Study):
    title = "Look-ahead (Figure 4)"
    conditions = (
        f"G=16, B=72, pool 128, oracle of ends, {_STEPS:,} steps without the first 500. Plain: the "
        "paper's objective with ties broken evenly; discounted: gamma, mu and lead by the rule."
    )

    def cases(self) -> Iterator[Case]:
        for trace, (kind, changes), h in product(TRACE_NAMES, _KINDS.items(), HORIZONS):
            run = config(trace, ORACLE, horizon=h, steps=_STEPS, **changes)
            yield Case((trace, kind, str(h)), run)

    def tables(self, outcomes: Outcomes) -> list[Table]:
        return [
            metric_table(
                name,
                "program, H",
                [
                    (f"{kind}, H={h}", outcomes[trace, kind, str(h)])
                    for kind, h in product(_KINDS, HORIZONS)
                ],
                (IMBALANCE, THROUGHPUT),
            )
            for trace, name in TRACE_NAMES.items()
        ]

    def draw(self, outcomes: Outcomes, path: Path) -> None:
        figure, every_axes = panels(2)
        for axes, (trace, name) in zip(every_axes, TRACE_NAMES.items(), strict=True):
            for style, kind in enumerate(_KINDS, 1):
                samples = [outcomes[trace, kind, str(horizon)] for horizon in HORIZONS]
                draw_line(axes, IMBALANCE.line(kind, HORIZONS, samples, style))
            axes.set_xscale("symlog", linthresh=2)
            axes.set_xticks(HORIZONS, [str(horizon) for horizon in HORIZONS])
            axes.set_yscale("log")
            finish(axes, "look-ahead H, steps", IMBALANCE.title, name)
            legend(axes)
        save(figure, path, f"simulated; G=16, B=72, pool 128, oracle of ends, {_STEPS:,} steps")

    def words(self, outcomes: Outcomes) -> str:
        parts = []
        for trace, name in TRACE_NAMES.items():
            (plain, least), (ours, lower) = (best(outcomes, trace, kind) for kind in _KINDS)
            parts.append(
                f"{name}: best plain H is {plain} ({least / 1e4:.2f}e4), best discounted H {ours} "
                f"({lower / 1e4:.2f}e4)."
            )
        return " ".join(parts)
