"""Figures as text, and tables of them for the terminal."""

from collections.abc import Sequence

from rich.table import Table


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


def plain_table(*columns: str) -> Table:
    """A table without lines."""
    return Table(*columns, box=None, pad_edge=False)


def add_figures(table: Table, rows: Sequence[tuple[str, str, float]], figures: object) -> None:
    """Add rows of (label, name of an attribute, factor)."""
    for label, key, scale in rows:
        value = getattr(figures, key)
        table.add_row(label, number(None if value is None else value * scale))
