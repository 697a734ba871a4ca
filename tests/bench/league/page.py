"""Page and pictures of the league, from its kept parts.

python -m tests.bench.league.page    # draws the pictures; docs.generate writes the page
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from docs.kept_figures import words_table
from docs.markdown import code
from docs.measured import measured
from loadgen.report.charts import COLOURS, finish, panels, save
from loadgen.report.intervals import Estimate, estimate
from loadgen.report.origin import KEY, Engines, origin, read_figures, write_figures
from tests.bench.league.parts import DATA, kept_parts
from tests.bench.league.workloads import WORKLOADS, Workload

OURS = "evenstep"
SUMMARY = "league.json"
# Evenstep leads where its figure is at most so much worse than the first one's.
LEADS = 0.03
# Entrants that fail more of the requests stand after all others, however fast the rest was.
MOST_FAILED = 0.01


@dataclass(frozen=True, slots=True)
class Column:
    """A figure of the tables: the value over ``unit``, or of ``value``."""

    title: str
    key: str
    unit: float = 1.0
    digits: int = 0
    interval: bool = True


COLUMNS = (
    Column("TTFT mean, ms", "mean_ttft_ms"),
    Column("TTFT p99, ms", "p99_ttft_ms"),
    Column("TPOT mean, ms", "mean_tpot_ms", digits=1),
    Column("TPOT p99, ms", "p99_tpot_ms", digits=1),
    Column("whole answer mean, s", "mean_e2el_ms", 1e3, 2),
    Column("whole answer p99, s", "p99_e2el_ms", 1e3, 2),
    Column("tokens/s", "tokens_per_s"),
    Column("good/s", "goodput_per_s", digits=1),
    Column("cache hits, %", "hit_share", 0.01, 1),
    Column("idle, %", "idle_share", 0.01, 1),
    Column("failed, lost", "failed", digits=1, interval=False),
    Column("router CPU, s", "router_cpu_s", digits=1, interval=False),
    Column("MB", "router_memory_mb", interval=False),
)
# Figures in which evenstep may be behind, besides the one that orders a workload.
JUDGED = (
    "mean_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "mean_e2el_ms",
    "-tokens_per_s",
    "-goodput_per_s",
)


@dataclass(frozen=True, slots=True)
class Standing:
    """An entrant in one workload: the parts of its seeds."""

    entrant: str
    parts: Sequence[Mapping[str, Any]]

    def of(self, key: str) -> Estimate | None:
        """Mean over seeds; None: some seed has no such figure."""
        values = [part.get(key) for part in self.parts]
        numbers = [float(value) for value in values if isinstance(value, int | float)]
        return estimate(numbers) if len(numbers) == len(values) else None

    @property
    def failed_share(self) -> float:
        asked = sum(part["completed"] + part["failed"] for part in self.parts)
        return float(sum(part["failed"] for part in self.parts) / max(asked, 1))

    @property
    def busy(self) -> bool:
        return any(part["busy"] for part in self.parts)


Tables = Sequence[tuple[Workload, Sequence[Standing]]]


def standings(workload: Workload, parts: Mapping[str, Mapping[str, Any]]) -> list[Standing]:
    """Entrants, the best first."""
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for name, part in parts.items():
        by_name.setdefault(name.rpartition(", seed ")[0], []).append(part)
    found = [Standing(name, each) for name, each in by_name.items()]
    return sorted(found, key=partial(_order, workload))


def _order(workload: Workload, each: Standing) -> tuple[bool, float, float]:
    ttft = each.of("mean_ttft_ms")
    value = worth(workload.first_by, each)
    return _fails(workload, each), value, float("inf") if ttft is None else ttft.mean


def _fails(workload: Workload, each: Standing) -> bool:
    return workload.first_by != "failed" and each.failed_share > MOST_FAILED


def worth(by: str, each: Standing) -> float:
    """A figure, the less the better; ``-`` before it: the more."""
    found = each.of(by.removeprefix("-"))
    if found is None:
        return float("inf")
    return -found.mean if by.startswith("-") else found.mean


@dataclass(frozen=True, slots=True)
class Verdict:
    """Evenstep's place by a figure, from 1, beside the first; ``behind``: by which share."""

    workload: Workload
    by: str
    place: int
    of: int
    first: Standing
    ours: Standing
    behind: float

    @property
    def leads(self) -> bool:
        return self.behind <= LEADS


def verdict(workload: Workload, found: Sequence[Standing], by: str = "") -> Verdict | None:
    """By the figure that orders the workload, or by another; None: evenstep has no such figure."""
    by = by or workload.first_by
    ranked = sorted(found, key=lambda each: (_fails(workload, each), worth(by, each)))
    place = next((n for n, each in enumerate(ranked) if each.entrant == OURS), None)
    if place is None or ranked[place].of(by.removeprefix("-")) is None:
        return None
    first, ours = worth(by, ranked[0]), worth(by, ranked[place])
    behind = (ours - first) / abs(first) if first else float(ours > first)
    if _fails(workload, ranked[place]) and not _fails(workload, ranked[0]):
        behind = max(behind, 1.0)
    return Verdict(workload, by, place + 1, len(ranked), ranked[0], ranked[place], behind)


