"""Tables of the prompt budget of a step."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from docs.kept_figures import Figures, Row, kept
from loadgen.figures.tables import TPOT, TTFT, TTFT_P99, Column, Table, shown
from loadgen.report.intervals import estimate

_COLUMNS = (TTFT, TTFT_P99, TPOT, Column("TPOT p99, ms", "tpot_p99_s", 1e-3))


def budgets(parts: Mapping[str, Figures] | None = None) -> Table:
    """Constant budgets, the router's, and beside it the best constant one that meets its target."""
    parts = parts or kept("prompt_budget/budgets.json")
    means = {
        name: {each.metric: fmean(run[each.metric] for run in part["runs"]) for each in _COLUMNS}
        for name, part in parts.items()
    }
    rows = []
    for name, part in parts.items():
        best, target = "", part["options"].get("target_tpot")
        if target is not None:
            able = [
                each for each in means if each.isdecimal() and means[each][TPOT.metric] <= target
            ]
            found = min(able, key=lambda each: means[each][TTFT.metric], default=None)
            best = "none meets it"
            if found is not None:
                ratio = means[name][TTFT.metric] / means[found][TTFT.metric]
                best = f"x {ratio:.2f} of {int(found):,} tokens'"
        title = f"{int(name):,}" if name.isdecimal() else name
        rows.append((title, *_cells(part["runs"]), best))
    header = ("budget", *(each.title for each in _COLUMNS), "its TTFT beside the best constant's")
    return Table(header, rows)


def windows() -> Table:
    """Budgets in windows and in each step, where any prompts add to a step."""
    rows = [
        (
            f"TPOT {1e3 * found['target_tpot']:g} ms"
            + (f", TTFT {found['target_ttft']:g} s" if found["target_ttft"] else ""),
            found["budget"],
            *_cells(found["runs"]),
        )
        for found in kept("prompt_budget/windows.json")["rows"]
    ]
    header = ("targets", "prompts in", *(each.title for each in _COLUMNS))
    return Table(header, rows, text_columns=2)


def _cells(runs: Sequence[Figures]) -> Row:
    return [
        shown(estimate([run[each.metric] for run in runs]), each.unit, each.digits)
        for each in _COLUMNS
    ]
