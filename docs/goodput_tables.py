"""Tables of requests that meet their targets, of several groups, and of large fleets."""

from collections.abc import Mapping
from math import ceil
from statistics import fmean

from docs.kept_figures import Figures, kept
from loadgen.figures.tables import Table

# What today's routers do under vLLM's own bound of a step; then a smaller one, chosen by hand.
_ORDERS, _SMALLER, _OWN = ("fcfs", "edf", "llm-d"), "edf, 512", "evenstep"

# Of a core, which also has other work: a decider follows its workers up to here.
_FULL = 0.7


def goodput(parts: Mapping[str, Figures] | None = None) -> Table:
    """Good requests a second: the best of the orders, EDF with a smaller bound, the router."""
    # By trace and load, then by classes and arm.
    rows: dict[str, dict[tuple[str, str], float]] = {}
    for name, part in (parts or kept("goodput/goodput.json")).items():
        trace, arm = name.split(": ")
        for cell in part["cells"]:
            rate = cell["load"] * part["rate"]
            row = rows.setdefault(f"{trace}, {cell['load']:.0%}, {rate:.1f}/s", {})
            row[cell["mix"], arm] = fmean(run["goodput_per_s"] for run in cell["runs"])
    mixes = list(dict.fromkeys(mix for row in rows.values() for mix, _ in row))
    header = [f"{mix}: {arm}" for mix in mixes for arm in ("best order", _SMALLER, _OWN)]
    shown = []
    for title, row in rows.items():
        cells = [title]
        for mix in mixes:
            best = max(row[mix, arm] for arm in _ORDERS)
            cells += [f"{value:.3g}" for value in (best, row[mix, _SMALLER], row[mix, _OWN])]
        shown.append(cells)
    return Table(("trace, load, rate", *header), shown)


def large_fleets() -> Table:
    """What one deciding process needs, by ranks and lengths of answers, waiting or not."""
    rows: list[list[str]] = []
    followed: dict[tuple[int, int], float] = {}
    for row in kept("scale/scale.json")["rows"]:
        # Of each kind the smallest fleet comes first: what it costs is what a part of one costs.
        each = followed.setdefault(
            (row["slots"], row["output_tokens"]), row["ranks"] * _FULL / row["core_at"]
        )
        full = row["slots"] == row["running"]
        title = f"{row['ranks']:,} ranks, {'waiting' if full else 'room'}"
        cells = [row["us_a_snapshot"], row["mbit_per_s"], row["us_a_request"], row["memory_mb"]]
        rest = [f"{each:,.0f}" for each in cells]
        told = f"{row['core_at']:.2f}", str(ceil(row["ranks"] / each))
        rows.append([title, f"{row['output_tokens']:,}", *rest, *told])
    header = ("µs a snapshot", "Mbit/s", "µs a decision", "MB", "cores", "deciders")
    return Table(("", "tokens an answer", *header), rows)


def groups_latency() -> Table:
    """Mean latency over groups, by which one is slow and by load."""
    rules = ("bfio", "jffc", "sed", "least_prefill")
    rows = []
    for slow, part in kept("barriers/barriers.json").items():
        for row in part["rows"]:
            title = f"the {'4' if slow == 'four' else 'second 8'} at half speed, {row['load']:.0%}"
            cells = [f"{row[rule]:.3f}" for rule in rules]
            rows.append([title, *cells, f"{row['of_best']:.2f}"])
    return Table(("", "evenstep", *rules[1:], "of the best"), rows)
