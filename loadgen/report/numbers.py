"""Figures as text, for tables."""

from __future__ import annotations


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
