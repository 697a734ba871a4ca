"""Figures that are kept under tests/data, and the tables that are made of them."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from docs.stale_figures import DATA
from loadgen.figures.tables import Table
from loadgen.report.origin import KEY, Document

Row = Sequence[str]
Figures = dict[str, Any]
# A kept file with a part of it, or with None for the whole.
Read = tuple[str, str | None]
_reads: list[Read] = []


class _Noted(Figures):
    """Figures of a file that note which parts are asked for."""

    def __init__(self, name: str, figures: Figures) -> None:
        super().__init__(figures)
        self._name = name

    def __getitem__(self, part: str) -> Any:
        _reads.append((self._name, part))
        return super().__getitem__(part)


def words_table(header: Row, rows: Sequence[Row]) -> Table:
    """A table whose columns all stand at the left."""
    return Table(header, rows, text_columns=len(header))


def kept(name: str) -> Figures:
    """Figures of a kept file, read once for all pages."""
    _reads.append((name, None))
    return _kept(name)


def read_figures(file: Path) -> Document:
    """Read figures without the file's header."""
    found: Document = json.loads(file.read_text(encoding="utf-8"))
    return {key: value for key, value in found.items() if key != KEY}


@cache
def _kept(name: str) -> Figures:
    return _Noted(name, read_figures(DATA / name))


@contextmanager
def reads() -> Iterator[list[Read]]:
    """What is read meanwhile."""
    _reads.clear()
    noted: list[Read] = []
    yield noted
    noted += dict.fromkeys(_reads)
