"""Page and pictures of the league, from its kept parts.

python -m tests.bench.league.page    # draws the pictures; docs.generate writes the page
"""

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from docs.kept_figures import read_figures, words_table
from docs.markdown import code
from docs.measured import measured
from loadgen.report.charts import COLOURS, finish, panels, save
from loadgen.report.intervals import Estimate
from loadgen.report.origin import KEY, Engines, origin
from tests.bench.league.bounds import least_ttft_ms
from tests.bench.league.parts import DATA, OURS
from tests.bench.league.standings import (
    COLUMNS,
    JUDGED,
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
from tests.bench.league.workloads import WORKLOADS, Workload
from tests.support.figure_files import write_figures

SUMMARY, REAL = "league.json", "real-engine.json"
# Where the site has the pictures.
PICTURES = "../../tests/data/league/"
_BY_KEY = {column.key: column for column in COLUMNS}


def league_text(
    folder: Path = DATA,
    workloads: Mapping[str, Workload] = WORKLOADS,
    pictures: str = PICTURES,
) -> str:
    """What the page has of the kept parts; ``pictures``: where they are, from the page."""
    tables = tables_of(folder, workloads)
    if not tables:
        return "Nothing has been measured yet."
    once = tables_of(folder, workloads, once=True)
    both = (*once, *tables)
    parts = (
        *(_behind(tables), _places(tables), _tables(tables, once, folder, pictures)),
        *(_entrants(both), _evidence(both), _left_out(folder)),
    )
    return "\n".join(line for part in parts for line in part).rstrip()


def _summary(folder: Path) -> Mapping[str, Any]:
    """What ``summarize`` has kept; nothing before."""
    file = folder / SUMMARY
    return read_figures(file) if file.exists() else {}


def shown(found: Estimate | None, column: Column) -> str:
    if found is None:
        return "–"
    text = f"{found.mean / column.unit:,.{column.digits}f}"
    if found.half_width is None or not column.interval:
        return text
    return f"{text} ± {found.half_width / column.unit:,.{column.digits}f}"


# --- evenstep's places ----------------------------------------------------------------------------


def _column(by: str) -> Column:
    return _BY_KEY[by.removeprefix("-")]


def _figure(by: str, each: Standing) -> str:
    column = _column(by)
    return shown(each.of(column.key), column)


def _names(figures: Sequence[str]) -> str:
    return ", ".join(_column(by).title.partition(", ")[0] for by in figures)


def _link(workload: Workload) -> str:
    return f"[{workload.name}](#{workload.name})"


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
            f"{each.behind:.1%}",
            f"{each.place} of {each.of}",
            reasons().get(each.workload.name, {}).get(column.key, "not yet known"),
        )


def _behind(tables: Tables) -> Iterator[str]:
    yield "## Where evenstep is behind\n"
    rows = [*losses(tables)]
    if not rows:
        yield f"In no figure by more than {100 * LEADS:.0f} %.\n"
        return
    yield (
        f"Where it is more than {100 * LEADS:.0f} % behind the first, the furthest first. Judged "
        f"are {_names(JUDGED)}, and the figure that orders a workload's entrants.\n"
    )
    header = ("workload", "figure", "evenstep", "the first", "behind by", "place", "why")
    yield words_table(header, rows).markdown() + "\n"


def _place(each: Verdict | None) -> str:
    if each is None:
        return "–"
    text = f"{_figure(each.by, each.ours)}, {each.place} of {each.of}"
    if each.ahead is None or each.peer is None:
        return text
    return f"{text} ({_beside(each)})"


def _beside(each: Verdict) -> str:
    assert each.peer is not None
    return f"{each.ahead:.2f} times as good as {each.peer.entrant}"


def _places(tables: Tables) -> Iterator[str]:
    yield "## Evenstep's places\n"
    yield (
        "Its figure, its place among all entrants, and how many times as good it is as the best "
        "other product: below 1 it is worse.\n"
    )
    rows = [
        (_link(workload), *(_place(verdict(workload, found, by)) for by in PLACED))
        for workload, found in tables
    ]
    titles = (_column(by).title for by in PLACED)
    yield words_table(("workload", *titles), rows).markdown() + "\n"


def league_line(folder: Path = DATA) -> str:
    """The whole in a paragraph: how often evenstep leads, its best row and its worst."""
    # Of tenants no other product has been told.
    tables = [(load, found) for load, found in tables_of(folder) if not load.tenants]
    judged = sorted(
        (
            each
            for load, found in tables
            for by in JUDGED
            if (each := verdict(load, found, by)) is not None and each.ahead is not None
        ),
        key=lambda each: each.ahead or 0.0,
    )
    placed = [each for each in judged if each.by in PLACED]
    calm = [each for each in placed if not each.workload.overload]
    if not calm:
        return "Nothing has been measured yet."
    others = {each.entrant for _, found in tables for each in found if each.peer}
    return (
        f"in {len(tables)} workloads on the same emulated engines, evenstep is first, or within "
        f"{100 * LEADS:.0f} % of the first, in {sum(each.leads for each in placed)} of "
        f"{len(placed)} figures ({_names(PLACED)}), beside {len(others)} other entrants and its "
        f"own rules. Best below overload: {_row(calm[-1])}. Worst: {_row(judged[0])}"
    )


