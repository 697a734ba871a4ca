"""Tables of the pages, made of the figures that are kept under tests/data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import starmap
from statistics import fmean
from typing import Any

from docs.stale_figures import DATA, kept_headers
from loadgen.demo.demo_report import SUBJECT
from loadgen.figures.figures_document import outcomes_of
from loadgen.figures.studies import STUDIES
from loadgen.figures.tables import Table
from loadgen.report.intervals import paired
from loadgen.report.origin import read_figures

Row = Sequence[str]
Figures = dict[str, Any]


def words_table(header: Row, rows: Sequence[Row]) -> Table:
    """A table whose columns all stand at the left."""
    return Table(header, rows, text_columns=len(header))


@cache
def kept(name: str) -> Figures:
    """Figures of a kept file, read once for all pages."""
    return read_figures(DATA / name)


# --- demo -----------------------------------------------------------------------------------------


def demo() -> Table:
    """Every run of the demo."""
    header = (
        *("policy, dispatch", "imbalance, 10⁴ tokens", "idle share (modelled)"),
        *("throughput, tok/s", "TPOT, ms", "TTFT mean / p99, ms", "J per token"),
        *("mean load, tokens", "mean prompt admitted", "errors, lost"),
    )
    return words_table(header, [_demo_row(run) for run in kept("demo/summary.json")["runs"]])


def demo_short() -> Table:
    """The first columns of the demo's table."""
    whole = demo()
    return words_table(whole.header[:6], [row[:6] for row in whole.rows])


def _demo_row(run: Figures) -> Row:
    steps, replay = run["steps_steady"], run["replay"]
    cells = (
        f"{run['policy']}, {run['dispatch']}",
        f"{steps['imbalance_tokens'] / 1e4:.2f}",
        f"{100 * steps['idle_share']:.1f} %",
        f"{run['throughput_tok_s']:,.0f}",
        f"{replay['mean_tpot_ms']:.2f}",
        f"{replay['mean_ttft_ms']:.0f} / {replay['p99_ttft_ms']:.0f}",
        f"{steps['energy_j_per_token']:.4f}",
        f"{steps['mean_load_tokens']:,.0f}",
        f"{replay['steady']['mean_admitted_prompt_tokens']:.0f}",
        f"{replay['failed']}, {replay['lost']}",
    )
    return tuple(f"**{cell}**" for cell in cells) if run["policy"] == SUBJECT else cells


def demo_comparison() -> str:
    """BF-IO beside the faster baseline of the demo."""
    ratios = kept("demo/summary.json")["comparison"]
    policy, _, dispatch = ratios["baseline"].partition("-")
    return (
        f"Against the faster baseline in its better form of dispatch (`{policy}`, {dispatch}): "
        f"imbalance x {ratios['imbalance_ratio']:.2f}, throughput x "
        f"{ratios['throughput_ratio']:.3f}, TPOT x {ratios['tpot_ratio']:.3f}, energy per token x "
        f"{ratios['energy_per_token_ratio']:.3f}."
    )


# --- cost of the router ---------------------------------------------------------------------------

_TARGETS = {
    "evenstep": "evenstep",
    "evenstep-rr": "`--policy round_robin`",
    "evenstep-asgi": "`--data-plane asgi`",
    "evenstep-2": "`--processes 2`",
    "vllm-router": "vllm-router 0.1.17",
    "sglang-router": "sglang-router 0.3.2",
}
_CPU_ROWS = {
    "a request, 64 clients, answers at once": ("unary", "request"),
    "a request, one client": ("unary1", "request"),
    "an event, 64 streams of 50, 20 ms apart": ("paced", "event"),
    "an event, 512 streams of 75": ("fleet", "event"),
}


