"""Blocks of pages get the kept figures, of the rows that the page chooses."""

import pytest

from docs import figure_blocks
from docs.figure_blocks import filled, filled_pages
from docs.kept_figures import words_table
from loadgen.figures.tables import Table
from loadgen.report.origin import ROOT

ROWS = [("a", "1"), ("b", "2"), ("a", "3")]


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figure_blocks, "TABLES", {"x": lambda: words_table(("row", "s"), ROWS)})
    monkeypatch.setattr(
        figure_blocks, "TEXTS", {"said": lambda: "word " * 40, "shown": lambda: "1\n2"}
    )
    tables = [
        Table(["row", "tok/s"], [["a", "1 ± 2"]], "short runs"),
        Table(["row", "tok/s"], [["a", "3 ± 4"]], "long runs"),
        Table(["row", "ms"], [["a", "5"]], "short runs"),
    ]
    monkeypatch.setattr(figure_blocks, "study_tables", {"s": tables}.__getitem__)


def block(name: str, *lines: str) -> str:
    return "\n".join((f"before\n<!-- figures: {name} -->", *lines, "<!-- /figures -->\nafter"))


def shown(name: str, *lines: str) -> list[str]:
    """Lines that the block gets; what stands around it stays, and a second time nothing changes."""
    text = filled(block(name, *lines))
    first, *inside, last = text.split("\n")[1:-1]
    assert text.startswith(f"before\n{first}\n\n")
    assert text.endswith(f"\n\n{last}\nafter")
    assert filled(text) == text
    return inside[1:-1]


def test_a_whole_table_replaces_what_the_page_has() -> None:
    whole = ["| row | s |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in ROWS)]
    assert shown("x") == whole
    assert shown("x", "| row | s |", "| --- | --- |", "| gone | 1 |") == whole
    assert shown("rows of x") == whole


def test_rows_of_the_page_stay_in_its_order_and_bold() -> None:
    old = ("| row | s |", "|---|---|", "| **b** | 0 |", "| a | 0 |", "| a | 0 |")
    assert shown("rows of x", *old)[2:] == ["| **b** | **2** |", "| a | 1 |", "| a | 3 |"]


def test_a_row_without_figures_is_refused() -> None:
    with pytest.raises(ValueError, match="no kept figures have a row 'c'"):
        filled(block("rows of x", "| row | s |", "| --- | --- |", "| c | 1 |"))


def test_a_studys_table_is_known_by_its_header_and_title() -> None:
    head = ("| row | tok/s |", "| --- | ---: |", "| a | 0 |")
    assert shown("study s: long", *head)[2:] == ["| a | 3 ± 4 |"]
    assert shown("study s", "| row | ms |", "| --- | ---: |", "| a | 0 |")[2:] == ["| a | 5 |"]
    with pytest.raises(ValueError, match="2 tables look like"):
        filled(block("study s", *head))


def test_texts_are_wrapped_unless_they_have_lines() -> None:
    assert max(map(len, shown("said"))) <= figure_blocks.WIDTH
    assert len(shown("said")) == 2
    assert shown("shown", "old") == ["1", "2"]


def test_figures_in_sentences_are_filled_and_keep_their_line_breaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(figure_blocks, "figure", {"a, b": "3 ms", "c": "1 or 2"}.__getitem__)
    text = "It takes <!-- figure: a, b -->old<!-- / -->,\nor <!-- figure: c -->1\n  or 2<!-- / -->."
    new = text.replace("old", "3 ms")
    assert filled(text) == new
    assert filled(new) == new


def test_on_the_site_figures_in_sentences_tell_their_age() -> None:
    with_title = filled(
        "<!-- figure: black hole -->old<!-- / -->", lambda _: "*Measured at `1a2b`.*", titles=True
    )
    assert '<!-- figure: black hole --><span title="Measured at 1a2b.">Of 600 ' in with_title
    assert with_title.endswith("are sent twice</span><!-- / -->")


def test_every_page_of_results_but_the_gpus_has_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    names = {page.name for page in filled_pages() if page.parent.name == "results"}
    folder = ROOT / "docs/results"
    assert names == {page.name for page in folder.glob("*.md")} - {"gpu.md"}