def _row(each: Verdict) -> str:
    name, _, unit = _column(each.by).title.partition(", ")
    figure = f"{_figure(each.by, each.ours)} {unit}".rstrip()
    return f"in `{each.workload.name}`, {name} {figure}, {_beside(each)}"


# --- workloads ------------------------------------------------------------------------------------


def engines_of(found: Sequence[Standing]) -> str:
    """What the engines of a workload were, in words."""
    kinds = {part[KEY]["engines"] for each in found for part in each.parts}
    return f"{', '.join(sorted(kinds))} engines"


def _least(ttft_ms: float | None) -> str:
    if ttft_ms is None:
        return ""
    return (
        f" No router can have a TTFT mean below about {ttft_ms:.0f} ms: that is what it would be "
        "if each request came to an idle engine which had cached all that earlier ones share."
    )


def _tables(tables: Tables, once: Tables, folder: Path, pictures: str) -> Iterator[str]:
    least = _summary(folder).get("least_ttft_ms", {})
    others = {workload.name: found for workload, found in once}
    for workload, found in tables:
        yield f"## {workload.name}\n"
        yield _setting(workload, found) + _least(least.get(workload.name)) + "\n"
        yield from _table(found)
        yield from beside_real(workload.name, folder)
        if (folder / f"{workload.name}.png").exists():
            yield f"![{workload.name}]({pictures}{workload.name}.png)\n"
        if rules := others.get(workload.name):
            yield "Further rules of the same products and of evenstep, with one seed:\n"
            yield from _table(rules)


def _table(found: Sequence[Standing]) -> Iterator[str]:
    rows = []
    for each in found:
        name = f"{each.entrant}{' †' if each.busy else ''}"
        cells = [name, *(shown(each.of(column.key), column) for column in COLUMNS)]
        rows.append([f"**{cell}**" for cell in cells] if each.entrant == OURS else cells)
    yield words_table(("", *(column.title for column in COLUMNS)), rows).markdown() + "\n"
    yield measured([part[KEY] for each in found for part in each.parts]) + "\n"
    if any(each.busy for each in found):
        yield "† the machine was too busy during a run; the next `make league` repeats it.\n"


_BESIDE = (
    ("TTFT mean", "mean_ttft_ms"),
    ("TPOT mean", "mean_tpot_ms"),
    ("whole answer mean", "mean_e2el_ms"),
    ("tokens/s", "tokens_per_s"),
)


def beside_real(workload: str, folder: Path) -> Iterator[str]:
    """How far one emulated engine was from a real one in this workload, see ``twin``."""
    file = folder / REAL
    parts = json.loads(file.read_bytes()) if file.exists() else {}
    runs = [part for name, part in parts.items() if name.rpartition(", seed ")[0] == workload]
    if not runs:
        return
    ratios = (
        f"{title} {fmean(run['emulated'][key] / run['real'][key] for run in runs):.2f} times"
        for title, key in _BESIDE
    )
    real, emulated = (fmean(run[of]["hit_share"] for run in runs) for of in ("real", "emulated"))
    explained = fmean(run["explained"] for run in runs)
    yield (
        f"One emulated engine beside one of vLLM on a CPU, the same requests "
        f"(`python -m tests.bench.league.twin`): the emulated one's {', '.join(ratios)} the real "
        f"one's; cache hits {emulated:.1%} and {real:.1%}. The step-time model explains "
        f"{explained:.0%} of the real steps' variance. "
        f"{measured([run[KEY] for run in runs])}\n"
    )


def _ms(value: float) -> str:
    return f"{value:,.1f}".removesuffix(".0") + " ms"


def _setting(workload: Workload, found: Sequence[Standing]) -> str:
    most = max(len(each.parts) for each in found)
    targets = ", ".join(f"{k.upper()} {_ms(v)}" for k, v in workload.targets_ms.items())
    text = (
        f"{workload.what[0].upper()}{workload.what[1:]}. {workload.ranks} {engines_of(found)} of "
        f"{workload.slots} slots, time scale {workload.time_scale:g}, seeds: {most}. "
        f"Good: {targets} at most."
    )
    relayed = [
        part["evidence"]
        for each in found
        for part in each.parts
        if isinstance(part.get("evidence"), dict) and "relay_overhead_p50_s" in part["evidence"]
    ]
    if relayed:
        p50, p99 = (
            1e3 * max(each[f"relay_overhead_{of}_s"] for each in relayed) for of in ("p50", "p99")
        )
        text += (
            f" The relay before Dynamo and the predictor adds {p50:.2f} ms (p50) or {p99:.1f} ms "
            "(p99) of wall time at most."
        )
    return text


# --- entrants -------------------------------------------------------------------------------------


