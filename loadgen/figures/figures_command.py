"""``evenstep figures``: run the studies, write tables, pictures and one JSON."""

from pathlib import Path
from typing import Annotated

from rich.console import Console

from loadgen.figures.figures_document import (
    JSON_NAME,
    MARKDOWN_NAME,
    claims_of,
    document,
    json_text,
    markdown,
    origins_of,
    outcomes_of,
    read_document,
)
from loadgen.figures.laboratory import Bench
from loadgen.figures.samples import Outcomes
from loadgen.figures.studies import STUDIES
from loadgen.report.load_pictures import require_matplotlib
from loadgen.report.origin import Document, with_files
from loadgen.run.child_processes import signals_as_interrupts
from loadgen.run.options import chosen
from router.commands.options import flag
from router.core.errors import InputError


def figures(
    out: Annotated[Path, flag("Takes tables, pictures and the JSON.", "DIR")] = Path("out/figures"),
    runs: Annotated[Path, flag("Takes each finished run, found again.", "DIR")] = Path(
        "out/figures/runs"
    ),
    only: Annotated[str, flag(f"Of {', '.join(STUDIES)}; empty: all of them.", "NAME,…")] = "",
    processes: Annotated[int, flag("Runs at a time.", "N", least=1)] = 2,
    quick: Annotated[
        bool, flag("Few steps and seeds: shows that it works, no figures.", name="--quick")
    ] = False,
) -> None:
    """Simulate the paper's experiments and this project's own; finished runs are not repeated."""
    names = chosen("--only", "study", only or ",".join(STUDIES), STUDIES)
    require_matplotlib()
    console = Console(stderr=True)
    bench = Bench(runs, processes, quick, lambda line: _say(console, line))
    try:
        out.mkdir(parents=True, exist_ok=True)
        with signals_as_interrupts():
            read_document(out, quick=quick)  # Report errors before the long work.
            for name in names:
                _study(name, bench, out, console)
    except OSError as error:
        raise InputError(f"cannot write {error.filename}: {error.strerror}") from error


def _study(name: str, bench: Bench, out: Path, console: Console) -> None:
    study = STUDIES[name]
    _say(console, f"== {name}: {study.title}")
    outcomes = study.measure(bench)
    pictures = [out / each for each in (f"{name}.png", *study.further_pictures) if study.draws]
    if pictures:
        study.draw(outcomes, pictures[0])
    _write(out, name, outcomes, with_files(study.origin(), *pictures), quick=bench.quick)
    for claim in () if bench.quick else claims_of(name, outcomes):
        text, bound, found, verdict = claim.row()
        _say(console, f"{verdict.strip('*')}: {text}: {found} ({bound})")


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def _write(out: Path, name: str, outcomes: Outcomes, origin: Document, *, quick: bool) -> None:
    """Replace what an earlier run wrote of one study."""
    earlier = read_document(out, quick=quick)
    found = (outcomes_of(earlier) if earlier else {}) | {name: outcomes}
    origins = (origins_of(earlier) if earlier else {}) | {name: origin}
    ordered = {each: found[each] for each in STUDIES if each in found}
    written = document(ordered, origins, quick=quick)
    (out / JSON_NAME).write_text(json_text(written), encoding="utf-8")
    pictures = {each: f"{each}.png" for each in ordered if STUDIES[each].draws}
    (out / MARKDOWN_NAME).write_text(markdown(ordered, pictures, quick=quick), encoding="utf-8")
