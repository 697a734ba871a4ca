"""The pages of the documentation, as tests read them."""

import re
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README, GUIDE = "README.md", "CONTRIBUTING.md"


def pages() -> list[str]:
    """README, the guide for contributors, and all below docs/."""
    docs = (str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md")))
    return [README, GUIDE, *docs]


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def prose_lines(text: str) -> list[str]:
    """The lines outside fenced blocks; inside them an empty line."""
    fenced, lines = False, []
    for line in text.splitlines():
        fence = line.lstrip().startswith("```")
        lines.append("" if fenced or fence else line)
        fenced ^= fence
    return lines


def section_of(page: str, heading: str) -> str:
    """What stands under a heading, with the deeper headings below it."""
    text = text_of(page)
    lines, prose = text.splitlines(), prose_lines(text)
    (start,) = (n for n, line in enumerate(prose) if re.fullmatch(rf"#+ {heading}", line))
    level = lines[start].index(" ")
    after = takewhile(
        lambda n: not re.match(rf"#{{1,{level}}} ", prose[n]), range(start + 1, len(lines))
    )
    return "\n".join(lines[n] for n in after) + "\n"


def words(text: str) -> str:
    """On one line, since a sentence may break anywhere."""
    return " ".join(text.split())