def router_cost() -> Table:
    """CPU, added time and memory of every target, CPU beside vllm-router's."""
    figures = kept("router/bench.json")
    rows = []
    for name, (test, per) in _CPU_ROWS.items():
        us = {key: figures["medians"][test][key][f"cpu_us_per_{per}"] for key in _TARGETS}
        cells = [f"{each:.0f} ({each / us['vllm-router']:.2f})" for each in us.values()]
        rows.append((name, *cells))
    first = {name: row["first_p50_ms"] for name, row in figures["medians"]["unary1"].items()}
    added = [f"{first[key] - first['none']:.2f}" for key in _TARGETS]
    memory = [f"{figures['memory_mb'][key]:.0f}" for key in _TARGETS]
    rows.append(("added to the first byte, one client, ms", *added))
    rows.append(("memory after it (PSS), MB", *memory))
    header = ("CPU us (in parentheses: of vllm-router's)", *_TARGETS.values())
    return words_table(header, rows)


def router_cost_short() -> Table:
    """Evenstep beside vllm-router, with units."""
    rows = []
    for name, *cells in router_cost().rows:
        words = name.rpartition(", ")
        what, unit = (words[0], words[2]) if words[2] in ("ms", "MB") else (name, "us")
        ours, theirs = (cells[index].split()[0] for index in (0, 4))
        rows.append((what, f"{ours} {unit}", f"{theirs} {unit}"))
    return words_table(("", "evenstep", "vllm-router 0.1.17"), rows)


# --- the cost of a step ---------------------------------------------------------------------------


def step_costs() -> Table:
    """How far learned numbers are off, and how often their intervals hold the truth."""
    rows = []
    for found in kept("step_fit/step_fit.json")["learned"]:
        for number, title in _NUMBERS.items():
            rows.append(
                (
                    f"{100 * found['noise']:.0f} %",
                    title,
                    f"{100 * found['median_off'][number]:.2f} %",
                    f"{100 * found['largest_off'][number]:.2f} %",
                    f"{100 * found['near_or_inside'][number]:.0f} %",
                )
            )
    header = ("noise of a step", "number", "off: median", "largest", "within 5 % or its interval")
    return words_table(header, rows)


_NUMBERS = {
    "base_s": "C",
    "per_token_s": "t_l",
    "per_request_s": "t_r",
    "per_prompt_token_s": "t_p",
}


# --- solver ---------------------------------------------------------------------------------------


def solver_gaps() -> Table:
    """Gaps to the proven optima with the default budget and with ten times as much."""
    budgets = kept("solver/gap.json")
    default, more = (budgets[f"{moves}_moves"]["classes"] for moves in (30_000, 300_000))
    rows = [
        (
            row["class"],
            f"{row['instances']}, {100 * row['proven_share']:.0f} %",
            _gap(row),
            _gap(other),
        )
        for row, other in zip(default, more, strict=True)
    ]
    header = (
        *("programs", "number, proven"),
        *("default budget: optimal, mean gap, largest", "ten times the budget"),
    )
    return words_table(header, rows)


def _gap(row: Figures) -> str:
    optimal = f"{100 * row['optimal_share']:.0f} %"
    return f"{optimal}, {row['mean_gap_percent']:.3f} %, {row['max_gap_percent']:.2f} %"


def decision_times() -> Table:
    """Times of a decision of every size that has a limit."""
    rows = []
    for each in kept("decision/decision.json")["sizes"]:
        size = each["size"]
        if size["limit_ms"] is None:
            continue
        name = f"{size['workers']}, {size['pool']:,}, {size['horizon']}"
        rows.append((name, f"{each['p50_ms']:.2f} ms", f"{each['p99_ms']:.2f} ms"))
    return words_table(("workers, pool, look-ahead", "median", "p99"), rows)


