"""README stays short, and whatever a page links to is there."""

import re
from pathlib import Path

import pytest

from tests.support.docs import README, ROOT, pages, prose_lines, text_of

INDEX = "docs/index.md"
INLINE_CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)")
TARGET = re.compile(r"\]\(([^()\s]+(?:\([^()\s]*\))?)\)")


def links_of(page: str) -> list[str]:
    """What a page links to or shows, but for addresses elsewhere."""
    prose = "\n".join(INLINE_CODE.sub("", line) for line in prose_lines(text_of(page)))
    targets = [*TARGET.findall(prose), *re.findall(r"^\[[^\]]+\]: (\S+)", prose, re.MULTILINE)]
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.replace("`", ""))
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def anchors(path: Path) -> set[str]:
    lines = prose_lines(path.read_text(encoding="utf-8"))
    return {slug(line.lstrip("#")) for line in lines if re.match(r"#+ ", line)}


def broken(page: str, target: str) -> bool:
    file, _, anchor = target.partition("#")
    path = ((ROOT / page).parent / file).resolve() if file else ROOT / page
    if not path.is_relative_to(ROOT) or not path.exists():
        return True
    return bool(anchor) and (path.suffix != ".md" or anchor not in anchors(path))


def test_the_readme_is_short() -> None:
    assert len(text_of(README).splitlines()) <= 200


@pytest.mark.parametrize("page", pages())
def test_every_link_leads_somewhere(page: str) -> None:
    assert [target for target in links_of(page) if broken(page, target)] == []


def test_there_are_links_pictures_and_anchors_to_check() -> None:
    every = [target for page in pages() for target in links_of(page)]
    for kind in (r".*\.png$", r".*\.md$", r".*\.md#", r"#"):
        assert [target for target in every if re.match(kind, target)], kind


def test_a_link_to_nowhere_is_seen() -> None:
    assert broken(README, "docs/nowhere.md")
    assert broken(README, "docs/deploy.md#nowhere")
    assert broken(README, "#nowhere")
    assert not broken(README, "docs/index.md")
    assert not broken(README, "#known-limits")


def test_the_index_lists_every_page() -> None:
    listed = {str(Path("docs") / target.partition("#")[0]) for target in links_of(INDEX)}
    assert {page for page in pages() if page.startswith("docs/")} - {INDEX} <= listed
