"""Numbers in README and docs/ that look measured come from kept data.

What is measured becomes a block or a figure of docs/figure_blocks.py; without kept data it has no
place in a page. What only looks measured stands in ``not_measured.toml``, by kind and page: the
words around the number.
"""

import re
import tomllib
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from docs.figure_blocks import BLOCK, INLINE
from docs.inline_figures import FIGURES, figure
from tests.support.docs import GUIDE, pages, prose_lines, text_of, words

# docs.generate writes all of them.
GENERATED = {"docs/settings.md", "docs/commands.md", "docs/metrics.md"}
PAGES = [page for page in pages() if page not in GENERATED and page != GUIDE]
KINDS = {"setting", "workload", "source", "arithmetic"}
ELSE: dict[str, dict[str, list[str]]] = tomllib.loads(
    Path(__file__).with_name("not_measured.toml").read_text(encoding="utf-8")
)

_DIGITS = r"\d[\d,]*+(?:\.\d++)?+"
_NUMBER = rf"(?<![\w.,+-])[+-]?{_DIGITS}"
_UNIT = (
    r"(?:%|percentage points|[mnuµ]?s|seconds?|minutes?|hours?|[kMG]B|Mbit/s|m?J|joules?"
    r"|k?W|watts?|cores?|times|(?:tokens|tok|requests|steps)/s)(?![\w/])"
)
_MEASURED = re.compile(
    # A ratio, but neither 2 x 8 nor 4 workers x 16 slots.
    rf"(?<!\d )\bx {_DIGITS}(?!,? slots)"
    # One number or several before a unit, but no interval's level, and no clock of the router's.
    rf"|(?<!every )(?<![Aa]fter )(?<!last )(?!95 % interval)"
    rf"{_NUMBER}(?: ?(?:±|to|and|or|/|against|,) [+-]?{_DIGITS})* ?{_UNIT}"
    rf"|{_NUMBER} ± {_DIGITS}"
)
_CELL = re.compile(rf"\**[+-]?(?:\d[\d,]*\.\d+(?: ?{_UNIT})?|{_DIGITS} ?{_UNIT})(?: [±(].*)?\**")
_HIDDEN = re.compile(r"(`+)(?:(?!\1).)+\1|<!--.*?-->|(?<=\])\([^)\s]*\)", re.DOTALL)
_STARTS = re.compile(r"\n(?=\s*\n)|\n(?= *(?:[-*] |\d+\. |\|))")


def passages(text: str) -> Iterator[str]:
    """Paragraphs, list items and rows of tables, without code, kept figures and links' targets."""
    text = INLINE.sub("…", BLOCK.sub("", text))
    prose = "\n".join("" if line.startswith("    ") else line for line in prose_lines(text))
    yield from (words(_HIDDEN.sub("`", passage)) for passage in _STARTS.split(prose))


def unlisted(passage: str, phrases: Collection[str]) -> list[str]:
    """What looks measured in a passage, but for what stands in one of the phrases."""
    if passage.startswith("|"):
        first, *cells = (cell.strip() for cell in passage.strip("|").split("|"))
        if sum(_CELL.fullmatch(cell) is not None for cell in cells) > 1:
            return [passage]
        if first.startswith("`"):  # says what a setting, a header or a word means
            return []
    known = [
        range(found.start(), found.end())
        for phrase in phrases
        for found in re.finditer(re.escape(phrase), passage)
    ]
    return [
        passage[max(0, found.start() - 40) : found.end() + 20]
        for found in _MEASURED.finditer(passage)
        if not any(found.start() in span and found.end() - 1 in span for span in known)
    ]


def phrases_of(page: str) -> list[str]:
    return [phrase for kind in ELSE.values() for phrase in kind.get(page, [])]


@pytest.mark.parametrize("page", PAGES)
def test_measured_numbers_come_from_kept_data(page: str) -> None:
    phrases = phrases_of(page)
    assert [hit for each in passages(text_of(page)) for hit in unlisted(each, phrases)] == []


def test_the_list_has_nothing_that_no_page_says() -> None:
    assert set(ELSE) == KINDS
    assert {page for kind in ELSE.values() for page in kind} <= set(PAGES)
    for page in PAGES:
        said = [*passages(text_of(page))]
        for phrase in phrases_of(page):
            within = [each for each in said if phrase in each]
            others = {each for each in phrases_of(page) if each != phrase}
            assert any(len(unlisted(each, others)) for each in within), (page, phrase)


@pytest.mark.parametrize(
    "planted",
    [
        "A step takes 3.4 ms more.",
        "Under bfio it was x 1.10 as long.",
        "It takes 12 %, or 3 to\n4 us, of a step.",
        "- The gain is 1.2 ± 0.3\n- and the rest",
        "It serves 1,200 tokens/s on 2 cores.",
        "| `bfio` | 3.1 | **0.2** |",
        "| bfio | 3 ms (2) | 4 ms |",
    ],
)
def test_a_planted_number_is_found(planted: str) -> None:
    assert [hit for each in passages(f"Before.\n\n{planted}\n") for hit in unlisted(each, ())]


@pytest.mark.parametrize(
    "said",
    [
        "It takes <!-- figure: x, y -->3\nms<!-- / --> of `--for 3 ms`.",
        "<!-- figures: x -->\n\n| a | 3.1 | 0.2 |\n\n<!-- /figures -->\n",
        "```\n3 ms\n```\n\n    4 ms\n",
        "95 % intervals, [every 5 s](x%203.html), 2 x 8, 4 workers x 16 slots, vLLM 0.32.",
        "| `--timeout` | 30 s | 408 |",
        "It takes 5 s at most.",
    ],
)
def test_anything_else_is_not(said: str) -> None:
    assert [hit for each in passages(said) for hit in unlisted(each, ["5 s at most"])] == []


def test_figures_are_on_pages_and_begin_no_line() -> None:
    """A comment that begins a line would end the paragraph."""
    texts = [text_of(page) for page in PAGES]
    used = {found[2] for text in texts for found in INLINE.finditer(text)}
    assert [
        name for text in texts for name in re.findall(r"^[\s*-]*<!-- figure: .*", text, re.M)
    ] == []
    for group, make in FIGURES.items():
        made = make()
        names = [group] if isinstance(made, str) else [f"{group}, {item}" for item in made]
        assert [name for name in names if name not in used] == []


@pytest.mark.parametrize("name", ["nothing", "demo", "demo, nothing", "black hole, nothing"])
def test_a_figure_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"no figure is called '{name}'"):
        figure(name)