def decision_times_with_memory() -> Table:
    """Times where memory is ample, and where that of every other worker is limited."""
    found = kept("decision/memory.json")
    rows = []
    for ample, limited in zip(found["sizes"], found["with_memory"], strict=True):
        size = ample["size"]
        name = f"{size['workers']}, {size['pool']:,}, {size['horizon']}"
        times = [f"{one['p50_ms']:.2f}, {one['p99_ms']:.2f} ms" for one in (ample, limited)]
        rows.append((name, *times, f"{100 * limited['waiting_share']:.0f} %"))
    header = (
        *("workers, pool, look-ahead", "memory ample: median, p99", "limited: median, p99"),
        "slots left free in",
    )
    return words_table(header, rows)


def solver_gaps_with_memory() -> Table:
    """Gaps to the proven optima where memory binds."""
    rows = [
        (
            row["class"],
            f"{row['instances']}, {100 * row['proven_share']:.0f} %",
            _gap(row),
        )
        for row in kept("solver/gap.json")["30000_moves_memory"]["classes"]
    ]
    header = ("programs", "number, proven", "default budget: optimal, mean gap, largest")
    return words_table(header, rows)


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
    return words_table(
        header, [_look_ahead_row(run) for run in kept("simulator/look_ahead.json")["runs"]]
    )


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


# --- real engines ---------------------------------------------------------------------------------


def lockstep(ways: Mapping[str, Sequence[Figures]] | None = None) -> Table:
    """Means over the seeds; of the kept ways, unless others are given."""
    header = (
        *("way", "imbalance, tokens (each seed)", "mean load of a rank, tokens"),
        *("slot bubble, steps", "answered, failed"),
    )
    ways = ways or kept("lockstep/lockstep.json")["ways"]
    return Table(header, list(starmap(_lockstep_row, ways.items())))


def _lockstep_row(way: str, seeds: Sequence[Figures]) -> Row:
    each = " / ".join(f"{one['imbalance_tokens']:,.0f}" for one in seeds)
    return (
        way,
        f"{fmean(one['imbalance_tokens'] for one in seeds):,.0f} ({each})",
        f"{fmean(one['mean_load_tokens'] for one in seeds):,.0f}",
        f"{fmean(one['slot_bubble_steps'] for one in seeds):.2f}",
        f"{sum(one['completed'] for one in seeds)}, {sum(one['failed'] for one in seeds)}",
    )


_GAINED = ("1", "2", "1 to 4")


def plugin_cost() -> Table:
    """The hook's time and bytes, for each of vLLM's schedulers, by tokens in a step."""
    found = kept("plugin/cost.json")["schedulers"]["rows"]
    gained = [way for way in _GAINED if f"Scheduler 32, {way}" in found]
    rows = []
    for kind in ("Scheduler", "AsyncScheduler"):
        for running in (32, 256, 1024):
            ways = [found[name] for way in gained if (name := f"{kind} {running}, {way}") in found]
            cells = [f"{row['hook_us']:.0f} us, {row['bytes']:.0f} B" for row in ways]
            rows += [(f"`{kind}`", f"{running:,}", *cells)] if cells else []
    header = ("scheduler", "running", *(f"tokens a step: {way}" for way in gained))
    return words_table(header, rows)


def ingest_cost() -> Table:
    """A snapshot's decoding and application, by tokens in a step."""
    found = kept("plugin/ingest.json")["rows"]
    rows = []
    for running in (32, 256, 1024):
        ways = (found[f"{running}, {gained}"] for gained in (*_GAINED, "2, listed"))
        cells = (f"{row['median_us']:,.0f} us, {row['bytes']:,} B" for row in ways)
        rows.append((f"{running:,}", *cells))
    header = ("running", "one token a step", "two", "one to four", "two, each request listed")
    return words_table(header, rows)


_WAYS = {
    "vLLM's own order": "vLLM's own order",
    "vLLM's watermark 5 %": "`--watermark 0.05`",
    "headroom": "`headroom`",
    "memory_checked, true lengths": "`memory_checked`, true lengths",
}


