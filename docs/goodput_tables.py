"""Table of requests that meet their targets."""

from collections.abc import Mapping
from statistics import fmean

from docs.kept_figures import Figures, Row, kept
from loadgen.figures.tables import Table, shown
from loadgen.report.intervals import estimate

_OWN = "evenstep"


def goodput(parts: Mapping[str, Figures] | None = None) -> Table:
    """Good requests a second of each order, and the router's beside the best of them."""
    parts = parts or kept("goodput/goodput.json")
    arms = list(next(iter(parts.values()))["runs"])
    return Table(
        ("trace, classes, load", *arms, "x of the best other"),
        [(name, *_cells(part["runs"])) for name, part in parts.items()],
    )


def _cells(runs: Mapping[str, list[Figures]]) -> Row:
    every = {arm: [run["goodput_per_s"] for run in made] for arm, made in runs.items()}
    others = {arm: fmean(made) for arm, made in every.items() if arm != _OWN}
    best = max(others, key=lambda arm: others[arm])
    ratios = estimate([own / its for own, its in zip(every[_OWN], every[best], strict=True)])
    return [*(f"{fmean(made):.2f}" for made in every.values()), shown(ratios, 1.0, 2)]
