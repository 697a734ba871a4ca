"""All outcomes as one JSON document and as Markdown; the JSON can be read again."""

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from loadgen.figures.samples import Claim, Outcomes, Sample
from loadgen.figures.studies import STUDIES
from loadgen.figures.study import options_of
from loadgen.figures.tables import Table
from loadgen.figures.trials import QUICK_SEEDS, QUICK_SHARE
from loadgen.report.origin import KEY, Document
from router.core.errors import InputError

JSON_NAME, MARKDOWN_NAME = "figures.json", "figures.md"
STATEMENT = (
    "Simulated in virtual time by the paper's step-time model, with the live router's own pool, "
    "look-ahead and policies: no GPU's figures. Mean ± half of the 95 % interval (Student's t over "
    "the seeds, 5 unless said otherwise)."
)

QUICK_STATEMENT = (
    f"Quick: a {QUICK_SHARE}th of the steps and {QUICK_SEEDS} seeds at most, whatever is said "
    "below. It shows that everything works; the numbers are no results, and no claim is judged."
)


def document(
    outcomes: Mapping[str, Outcomes],
    origins: Mapping[str, Document] | None = None,
    *,
    quick: bool = False,
) -> Document:
    """Every number with its settings and its command, JSON-able, by name of the study.

    ``quick``: from shortened runs. ``origins``: as far as they are known.
    """
    mark = {"quick": True} if quick else {}
    (usual,) = options_of("burstgpt", "bfio, no look-ahead").configs()
    return {
        "statement": QUICK_STATEMENT if quick else STATEMENT,
        **mark,
        "versions": {"evenstep": version("evenstep"), "numpy": version("numpy")},
        "defaults": {
            name: value
            for name, value in usual.described().items()
            if name not in ("policy", "lengths", "seed")
        },
        "studies": {
            name: _study(name, found, (origins or {}).get(name), quick)
            for name, found in outcomes.items()
        },
    }


def _study(name: str, outcomes: Outcomes, origin: Document | None, quick: bool) -> Document:
    study = STUDIES[name]
    claims = [] if quick else claims_of(name, outcomes)
    return {
        **({} if origin is None else {KEY: origin}),
        "title": study.title,
        "conditions": study.conditions,
        "cases": [
            {
                "key": list(key),
                "command": sample.command,
                "differs": sample.differs,
                "values": dict(sample.values),
            }
            for key, sample in outcomes.items()
        ],
        "claims": [
            {"claim": claim.text, "bound": claim.bound, "found": claim.found, "met": claim.met}
            for claim in claims
        ],
    }


def origins_of(document_: Document) -> dict[str, Document]:
    """The origins in a document, by study."""
    return {name: study[KEY] for name, study in document_["studies"].items() if KEY in study}


def outcomes_of(document_: Document) -> dict[str, Outcomes]:
    """The outcomes in a document, without the steps of single runs."""
    return {
        name: {
            tuple(case["key"]): Sample(case["values"], case["command"], case["differs"])
            for case in study["cases"]
        }
        for name, study in document_["studies"].items()
    }


def read_document(folder: Path, *, quick: bool = False) -> Document | None:
    """The document of an earlier run, which ``quick`` runs will complete; None if there is none.

    Raises:
        InputError: the file is no such document, the present studies cannot show it, or one of file
            and new runs is quick and the other is not.
    """
    path = folder / JSON_NAME
    if not path.exists():
        return None
    try:
        found: Document = json.loads(path.read_text(encoding="utf-8"))
        kept = bool(found.get("quick"))
        outcomes = {name: each for name, each in outcomes_of(found).items() if name in STUDIES}
        markdown(outcomes, {}, quick=kept)
    except (OSError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InputError(
            f"{path} is not a file of figures of this version ({error!r}); delete it"
        ) from error
    if kept != quick:
        held, added = ("quick", "full") if kept else ("full", "quick")
        raise InputError(f"{path} holds {held} runs, and {added} ones go elsewhere: give an --out")
    return found


def json_text(document_: Document) -> str:
    """JSON with one line per case, for readable diffs."""
    studies = []
    for name, study in document_["studies"].items():
        head = {key: value for key, value in study.items() if key != "cases"}
        cases = ",\n".join(f"    {_compact(case)}" for case in study["cases"])
        studies.append(f' {_compact(name)}: {_compact(head)[:-1]}, "cases": [\n{cases}]}}')
    head = {key: value for key, value in document_.items() if key != "studies"}
    return f'{_compact(head)[:-1]},\n"studies": {{\n' + ",\n".join(studies) + "}}\n"


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def score(outcomes: Mapping[str, Outcomes]) -> str:
    """Number of claims that are met."""
    verdicts = [claim.met for name, found in outcomes.items() for claim in claims_of(name, found)]
    return f"{sum(verdicts)} of {len(verdicts)} claims are met."


def claims_table(outcomes: Mapping[str, Outcomes]) -> Table:
    """Every claim of every study, met or missed."""
    claims = [(name, claim) for name, found in outcomes.items() for claim in claims_of(name, found)]
    rows = [[name, *claim.row()] for name, claim in claims]
    return Table(["study", "claim", "bound", "found", ""], rows, text_columns=2)


def claims_of(name: str, outcomes: Outcomes) -> Sequence[Claim]:
    """Claims of one study."""
    return list(STUDIES[name].claims(outcomes))


def markdown(
    outcomes: Mapping[str, Outcomes], pictures: Mapping[str, str], *, quick: bool = False
) -> str:
    """All tables, with pictures by file name; ``quick``: from shortened runs."""
    if quick:
        parts = ["# Simulated figures (quick: no results)", QUICK_STATEMENT]
    else:
        parts = ["# Simulated figures", STATEMENT, "## Claims", score(outcomes)]
        parts.append(claims_table(outcomes).markdown())
    for name, found in outcomes.items():
        study = STUDIES[name]
        parts += [f"## {study.title}", study.conditions]
        if name in pictures:
            parts.append(f"![{study.title}]({pictures[name]})")
        parts += [table.markdown() for table in study.tables(found)]
        if words := study.words(found):
            parts.append(words)
        command = next((sample.command for sample in found.values() if sample.command), None)
        if command is not None:
            parts.append(f"A single run of it, the first case: `{command}`")
    return "\n\n".join(parts) + "\n"
