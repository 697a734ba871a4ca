"""Page and pictures of the league, from its kept parts.

python -m tests.bench.league.page    # draws the pictures; docs.generate writes the page
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from docs.kept_figures import read_figures, words_table
from docs.markdown import code
from docs.measured import measured
from loadgen.report.charts import COLOURS, finish, panels, save
from loadgen.report.origin import KEY, Engines, origin
from tests.bench.league.bounds import least_ttft_ms
from tests.bench.league.parts import DATA, OURS
from tests.bench.league.places import behind_text, places_text, shown
from tests.bench.league.standings import COLUMNS, Standing, Tables, tables_of
from tests.bench.league.workloads import WORKLOADS, Workload
from tests.support.figure_files import write_figures

SUMMARY, REAL = "league.json", "real-engine.json"
# Where the site has the pictures.
PICTURES = "../../tests/data/league/"
# Whose counters the page shows, where an entrant was in it: conversations share beginnings.
TELLING = "chat"


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
        *(behind_text(tables), places_text(tables), _tables(tables, once, folder, pictures)),
        *(_entrants(both), _evidence(both), _left_out(folder)),
    )
    return "\n".join(line for part in parts for line in part).rstrip()


def _summary(folder: Path) -> Mapping[str, Any]:
    """What ``summarize`` has kept; nothing before."""
    file = folder / SUMMARY
    return read_figures(file) if file.exists() else {}


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
    """What each told of itself after ``chat``, or else after the first workload that it was in."""
    told: dict[str, tuple[str, Any]] = {}
    for workload, found in sorted(tables, key=lambda each: each[0].name != TELLING):
        for each in found:
            if each.parts[-1].get("evidence"):
                told.setdefault(each.entrant, (workload.name, each.parts[-1]["evidence"]))
    if not told:
        return
    yield "## The routers' own counters\n"
    yield (
        f"What each told of itself after one run, so that one can see that its state reached it: "
        f"of `{TELLING}`, else of the first workload that it was in. "
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
    code = tuple(
        f"tests/bench/league/{name}.py" for name in ("bounds", "page", "places", "standings")
    )
    header = origin(Engines(kinds.pop()) if len(kinds) == 1 else Engines.UNKNOWN, code)
    write_figures(
        folder / SUMMARY, {"left_out": left_out, "least_ttft_ms": least}, header, *pictures
    )


if __name__ == "__main__":
    summarize(None)
