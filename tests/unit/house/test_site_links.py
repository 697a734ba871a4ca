"""Links of the pages in docs/: those that leave it lead to copies on the site, and none is dead."""

import re
from pathlib import Path

import pytest

from docs.site_links import ROOT, copy_of, links, outside, rewritten, with_folders

DOCS = ROOT / "docs"
PAGES = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))


@pytest.mark.parametrize(
    ("page", "link", "path"),
    [
        ("index.md", "../CONTRIBUTING.md", "CONTRIBUTING.md"),
        ("results/demo.md", "../../tests/data/x.png", "tests/data/x.png"),
        ("index.md", "../deploy/", "deploy"),
        ("results/demo.md", "../settings.md", None),
        ("index.md", "settings.md", None),
        ("index.md", "https://example.org/x.md", None),
        ("index.md", "mailto:somebody@example.org", None),
        ("index.md", "/x.md", None),
        ("index.md", "../../x.md", None),
    ],
)
def test_which_links_leave_the_pages(page: str, link: str, path: str | None) -> None:
    assert outside(page, link) == path


def test_what_browsers_do_not_show_is_copied_as_text() -> None:
    assert copy_of("tests/data/x.png") == "repository/tests/data/x.png"
    assert copy_of("router/cli.py") == "repository/router/cli.py.txt"


def test_links_lead_to_copies_and_code_stays() -> None:
    text = (
        "[a](../A.md#b) ![p](../x.png) [s](settings.md) [gone](../gone.md) [r][r]\n"
        '<img src="../x.png">\n`[c](../A.md)`\n```md\n[c](../A.md)\n```\n[r]: ../A.md\n'
    )
    assert rewritten(text, "index.md", lambda path: path != "gone.md") == (
        "[a](repository/A.md.txt#b) ![p](repository/x.png) [s](settings.md) [gone](../gone.md) "
        '[r][r]\n<img src="repository/x.png">\n`[c](../A.md)`\n```md\n[c](../A.md)\n```\n'
        "[r]: repository/A.md.txt\n"
    )
    assert rewritten("[a](../../A.md)", "results/x.md", lambda _: True) == (
        "[a](../repository/A.md.txt)"
    )
    assert rewritten("`in two\nlines`, [a](../A.md), `b`", "index.md", lambda _: True) == (
        "`in two\nlines`, [a](repository/A.md.txt), `b`"
    )


def test_a_folder_in_the_navigation_becomes_its_pages(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    for name in ("b.md", "a.md", "a.png"):
        (tmp_path / "results" / name).touch()
    nav = [{"Start": "index.md"}, {"More": [{"Results": "results/"}, "x.md"]}]
    assert with_folders(nav, tmp_path) == [
        {"Start": "index.md"},
        {"More": [{"Results": ["results/a.md", "results/b.md"]}, "x.md"]},
    ]


@pytest.mark.parametrize("page", PAGES)
def test_no_page_has_a_dead_link(page: str) -> None:
    found = links((DOCS / page).read_text(encoding="utf-8"))
    files = [link for link in found if not re.match(r"[a-z][a-z+.-]*:", link)]
    assert [link for link in files if not ((DOCS / page).parent / link).exists()] == []
