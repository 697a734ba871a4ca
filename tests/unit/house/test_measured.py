"""Under a table stands when its figures were measured; on the site, how old they are."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from docs import figure_blocks, kept_figures, measured
from docs.figure_blocks import filled
from docs.kept_figures import kept, reads, words_table
from docs.measured import headers_of, measured_and_aged
from docs.stale_figures import kept_headers
from loadgen.report.origin import Document, Engines, git, origin
from tests.support.docs import text_of
from tests.support.figure_files import write_figures, write_part

CODE = ("loadgen/report/numbers.py",)


def header(date: str, commit: str, engines: Engines = Engines.REAL, **more: str) -> Document:
    return origin(engines, CODE) | {"date": f"{date}T01:00:00+00:00", "commit": commit, **more}


FIRST, SECOND = "1" * 40, f"{'2' * 40} with changes"
OLD = header("2026-11-20", FIRST, note="header added later")
NEW = header("2026-11-22", SECOND, Engines.EMULATED)


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file that is measured at once, and one in two parts."""
    write_figures(tmp_path / "measured_line_one.json", {"rows": [1]}, OLD)
    for name, each in (("a", OLD), ("b", NEW)):
        write_part(tmp_path / "measured_line_parts.json", name, {"x": 1}, each)
    for module in (kept_figures, measured):
        monkeypatch.setattr(module, "DATA", tmp_path)


def dates(name: str, *parts: str) -> list[str]:
    with reads() as read:
        found = kept(f"measured_line_{name}.json")
        for part in parts:
            assert found[part]
    return [each["date"][:10] for each in headers_of(read)]


def test_headers_are_those_of_the_parts_that_are_read() -> None:
    assert dates("one", "rows") == ["2026-11-20"]
    assert dates("parts", "b") == ["2026-11-22"]
    assert dates("parts") == ["2026-11-20", "2026-11-22"]


def test_a_line_has_days_commits_and_engines() -> None:
    assert measured.measured([NEW]) == (
        "*Measured 2026-11-22 at `2222222` with changes, emulated engines.*"
    )
    assert measured.measured([NEW, OLD, NEW]) == (
        "*Measured 2026-11-22 at `2222222` with changes, on or before 2026-11-20 at `1111111`, "
        "emulated and real engines.*"
    )


def test_the_line_stands_under_a_table_of_kept_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def table() -> object:
        return words_table(("x",), [(str(kept("measured_line_one.json")["rows"][0]),)])

    monkeypatch.setattr(figure_blocks, "TABLES", {"t": table})
    said = {"said": lambda: f"{kept('measured_line_one.json')['rows'][0]}"}
    monkeypatch.setattr(figure_blocks, "TEXTS", said)
    text = filled("<!-- figures: t -->\n<!-- /figures -->\n")
    assert text.splitlines()[-3:] == [measured.measured([OLD]), "", "<!-- /figures -->"]
    assert filled(text) == text
    assert "*" not in filled("<!-- figures: said -->\n<!-- /figures -->\n")


def test_the_site_tells_the_age_and_whether_code_has_changed() -> None:
    begun = datetime.now(UTC) - timedelta(days=3, hours=1)
    head = git("rev-parse", "HEAD~2") or FIRST
    fresh = header("2026-11-22", head) | {"date": begun.isoformat()}
    newer = fresh | {"date": datetime.now(UTC).isoformat()}
    # More than two where one of them is a merge; none where the clone has no history.
    count = git("rev-list", "--count", "HEAD~2..HEAD")
    commits = f" and {count} commits" if count else ""
    assert f", 3 days{commits} ago.*" in measured_and_aged([newer, fresh])
    gone = fresh | {"code": {CODE[0]: "other"}, "commit": FIRST}
    assert measured_and_aged([gone]).endswith(
        ", 3 days ago. The code that decides them has changed since.*"
    )


def test_a_study_has_its_own_line() -> None:
    headers = dict(kept_headers())[Path("figures/figures.json")]
    page = text_of("docs/results/simulated.md")
    table = page.partition("<!-- figures: study serving_alone -->")[2].partition("<!-- /figures")[0]
    assert measured.measured([headers["studies/serving_alone"]]) in table