def verdicts(tables: Tables) -> list[Verdict]:
    """Where evenstep is behind in any figure, the furthest first; then where it leads."""
    judged: list[Verdict] = []
    for workload, found in tables:
        for by in dict.fromkeys((workload.first_by, *JUDGED)):
            each = verdict(workload, found, by)
            if each is not None and (by == workload.first_by or not each.leads):
                judged.append(each)
    return sorted(judged, key=lambda each: (each.leads, 0.0 if each.leads else -each.behind))


# --- text -----------------------------------------------------------------------------------------


def shown(found: Estimate | None, column: Column) -> str:
    if found is None:
        return "–"
    text = f"{found.mean / column.unit:,.{column.digits}f}"
    if found.half_width is None or not column.interval:
        return text
    return f"{text} ± {found.half_width / column.unit:,.{column.digits}f}"


def tables_of(folder: Path = DATA) -> Tables:
    """Every workload with parts."""
    return [
        (workload, standings(workload, kept))
        for workload in WORKLOADS.values()
        if (kept := kept_parts(workload.name, folder))
    ]


def league_text(folder: Path = DATA) -> str:
    """What the page has of the kept parts."""
    tables = tables_of(folder)
    if not tables:
        return "Nothing has been measured yet."
    return "\n".join(
        [*_places(tables), *_tables(tables, folder), *_entrants(tables), *_left_out(folder)]
    ).rstrip()


def places(tables: Tables) -> Iterator[Sequence[str]]:
    """Rows of the first table."""
    columns = {column.key: column for column in COLUMNS}
    for each in verdicts(tables):
        key = each.by.removeprefix("-")
        title = columns[key].title
        ours, first = (shown(one.of(key), columns[key]) for one in (each.ours, each.first))
        cells = [f"[{each.workload.name}](#{each.workload.name})", title, ours]
        behind = f"{each.behind:+.1%}" if each.place > 1 else "first"
        cells += [f"{each.first.entrant}: {first}", behind, f"{each.place} of {each.of}"]
        yield cells if each.leads else [f"**{cell}**" for cell in cells]


def _places(tables: Tables) -> Iterator[str]:
    yield "## Where evenstep stands\n"
    yield (
        f"Bold, and first: figures in which evenstep is more than {LEADS:.0%} behind the best. "
        "Then the figure that orders a workload. An interval is 95 % over seeds; a single seed has "
        "none.\n"
    )
    header = ("workload", "figure", "evenstep", "the first", "behind by", "place")
    yield words_table(header, [*places(tables)]).markdown() + "\n"


def _tables(tables: Tables, folder: Path) -> Iterator[str]:
    for workload, found in tables:
        most = max(len(each.parts) for each in found)
        yield f"## {workload.name}\n"
        yield (
            f"{workload.what[0].upper()}{workload.what[1:]}. {workload.ranks} emulated ranks of "
            f"{workload.slots} slots, time scale {workload.time_scale:g}, seeds: {most}. Good: "
            f"{', '.join(f'{k} {v:g} ms' for k, v in workload.targets_ms.items())} at most.\n"
        )
        rows = []
        for each in found:
            name = f"{each.entrant}{' †' if each.busy else ''}"
            cells = [name, *(shown(each.of(column.key), column) for column in COLUMNS)]
            rows.append([f"**{cell}**" for cell in cells] if each.entrant == OURS else cells)
        yield words_table(("", *(column.title for column in COLUMNS)), rows).markdown() + "\n"
        yield measured([part[KEY] for each in found for part in each.parts]) + "\n"
        if any(each.busy for each in found):
            yield "† the machine was too busy during a run; the next call repeats it.\n"
        if (folder / f"{workload.name}.png").exists():
            yield f"![{workload.name}](../../tests/data/league/{workload.name}.png)\n"


def _entrants(tables: Tables) -> Iterator[str]:
    """What each was started with."""
    parts = {each.entrant: each.parts[-1] for _, found in tables for each in found}
    rows = [
        (
            name,
            ", ".join(part["packages"]),
            code(part["flags"]) if part["flags"] else "",
            part["what"],
        )
        for name, part in sorted(parts.items())
    ]
    yield "## Entrants\n"
    yield words_table(("", "of PyPI", "flags", "where a request goes"), rows).markdown() + "\n"


def _left_out(folder: Path) -> Iterator[str]:
    file = folder / SUMMARY
    if not file.exists():
        return
    rows = [
        (entrant, workload, reason)
        for entrant, each in read_figures(file)["left_out"].items()
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
    caption = f"{workload.name}: emulated engines, time scale {workload.time_scale:g}"
    save(figure, path, caption)


def summarize(left_out: Mapping[str, Mapping[str, str]] | None, folder: Path = DATA) -> None:
    """Draw each workload with parts; keep the pictures' hashes, and who is left out where.

    Args:
        left_out: reasons by entrant and workload; None: as they are kept.
        folder: of the parts.
    """
    file, pictures = folder / SUMMARY, list[Path]()
    for workload, found in tables_of(folder):
        pictures.append(folder / f"{workload.name}.png")
        draw(workload, found, pictures[-1])
    if left_out is None:
        left_out = read_figures(file)["left_out"] if file.exists() else {}
    code = ("tests/bench/league/page.py",)
    header = origin(Engines.EMULATED, code)
    write_figures(file, {"left_out": left_out}, header, *pictures)


if __name__ == "__main__":
    summarize(None)
