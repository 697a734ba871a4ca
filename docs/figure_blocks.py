"""Blocks and words of the pages that are written from kept figures.

A block stands between ``<!-- figures: NAME -->`` and ``<!-- /figures -->``. NAME is

- a text or a whole table of ``result_tables``;
- ``rows of`` such a table, or ``study STUDY``, with ``: TITLE`` where tables of the study look
  alike: the rows that the page has stay, in its order and with its bold ones, and get the kept
  figures; an empty block gets all rows.

Under a table stands when its figures were measured, see ``measured``.

Within a sentence a figure stands between ``<!-- figure: NAME -->`` and ``<!-- / -->``, see
``inline_figures``. The first comment must not begin a line: there it would end the paragraph.
"""

import re
import textwrap
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from docs.inline_figures import figure
from docs.kept_figures import reads
from docs.measured import Line, headers_of, measured
from docs.result_tables import TABLES, TEXTS, study_tables
from loadgen.figures.tables import Table
from loadgen.report.origin import ROOT

WIDTH = 118
STUDY = "study "
BLOCK = re.compile(r"(<!-- figures: ([^\n]+) -->\n)(.*?)(<!-- /figures -->)", re.DOTALL)
INLINE = re.compile(r"(<!-- figure: ([^\n]+?) -->)(.*?)(<!-- / -->)", re.DOTALL)


def filled_pages() -> dict[Path, str]:
    """Pages with blocks, and the text that they should have."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = {page: page.read_text(encoding="utf-8") for page in pages}
    return {
        page: filled(text)
        for page, text in texts.items()
        if BLOCK.search(text) or INLINE.search(text)
    }


def filled(text: str, line: Line = measured, *, titles: bool = False) -> str:
    """A page's text with the kept figures in it, and a line under each table of them.

    ``titles``: figures within sentences have that line as a tooltip.
    """

    def block(found: re.Match[str]) -> str:
        with reads() as read:
            content = _content(found[2], found[3])
        if found[2].startswith(STUDY):
            study = found[2].removeprefix(STUDY).partition(":")[0]
            read = [(name, f"studies/{study}") for name, _ in read]
        if read and found[2] not in TEXTS:
            content += f"\n{textwrap.fill(line(headers_of(read)), WIDTH)}\n"
        return f"{found[1]}\n{content}\n{found[4]}"

    def inline(found: re.Match[str]) -> str:
        with reads() as read:
            content = figure(found[2])
        if content.split() == found[3].split():
            content = found[3]  # a page may break its lines within a figure
        if titles:
            said = line(headers_of(read)).strip("*").replace("`", "")
            content = f'<span title="{said}">{content}</span>'
        return f"{found[1]}{content}{found[4]}"

    return INLINE.sub(inline, BLOCK.sub(block, text))


def _content(name: str, present: str) -> str:
    if name in TEXTS:
        text = TEXTS[name]()
        return text + "\n" if "\n" in text else textwrap.fill(text, WIDTH) + "\n"
    if name in TABLES:
        return TABLES[name]().markdown() + "\n"
    lines = [_cells(line) for line in present.splitlines() if line.startswith("|")]
    tables = [table for table in _tables(name) if not lines or list(table.header) == lines[0]]
    if len(tables) != 1:
        raise ValueError(f"figures: {name}: {len(tables)} tables look like the one of the page")
    rows = [*_chosen(tables[0], lines[2:])] if lines else tables[0].rows
    return replace(tables[0], rows=rows, title="").markdown() + "\n"


def _tables(name: str) -> Sequence[Table]:
    if name.startswith("rows of "):
        return [TABLES[name.removeprefix("rows of ")]()]
    study, _, title = name.removeprefix(STUDY).partition(": ")
    return [table for table in study_tables(study) if title in table.title]


def _chosen(table: Table, present: Sequence[Sequence[str]]) -> Iterator[Sequence[str]]:
    known: defaultdict[str, deque[Sequence[str]]] = defaultdict(deque)
    for row in table.rows:
        known[row[0].strip("*")].append(row)
    for name, *_ in present:
        if not known[name.strip("*")]:
            raise ValueError(f"no kept figures have a row {name!r}")
        row = known[name.strip("*")].popleft()
        plain = [cell.strip("*") for cell in row]
        yield [f"**{cell}**" for cell in plain] if name.startswith("**") else plain


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]
