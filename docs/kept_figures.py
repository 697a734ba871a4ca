"""Figures that are kept under tests/data, and the tables that are made of them."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from docs.stale_figures import DATA
from loadgen.figures.tables import Table
from loadgen.report.origin import read_figures

Row = Sequence[str]
Figures = dict[str, Any]


def words_table(header: Row, rows: Sequence[Row]) -> Table:
    """A table whose columns all stand at the left."""
    return Table(header, rows, text_columns=len(header))


@cache
def kept(name: str) -> Figures:
    """Figures of a kept file, read once for all pages."""
    return read_figures(DATA / name)
