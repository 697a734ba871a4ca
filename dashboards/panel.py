"""Contents of a dashboard: rows of panels, and PromQL queries of their metrics.

Nothing here depends on Grafana's JSON; ``dashboards/grafana.py`` writes it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

GROUP = 'group=~"$group"'
WORKER = GROUP + ',worker=~"$worker"'
WORKER_LEGEND = "{{worker}} (rank {{rank}})"
ENGINE_LEGEND = "{{instance}} engine {{engine}}"

# Units by their names in Grafana; short: a plain number.
Unit = Literal[
    "short", "s", "percentunit", "bytes", "binBps", "reqps", "ops", "watt", "joule", "bool_on_off"
]
Kind = Literal["lines", "stacked", "stat"]


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression with the legend of its series; labels stand in double braces."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture."""

    title: str  # quantity, with its unit where Grafana has no name for it
    description: str  # meaning and advice, for a first-time reader
    unit: Unit
    queries: Sequence[Query]
    kind: Kind  # lines over time, lines that add up, or the latest value in large type
    width: int  # columns of 24


def _panel(
    kind: Kind,
    title: str,
    text: str,
    *queries: Query | str,
    unit: Unit = "short",
    width: int = 8,
    **named: str,
) -> Panel:
    """An expression alone has its labels as legend; a named one, its group and the name."""
    drawn = [Query(each, _labels(each)) if isinstance(each, str) else each for each in queries]
    for name, expression in named.items():
        drawn.append(Query(expression, f"{{{{group}}}} {name.replace('_', ' ')}"))
    return Panel(title, text, unit, drawn, kind, width)


def _labels(expression: str) -> str:
    """Of an aggregation."""
    found = re.search(r" by \((.*?)\)", expression)
    names = found[1].split(", ") if found else []
    return " ".join(f"{{{{{name}}}}}" for name in names)


lines, stacked = partial(_panel, "lines"), partial(_panel, "stacked")
stat = partial(_panel, "stat", width=4)


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: Sequence[Panel]


def row(title: str, *panels: Panel) -> Row:
    """Panels under one heading."""
    return Row(title, panels)


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard; ``name`` is its file's, and the end of its identifier in Grafana."""

    name: str
    title: str
    description: str
    rows: Sequence[Row]


def rate(name: str, by: str = "group", where: str = GROUP) -> str:
    """A counter's increase per second, summed over routers; ``by=""`` sums over all."""
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate({name}{{{where}}}[$__rate_interval]))"


def ratio(counter: str, per: str, by: str = "group") -> str:
    """A counter's increase over another's; no value while neither moves."""
    return f"{rate(counter, by)} / {rate(per, by)}"


def mean(histogram: str) -> str:
    """The mean of a histogram's observations."""
    return ratio(f"{histogram}_sum", f"{histogram}_count")


def quantiles(histogram: str) -> tuple[Query, ...]:
    """Median, 90th and 99th percentile of a histogram."""
    return tuple(
        Query(
            f"histogram_quantile({quantile}, {rate(f'{histogram}_bucket', 'group, le')})",
            f"{{{{group}}}} {name}",
        )
        for quantile, name in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))
    )


def of_group(name: str, fold: str = "sum", by: str = "group") -> str:
    """A gauge of groups or workers, aggregated to one value per group."""
    return f"{fold} by ({by}) ({name}{{{GROUP}}})"


def of_worker(name: str) -> Query:
    """A gauge of each chosen worker."""
    return Query(f"{name}{{{WORKER}}}", WORKER_LEGEND)
