"""Tables of decisions: beside the best possible ones, and how long they take."""

from collections.abc import Sequence

from docs.kept_figures import Figures, Row, kept, words_table
from loadgen.figures.tables import Table


def solver_gaps() -> Table:
    """Gaps to the proven optima with the default budget and with ten times as much."""
    budgets = kept("solver/gap.json")
    default, more = (budgets[f"{moves}_moves"]["classes"] for moves in (30_000, 300_000))
    header = (
        *("programs", "number, proven"),
        *("default budget: optimal, mean gap, largest", "ten times the budget"),
    )
    return words_table(header, _gap_rows(default, more))


def _gap_rows(*budgets: Sequence[Figures]) -> list[Row]:
    return [
        (
            rows[0]["class"],
            f"{rows[0]['instances']}, {100 * rows[0]['proven_share']:.0f} %",
            *map(_gap, rows),
        )
        for rows in zip(*budgets, strict=True)
    ]


def _gap(row: Figures) -> str:
    optimal = f"{100 * row['optimal_share']:.0f} %"
    return f"{optimal}, {row['mean_gap_percent']:.3f} %, {row['max_gap_percent']:.2f} %"


def decision_times() -> Table:
    """Times of a decision of every size that has a limit."""
    rows = []
    for each in kept("decision/decision.json")["sizes"]:
        if each["size"]["limit_ms"] is not None:
            times = (f"{each[part]:.2f} ms" for part in ("p50_ms", "p99_ms"))
            rows.append((_size(each), *times))
    return words_table(("workers, pool, look-ahead", "median", "p99"), rows)


def decision_times_with_memory() -> Table:
    """Times where memory is ample, and where that of every other worker is limited."""
    found = kept("decision/memory.json")
    rows = []
    for ample, limited in zip(found["sizes"], found["with_memory"], strict=True):
        times = [f"{one['p50_ms']:.2f}, {one['p99_ms']:.2f} ms" for one in (ample, limited)]
        rows.append((_size(ample), *times, f"{100 * limited['waiting_share']:.0f} %"))
    header = (
        *("workers, pool, look-ahead", "memory ample: median, p99", "limited: median, p99"),
        "slots left free in",
    )
    return words_table(header, rows)


def _size(timed: Figures) -> str:
    size = timed["size"]
    return f"{size['workers']}, {size['pool']:,}, {size['horizon']}"


def solver_gaps_with_memory() -> Table:
    """Gaps to the proven optima where memory binds."""
    classes = kept("solver/gap.json")["30000_moves_memory"]["classes"]
    header = ("programs", "number, proven", "default budget: optimal, mean gap, largest")
    return words_table(header, _gap_rows(classes))


def hindsight() -> Table:
    """Total latency above the least possible one, over the families of tiny instances."""
    families = kept("admission/hindsight.json")["families"]
    rows = []
    for policy in families[0]["policies"]:
        anew = [family["policies"][policy]["restart"] for family in families]
        resumed = [family["policies"][policy]["keep"] for family in families]
        most = max(each["ratio_max"] for each in anew)
        rows.append(
            (
                _HINDSIGHT.get(policy, f"`{policy}`"),
                _range([100 * (each["ratio_mean"] - 1) for each in anew], 1),
                f"{100 * (most - 1):.0f} %",
                _range([100 * each["optimal_share"] for each in anew], 0),
                _range([100 * each["below_share"] for each in resumed], 0),
            )
        )
    header = (
        *("policy", "above the optimum on average", "at most", "optimal"),
        "if evicted requests resume: below it",
    )
    return words_table(header, rows)


def _range(percents: Sequence[float], digits: int) -> str:
    least, most = (f"{each:.{digits}f}" for each in (min(percents), max(percents)))
    return f"{least} %" if least == most else f"{least} to {most} %"


_HINDSIGHT = {"off": "vLLM's own order", "memory_checked, no ageing": "`memory_checked`, no ageing"}


def look_ahead() -> Table:
    """Imbalance with an oracle's look-ahead beside none, by trace."""
    header = (
        *("lengths", "prompt, output", "without, 10⁴ tokens", "oracle"),
        *("ratio, each seed's", "throughput"),
    )
    runs = kept("simulator/look_ahead.json")["runs"]
    return words_table(header, [_look_ahead_row(run) for run in runs])


def _look_ahead_row(run: Figures) -> Row:
    least, most = min(run["ratios"]), max(run["ratios"])
    gained = run["oracle_tok_s"] / run["none_tok_s"] - 1
    return (
        run["trace"],
        f"{run['prompt_tokens']:,.0f}, {run['output_tokens']:,.0f}",
        f"{run['none_imbalance'] / 1e4:.2f}",
        f"{run['oracle_imbalance'] / 1e4:.2f}",
        f"{run['ratio']:.2f} ({least:.2f} to {most:.2f})",
        f"{100 * gained:+.1f} %",
    )


def end_signal_skill() -> Table:
    """Brier skill of what foretells a trained model's ends, by steps ahead."""
    horizons = kept("end_signal/skill.json")["skill"]["horizons"]
    ways = next(iter(horizons.values()))["skill"]
    rows = [
        (way, *(_with_interval(found["skill"][way]) for found in horizons.values())) for way in ways
    ]
    header = ("foretold by, steps ahead", *horizons)
    return words_table(header, rows)


def end_signal_gain() -> Table:
    """Imbalance and throughput by what look-ahead knows of a trained model's ends."""
    ways = kept("end_signal/skill.json")["gain"]["ways"]
    rows = [
        (
            way,
            _between(found["skills"], "{:.2f}"),
            _between(found["horizons"], "{}"),
            _with_interval(found["imbalance"]),
            _with_interval(found["tokens_per_s"]),
        )
        for way, found in ways.items()
    ]
    header = ("look-ahead knows", "skill", "H", "imbalance", "tokens/s")
    return words_table(header, rows)


def _with_interval(found: Sequence[float]) -> str:
    mean, low, high = (f"{each:.3f}" for each in found)
    return mean if low == high else f"{mean} ({low} to {high})"


def _between(each: Sequence[float | None], form: str) -> str:
    """Least and most of those that are known."""
    known = [one for one in each if one is not None]
    bounds = [form.format(one) for one in (min(known), max(known))] if known else ["–"]
    return " to ".join(dict.fromkeys(bounds))
