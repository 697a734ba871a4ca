"""Table of requests that meet their targets."""

from collections.abc import Mapping
from statistics import fmean

from docs.kept_figures import Figures, kept
from loadgen.figures.tables import Table

# What today's routers do under vLLM's own bound of a step; then a smaller one, chosen by hand.
_ORDERS, _SMALLER, _OWN = ("fcfs", "edf", "llm-d"), "edf, 512", "evenstep"


def goodput(parts: Mapping[str, Figures] | None = None) -> Table:
    """Good requests a second: the best of the orders, EDF with a smaller bound, the router."""
    rows: dict[str, list[str]] = {}
    mixes: list[str] = []
    for trace, part in (parts or kept("goodput/goodput.json")).items():
        for cell in part["cells"]:
            mixes += [cell["mix"]] * (cell["mix"] not in mixes)
            means = {
                arm: fmean(run["goodput_per_s"] for run in made)
                for arm, made in cell["runs"].items()
            }
            values = (max(means[arm] for arm in _ORDERS), means[_SMALLER], means[_OWN])
            rate = cell["load"] * part["rate"]
            row = rows.setdefault(f"{trace}, {cell['load']:.0%}, {rate:.1f}/s", [])
            row += [f"{value:.3g}" for value in values]
    header = [f"{mix}: {arm}" for mix in mixes for arm in ("best order", _SMALLER, _OWN)]
    return Table(("trace, load, rate", *header), [(name, *row) for name, row in rows.items()])
