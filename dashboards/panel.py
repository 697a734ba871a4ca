"""What a dashboard says: rows of panels, and the PromQL that their metrics are asked with.

Nothing here knows Grafana's JSON; ``dashboards/grafana.py`` writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

GROUP = 'group=~"$group"'
WORKER = GROUP + ',worker=~"$worker"'
WORKER_LEGEND = "{{worker}} (rank {{rank}})"
ENGINE_LEGEND = "{{instance}} engine {{engine}}"

# Units as Grafana names them.
Unit = Literal[
    "short", "s", "percentunit", "bytes", "binBps", "reqps", "ops", "watt", "joule", "bool_on_off"
]


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression, and what its series are called: labels in double braces."""

    expression: str
    legend: str = "{{group}}"


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture.

    Attributes:
        title: what is drawn, with its unit where Grafana has no name for it.
        description: what it means and what to do about it, for somebody who sees it first.
        unit: of all its queries.
        queries: what is drawn.
        kind: lines over time, lines that add up, or the latest value in large type.
        width: columns of 24.
    """

    title: str
    description: str
    unit: Unit
    queries: Sequence[Query]
    kind: Literal["lines", "stacked", "stat"] = "lines"
    width: int = 8


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard.

    Attributes:
        name: of its file, and the end of its identifier in Grafana.
        title: for people.
        description: which questions it answers.
        rows: from top to bottom.
    """

    name: str
    title: str
    description: str
    rows: Sequence[Row]


def rate(name: str, by: str = "group", where: str = GROUP) -> str:
    """A counter's increase per second, summed over routers; ``by=""`` sums over all."""
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate({name}{{{where}}}[$__rate_interval]))"


def ratio(counter: str, per: str, by: str = "group") -> str:
    """A counter's increase by that of another one; no value while neither moves."""
    return f"{rate(counter, by)} / {rate(per, by)}"


def mean(histogram: str) -> str:
    """The average of what a histogram has seen."""
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


def of_group(name: str, fold: str = "sum") -> str:
    """A gauge of groups or workers, folded to one value per group."""
    return f"{fold} by (group) ({name}{{{GROUP}}})"


def of_worker(name: str) -> tuple[Query]:
    """A gauge of each chosen worker."""
    return (Query(f"{name}{{{WORKER}}}", WORKER_LEGEND),)
