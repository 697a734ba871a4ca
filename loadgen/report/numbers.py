"""Figures as text, and tables of them for the terminal."""

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from loadgen.report.intervals import Estimate


def number(value: object, digits: int = 4) -> str:
    """Format a figure with its significant digits; a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return str(value)
    whole = abs(value) >= 10 ** (digits - 1)
    return f"{value:,.0f}" if whole else f"{value:.{digits}g}"


def with_interval(figure: Estimate | None, scale: float = 1.0) -> str:
    """A mean with half of its 95 % interval; a dash for None."""
    if figure is None:
        return "-"
    width = "" if figure.half_width is None else f" ± {number(figure.half_width * scale, 2)}"
    return f"{number(float(figure.mean * scale))}{width}"


def plain_table(*columns: str) -> Table:
    """A table without lines."""
    return Table(*columns, box=None, pad_edge=False)


Figures = tuple[Sequence[tuple[str, str, float]], object]
"""Rows of (label, name of an attribute, factor), and what has the attributes."""


def figures_with_notes(column: str, notes: Iterable[str], *parts: Figures) -> RenderableType:
    """One run's figures below its name, and its conditions below them."""
    table = plain_table("", column)
    for rows, figures in parts:
        for label, key, scale in rows:
            value = getattr(figures, key)
            table.add_row(label, number(None if value is None else value * scale))
    return Group(table, *map(Text, notes))