def _entrants(tables: Tables) -> Iterator[str]:
    """What each was started with."""
    parts = {each.entrant: each.parts[-1] for _, found in tables for each in found}
    rows = [
        (
            name,
            ", ".join(part["packages"]),
            code(part["flags"]) if part["flags"] else "",
            _what(name, part["what"]),
        )
        for name, part in sorted(parts.items())
    ]
    yield "## Entrants\n"
    yield words_table(("", "PyPI package", "flags", "where a request goes"), rows).markdown() + "\n"


def _what(name: str, what: str) -> str:
    """Where requests go; "the same" is what the entrant does whose name begins this one's."""
    whose, without, _ = name.partition(" without ")
    if not without:
        whose = name.rpartition(" ")[0]
    rest = what.removeprefix("the same, ")
    return what if rest == what else f"as {whose}, {rest}"


def counted(evidence: Mapping[str, float]) -> dict[str, str]:
    """A router's own figures; of single engines, which a number tells, the sum and how many."""
    values: dict[str, list[float]] = {}
    engines = set[str]()
    for key, value in evidence.items():
        words = key.split()
        name = " ".join(word for word in words if not word.isdigit())
        values.setdefault(name, []).append(value)
        if len(words) > len(name.split()):
            engines.add(name)
    return {
        name: f"{sum(each):,.6g}"
        + (f" ({sum(map(bool, each))} of {len(each)} engines)" if name in engines else "")
        for name, each in values.items()
    }


def _evidence(tables: Tables) -> Iterator[str]:
    """What each told of itself after a run, of the last workload that it was in."""
    told: dict[str, tuple[str, Any]] = {}
    for workload, found in tables:
        for each in found:
            if each.parts[-1].get("evidence"):
                told[each.entrant] = workload.name, each.parts[-1]["evidence"]
    if not told:
        return
    yield "## The routers' own counters\n"
    yield (
        "What each told of itself after one run, so that one can see that its state reached it. "
        "Where a router counts for each engine: the sum, and for how many engines the count is "
        "not 0.\n"
    )
    rows = []
    for name, (load, evidence) in sorted(told.items()):
        if isinstance(evidence, dict):
            text = ", ".join(f"{code(name)} {text}" for name, text in counted(evidence).items())
        else:
            text = f"it told nothing: {evidence}"
        rows.append((name, load, text))
    yield words_table(("", "workload", "its own figures"), rows).markdown() + "\n"


def _left_out(folder: Path) -> Iterator[str]:
    rows = [
        (entrant, workload, reason)
        for entrant, each in _summary(folder).get("left_out", {}).items()
        for workload, reason in each.items()
    ]
    if rows:
        yield "## Left out\n"
        yield words_table(("entrant", "workload", "why"), rows).markdown() + "\n"


# --- pictures -------------------------------------------------------------------------------------

_DRAWN = tuple(
    column
    for column in COLUMNS
    if column.key in ("mean_ttft_ms", "mean_tpot_ms", "tokens_per_s", "goodput_per_s")
)


def draw(workload: Workload, found: Sequence[Standing], path: Path) -> None:
    """Bars of the entrants in the table's order, with intervals."""
    figure, every_axes = panels(len(_DRAWN), height=1.2 + 0.28 * len(found), sharey=True)
    places = [-number for number in range(len(found))]
    for axes, column in zip(every_axes, _DRAWN, strict=True):
        told = [each.of(column.key) for each in found]
        axes.barh(
            places,
            [0.0 if each is None else each.mean / column.unit for each in told],
            xerr=[0.0 if each is None else (each.half_width or 0.0) / column.unit for each in told],
            color=[COLOURS[1] if each.entrant == OURS else "0.7" for each in found],
            error_kw={"ecolor": "0.3", "capsize": 2},
        )
        axes.set_yticks(places, [each.entrant for each in found], fontsize=8)
        finish(axes, column.title, "")
    save(figure, path, f"{workload.name}: {engines_of(found)}")


def summarize(
    left_out: Mapping[str, Mapping[str, str]] | None,
    folder: Path = DATA,
    workloads: Mapping[str, Workload] = WORKLOADS,
) -> None:
    """Draw each workload with parts; keep the pictures' hashes, and who is left out where.

    Args:
        left_out: reasons by entrant and workload; None: as they are kept.
        folder: of the parts.
        workloads: that may have some.
    """
    pictures, kinds = list[Path](), set[str]()
    least: dict[str, float | None] = {}
    for workload, found in tables_of(folder, workloads):
        pictures.append(folder / f"{workload.name}.png")
        draw(workload, found, pictures[-1])
        kinds |= {part[KEY]["engines"] for each in found for part in each.parts}
        if workload.fleet:
            least[workload.name] = least_ttft_ms(workload, 0)
    if left_out is None:
        left_out = _summary(folder).get("left_out", {})
    code = tuple(f"tests/bench/league/{name}.py" for name in ("bounds", "page", "standings"))
    header = origin(Engines(kinds.pop()) if len(kinds) == 1 else Engines.UNKNOWN, code)
    write_figures(
        folder / SUMMARY, {"left_out": left_out, "least_ttft_ms": least}, header, *pictures
    )


if __name__ == "__main__":
    summarize(None)
