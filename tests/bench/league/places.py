"""Where evenstep is behind, its places, and the whole in a sentence, in words."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from docs.kept_figures import words_table
from loadgen.report.intervals import Estimate
from tests.bench.league.parts import DATA
from tests.bench.league.standings import (
    COLUMNS,
    JUDGED,
    KEEPS_UP,
    LEADS,
    PLACED,
    Column,
    Standing,
    Tables,
    Verdict,
    behind,
    tables_of,
    verdict,
)
from tests.bench.league.workloads import Workload

_BY_KEY = {column.key: column for column in COLUMNS}
NO_REASON, NOT_APART = "not yet known", "Not told apart."


def shown(found: Estimate | None, column: Column) -> str:
    if found is None:
        return "–"
    text = f"{found.mean / column.unit:,.{column.digits}f}"
    if found.half_width is None or not column.interval:
        return text
    return f"{text} ± {found.half_width / column.unit:,.{column.digits}f}"


def _share(found: Estimate) -> str:
    text = f"{round(100 * found.mean, 1) + 0.0:,.1f} %"  # 0.0 makes -0.0 plain
    return text if found.half_width is None else f"{text} ± {100 * found.half_width:,.1f}"


def _column(by: str) -> Column:
    return _BY_KEY[by.removeprefix("-")]


def _figure(by: str, each: Standing) -> str:
    column = _column(by)
    return shown(each.of(column.key), column)


def _names(figures: Sequence[str]) -> str:
    return ", ".join(_column(by).title.partition(", ")[0] for by in figures)


def _link(workload: Workload) -> str:
    return f"[{workload.name}](#{workload.name})"


# --- where it is behind ---------------------------------------------------------------------------


@cache
def reasons() -> Mapping[str, Mapping[str, str]]:
    """Why evenstep is behind, by workload and figure."""
    file = Path(__file__).with_name("reasons.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))


def losses(tables: Tables) -> Iterator[Sequence[str]]:
    """Rows of the table of figures in which evenstep is behind."""
    for each in behind(tables):
        column = _column(each.by)
        yield (
            _link(each.workload),
            column.title,
            _figure(each.by, each.ours),
            f"{each.first.entrant}: {_figure(each.by, each.first)}",
            _share(each.difference),
            f"{each.place} of {each.of}",
            _why(each, reasons().get(each.workload.name, {}).get(column.key)),
        )


def _why(each: Verdict, reason: str | None) -> str:
    if each.told_apart:
        return reason or NO_REASON
    return f"{NOT_APART} {reason}" if reason else NOT_APART


def behind_text(tables: Tables) -> Iterator[str]:
    yield "## Where evenstep is behind\n"
    rows = [*losses(tables)]
    if not rows:
        yield f"In no figure by more than {100 * LEADS:.0f} %.\n"
        return
    yield (
        f"Where it is more than {100 * LEADS:.0f} % behind the first, the furthest first. Judged "
        f"are {_names(JUDGED)}, and the figure that orders a workload's entrants. *Behind by* is "
        "the mean over seeds of the difference of two runs of one seed, with its 95 % interval "
        "where there are two seeds or more; where that contains 0, the two are not told apart.\n"
    )
    header = ("workload", "figure", "evenstep", "the first", "behind by", "place", "why")
    yield words_table(header, rows).markdown() + "\n"


# --- its places -----------------------------------------------------------------------------------


def _place(each: Verdict | None) -> str:
    if each is None:
        return "–"
    told = [_figure(each.by, each.ours), f"{each.place} of {each.of}"]
    if each.place > 1:
        told.append(f"behind by {_share(each.difference)}")
    if len(each.ours.parts) == 1:
        told.append("1 seed")
    return ", ".join(told) + _beside_others(each)


def _beside_others(each: Verdict) -> str:
    """Where evenstep is ahead of the overloaded, no ratio: that grows with the length of a run."""
    if each.overloaded and (each.ahead is None or each.ahead >= 1):
        return " (others are overloaded)"
    return "" if each.ahead is None else f" ({_beside(each)})"


def _beside(each: Verdict) -> str:
    if each.ahead is None or each.peer is None:
        return f"place {each.place} of {each.of}"
    return f"{each.ahead:.2f} times as good as {each.peer.entrant}"


def places_text(tables: Tables) -> Iterator[str]:
    yield "## Evenstep's places\n"
    yield (
        "Its figure, its place among all entrants, by how much it is behind the first, and how "
        "many times as good it is as the best other product: below 1 it is worse. What rests on "
        "one seed says so. *Others are overloaded*: in an open workload all other products serve "
        f"less than {100 * KEEPS_UP:.0f} % of the tokens/s of the best entrant; how far evenstep "
        "is ahead then depends on the length of the run, so that no ratio is shown.\n"
    )
    rows = [
        (_link(workload), *(_place(verdict(workload, found, by)) for by in PLACED))
        for workload, found in tables
    ]
    titles = (_column(by).title for by in PLACED)
    yield words_table(("workload", *titles), rows).markdown() + "\n"


# --- the whole ------------------------------------------------------------------------------------


def league_line(folder: Path = DATA) -> str:
    """The whole in a paragraph: how often evenstep leads, its best row and its worst."""
    # Of tenants no other product has been told.
    tables = [(load, found) for load, found in tables_of(folder) if not load.tenants]
    others = {each.entrant for _, found in tables for each in found if each.peer}
    judged = [
        each
        for load, found in tables
        for by in JUDGED
        if (each := verdict(load, found, by)) is not None
    ]
    if not judged or not others:
        return "Nothing has been measured yet."
    placed = [each for each in judged if each.by in PLACED]
    text = (
        f"in {len(tables)} workloads on the same emulated engines, evenstep is first, or within "
        f"{100 * LEADS:.0f} % of the first, in {sum(each.leads for each in placed)} of "
        f"{len(placed)} figures ({_names(PLACED)}), beside {len(others)} other entrants and its "
        "own rules. "
    )
    if kept_up := [each for each in placed if not each.overloaded and each.ahead is not None]:
        text += f"Best where others are not overloaded: {_row(max(kept_up, key=_good))}. "
    return f"{text}Worst: {_row(min(judged, key=_good))}"


def _good(each: Verdict) -> float:
    """How many times as good it is as others, or as the first one where those have no figure."""
    if each.nothing:
        return 0.0
    return 1 / (1 + max(each.behind, 0.0)) if each.ahead is None else each.ahead


def _row(each: Verdict) -> str:
    name, _, unit = _column(each.by).title.partition(", ")
    figure = f"{_figure(each.by, each.ours)} {unit}".rstrip()
    return f"in `{each.workload.name}`, {name} {figure}, {_beside(each)}"