def admission_engines() -> Table:
    """Preemptions and throughput of vLLM's engines by who enters."""
    runs = kept("admission/engine.json")["runs"]
    speeds = {
        way: [one["pressed_tokens"] / one["pressed_s"] for one in each]
        for way, each in runs.items()
    }
    (first, _), *_rest = speeds.items()
    rows = []
    for way, each in runs.items():
        more = paired(speeds[way], speeds[first])
        beside = f"{100 * more.mean:+.0f} ± {100 * (more.half_width or 0):.0f} %"
        counts = ", ".join(str(one["preemptions"]) for one in each)
        rows.append((_WAYS.get(way, way), counts, "" if way == first else beside))
    header = (
        *("", "preemptions of 800 requests, each repeat"),
        "tokens/s while requests wait, beside vLLM's order",
    )
    return words_table(header, rows)


def engine_steps() -> str:
    """What is learned of the steps of a trained model on a CPU engine."""
    found = kept("engine_steps/fit.json")
    numbers, steps, errors = found["fitted"], found["steps"], found["errors"]
    ratio = numbers["per_prompt_token_s"] / numbers["per_token_s"]
    return (
        f"Of {sum(steps.values()):,} steps the four numbers explain {found['explained']:.0%} of "
        f"the variance, C and t_l alone {found['by_tokens']:.0%}. "
        f"C is {numbers['base_s'] * 1e3:.0f} ms, t_l {numbers['per_token_s'] * 1e6:.1f} µs, "
        f"t_r {numbers['per_request_s'] * 1e3:.2f} ms, "
        f"t_p {numbers['per_prompt_token_s'] * 1e3:.2f} ms: a prompt token costs as much as "
        f"{ratio:.0f} resident ones. The next step is predicted with a median error of "
        f"{errors['decode']:.1%} if it only decodes ({steps['decode']} steps), and of "
        f"{errors['prompts']:.1%} if it has prompts ({steps['prompts']})."
    )


# --- emulated engines -----------------------------------------------------------------------------


def fair_share() -> Table:
    """How long the slower key waits by itself, and beside the busy one."""
    figures = kept("fairness/fair_share.json")
    rows = []
    for name in ("bursts", "single"):
        case = figures[name]
        p99_s, ratios = case["slow_queue_p99_s"], case["ratios"]
        times = [f"{p99_s[key]:.2f} s" for key in ("alone", "both", "without_keys")]
        ratio = ""
        if case["ratio"] is not None:
            ratio = f"x {case['ratio']:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        refused = [f"{100 * _refused(case['runs'][key]):.0f} %" for key in ("both", "without_keys")]
        rows.append((name, *times, ratio, " / ".join(refused)))
    header = (
        *("slower key sends", "p99 wait alone", "beside the busy key", "the same without keys"),
        *("beside / alone (each run)", "refused, with / without keys"),
    )
    return words_table(header, rows)


def _refused(runs: Sequence[Figures]) -> float:
    refused = sum(run["slow"]["answers"].get("429", 0) for run in runs)
    return float(refused / sum(run["slow"]["requests"] for run in runs))


def switches() -> Table:
    """Every emulated switch to BF-IO: measured and predicted."""
    header = ("fleet, before", "seed", "idle share, %", "imbalance, 10⁴ tokens", "tok/s")
    return words_table(header, [_switch(row) for row in kept("diagnose/bench.json")["switches"]])


def _switch(row: Figures) -> Row:
    formats = (
        *(("idle_share", 100.0, ".1f"), ("imbalance_tokens", 1e-4, ".2f")),
        ("throughput_tok_s", 1.0, ",.0f"),
    )
    cells = [f"{row['fleet']}, {row['before']}", str(row["seed"])]
    for name, scale, form in formats:
        change = row[name]
        before, then, predicted = (
            format(scale * change[key], form) for key in ("before", "measured", "predicted")
        )
        cells.append(f"{before} → {then} ({predicted}; {100 * change['gain_error']:+.0f} %)")
    return cells


def diagnosis(name: str) -> str:
    """What ``evenstep diagnose`` printed ``before`` or ``after`` the switch."""
    printed = (DATA / f"diagnose/{name}.txt").read_text(encoding="utf-8").rstrip()
    return f"```\n{printed}\n```"


_TRACES = {"burstgpt": "BurstGPT", "azure-conv": "Azure"}


def handoff() -> Table:
    """Policies before decode workers of which others compute the prompts."""
    rows = []
    for trace, found in kept("handoff/live.json").items():
        for policy in ("bfio", "least_tokens", "jsq"):
            forms = ("pool",) if policy == "bfio" else ("pool", "instant")
            cells = [_handed(found, f"{policy}-{form}") for form in forms]
            form = "" if len(forms) == 1 else " from the pool, on arrival"
            name = f"{_TRACES[trace]}, `{policy}`{form}"
            rows.append((name, *map(", ".join, zip(*cells, strict=True))))
    header = (
        *("trace, policy", "imbalance, tokens", "live / simulated"),
        *("tok/s", "step, ms", "TTFT, s"),
    )
    return words_table(header, rows)


def _handed(found: Figures, name: str) -> Row:
    (mean,) = (each for each in found["model"]["means"] if each["name"] == name)
    runs = [run for run in found["live"] if run["name"] == name]
    return (
        f"{mean['live_tokens']:,.0f}",
        f"{mean['ratio']:.2f}",
        f"{fmean(run['steady']['throughput_tok_s'] for run in runs):,.0f}",
        f"{1e3 * fmean(run['steady']['step_mean_s'] for run in runs):.2f}",
        f"{fmean(run['default time_to_first_token_seconds'] for run in runs):.3f}",
    )


# --- simulated, and all ---------------------------------------------------------------------------


def engine_model() -> Table:
    """Speed of the engine model."""
    found = kept("engine_model/speed.json")["steps_per_cpu_s"]
    rows = [(name, f"{round(steps, -2):,}") for name, steps in found.items()]
    return words_table(("prefix cache", "steps a second"), rows)


def study_tables(name: str) -> Sequence[Table]:
    """Every table of a study of ``evenstep figures``."""
    return STUDIES[name].tables(outcomes_of(kept("figures/figures.json"))[name])


def kept_files() -> Table:
    """Every kept file with its origin; parts of one origin together."""
    parts: dict[tuple[str, ...], list[str]] = {}
    for file, headers in kept_headers():
        for part, header in headers.items():
            commit = header["commit"].partition(" ")[0][:7]
            later = " (header added later)" if "note" in header else ""
            made = (header["engines"], header["date"][:10], commit + later)
            parts.setdefault((str(file), *made), []).append(part)
    rows = []
    for (name, *of), each in parts.items():
        names = ", ".join(part.removeprefix("studies/") for part in each)
        rows.append((f"{name}: {names}" if names else name, *of))
    return words_table(("file under tests/data, parts", "engines", "date", "commit"), rows)


TABLES: Mapping[str, Callable[[], Table]] = {
    "demo": demo,
    "demo, short": demo_short,
    "router cost": router_cost,
    "router cost, short": router_cost_short,
    "solver gaps": solver_gaps,
    "step cost, learned": step_costs,
    "decision times": decision_times,
    "decision times, memory": decision_times_with_memory,
    "solver gaps, memory": solver_gaps_with_memory,
    "hindsight": hindsight,
    "look-ahead": look_ahead,
    "lockstep": lockstep,
    "plug-in cost": plugin_cost,
    "snapshot cost": ingest_cost,
    "admission, engines": admission_engines,
    "fair shares": fair_share,
    "switches": switches,
    "hand-off": handoff,
    "engine model": engine_model,
    "kept files": kept_files,
}
TEXTS: Mapping[str, Callable[[], str]] = {
    "engine steps": engine_steps,
    "demo comparison": demo_comparison,
    "diagnosis before": lambda: diagnosis("before"),
    "diagnosis after": lambda: diagnosis("after"),
}
