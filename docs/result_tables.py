"""Tables of the pages, made of the figures that are kept under tests/data."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean

from docs import decision_tables, engine_tables, prefix_tables, prompt_tables
from docs.goodput_tables import goodput, groups_latency, large_fleets
from docs.kept_figures import Figures, Row, kept, words_table
from docs.measured import commit_of
from docs.stale_figures import DATA, kept_headers
from loadgen.demo.worlds import DECODE, SUBJECT
from loadgen.figures.figures_document import outcomes_of
from loadgen.figures.studies import STUDIES
from loadgen.figures.studies.serving_study import (
    JOINT,
    OURS,
    TPOT,
    TTFT,
    TTFT_P99,
    ServingRatesStudy,
)
from loadgen.figures.tables import Table
from loadgen.report.intervals import paired
from tests.bench.league.page import league_text

# --- demo -----------------------------------------------------------------------------------------


def demo() -> Table:
    """Every run of the demo."""
    header = (
        *("policy, dispatch", "imbalance, 10⁴ tokens", "idle share (modelled)"),
        *("throughput, tok/s", "TPOT, ms", "TTFT mean / p99, ms", "J per token"),
        *("mean load, tokens", "mean prompt admitted", "errors, lost"),
    )
    return words_table(
        header, [_demo_row(run) for run in kept("demo/summary.json")["decode"]["runs"]]
    )


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
    ratios = kept("demo/summary.json")["decode"]["comparison"]
    policy, _, dispatch = ratios["baseline"].partition("-")
    return (
        f"Against the faster baseline in its better form of dispatch (`{policy}`, {dispatch}): "
        f"imbalance x {ratios['imbalance_ratio']:.2f}, throughput x "
        f"{ratios['throughput_ratio']:.3f}, TPOT x {ratios['tpot_ratio']:.3f}, energy per token x "
        f"{ratios['energy_per_token_ratio']:.3f}."
    )


def demo_bar() -> str:
    """What BF-IO's ratios are held to."""
    kept_bar = kept("demo/bar.json")
    measured = [run for run in kept_bar["runs"] if run["throughput"] is not None]
    ratios = "; ".join(
        f"{name} x {found['mean']:.3f} ± {found['deviation']:.3f}, bar x {DECODE.bars[name]:g}"
        for name in DECODE.bars
        for found in [kept_bar[name]]
    )
    return (
        f"{len(measured)} runs beside {kept_bar['busy_loops']} busy loops (mean ± standard "
        f"deviation): {ratios}."
    )


# --- cost of the router ---------------------------------------------------------------------------

_TARGETS = {
    "evenstep": "evenstep",
    "evenstep-rr": "`--policy round_robin`",
    "evenstep-asgi": "`--data-plane asgi`",
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
    rows.append(("memory at the end (PSS), MB", *memory))
    header = ("CPU us (in parentheses: of vllm-router's)", *_TARGETS.values())
    return words_table(header, rows)


def router_cost_short() -> Table:
    """Evenstep beside vllm-router, with units."""
    rows, shown = [], [[*_TARGETS].index(key) for key in ("evenstep", "vllm-router")]
    for name, *cells in router_cost().rows:
        words = name.rpartition(", ")
        what, unit = (words[0], words[2]) if words[2] in ("ms", "MB") else (name, "us")
        ours, theirs = (cells[index].split()[0] for index in shown)
        rows.append((what, f"{ours} {unit}", f"{theirs} {unit}"))
    return words_table(("", "evenstep", "vllm-router 0.1.17"), rows)


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


def serving_rates() -> str:
    """The joint plan for prompts beside the rule on arrival, at all rates."""
    found = outcomes_of(kept("figures/figures.json"))["serving_rates"]
    overload_rate = ServingRatesStudy.OVERLOAD

    def ratios(metric: str, *, overload: bool) -> str:
        each = [
            1 + paired(sample.each(metric), found[setting, rate, OURS].each(metric)).mean
            for (setting, rate, way), sample in found.items()
            if way == JOINT and (rate == overload_rate) is overload
        ]
        return f"{min(each):.2f} to {max(each):.2f}"

    ttft, p99, tpot = (ratios(column.metric, overload=False) for column in (TTFT, TTFT_P99, TPOT))
    return (
        f"Over `barrier_time`'s, `bfio`'s mean TTFT is x {ttft}, p99 TTFT x {p99} and TPOT x "
        f"{tpot} at all rates but {overload_rate}. There, where prompts queue, mean TTFT is x "
        f"{ratios(TTFT.metric, overload=True)} and TPOT x {ratios(TPOT.metric, overload=True)}."
    )


_MOST_NAMES = 24


def kept_files() -> Table:
    """Every kept file with its origin; parts of one origin together."""
    parts: dict[tuple[str, ...], list[str]] = {}
    for file, headers in kept_headers():
        for part, header in headers.items():
            commit = " ".join(commit_of(header)).rstrip()
            later = " (header added later)" if "note" in header else ""
            made = (header["engines"], header["date"][:10], commit + later)
            parts.setdefault((str(file), *made), []).append(part)
    rows = []
    for (name, *of), each in parts.items():
        names = ", ".join(part.removeprefix("studies/") for part in each)
        if len(each) > _MOST_NAMES:
            names = f"{len(each)} parts"
        rows.append((f"{name}: {names}" if names else name, *of))
    return words_table(("file under tests/data, parts", "engines", "date", "commit"), rows)


TABLES: Mapping[str, Callable[[], Table]] = {
    "demo": demo,
    "demo, short": demo_short,
    "router cost": router_cost,
    "router cost, short": router_cost_short,
    "solver gaps": decision_tables.solver_gaps,
    "step cost, learned": engine_tables.step_costs,
    "decision times": decision_tables.decision_times,
    "decision times, memory": decision_tables.decision_times_with_memory,
    "solver gaps, memory": decision_tables.solver_gaps_with_memory,
    "hindsight": decision_tables.hindsight,
    "look-ahead": decision_tables.look_ahead,
    "end signal, skill": decision_tables.end_signal_skill,
    "end signal, gain": decision_tables.end_signal_gain,
    "lockstep": engine_tables.lockstep,
    "prompts on ranks": engine_tables.prompts_on_ranks,
    "serving, live": engine_tables.serving_live,
    "serving, live, prefixes": partial(engine_tables.serving_live, "live/serving_prefixes.json"),
    "pick cost": engine_tables.pick_cost,
    "plug-in cost": engine_tables.plugin_cost,
    "snapshot cost": engine_tables.ingest_cost,
    "prefix index cost": prefix_tables.index_cost,
    "prefix plug-in cost": prefix_tables.plugin_cost,
    "texts foretold": prefix_tables.foretold_texts,
    "conversations on real engines": prefix_tables.conversations,
    "conversations without the plug-in": prefix_tables.without_plugin,
    "admission, engines": engine_tables.admission_engines,
    "fair shares": fair_share,
    "switches": switches,
    "hand-off": handoff,
    "short misses": prefix_tables.short_misses,
    "short misses, live": prefix_tables.short_misses_live,
    "engine model": engine_model,
    "prompt budgets": prompt_tables.budgets,
    "prompt windows": prompt_tables.windows,
    "goodput": goodput,
    "large fleets": large_fleets,
    "latency over groups": groups_latency,
    "kept files": kept_files,
}
TEXTS: Mapping[str, Callable[[], str]] = {
    "engine steps": engine_tables.engine_steps,
    "serving, by rate": serving_rates,
    "demo comparison": demo_comparison,
    "demo bar": demo_bar,
    "hot prefix": prefix_tables.hot_prefix,
    "league": league_text,
    "diagnosis before": lambda: diagnosis("before"),
    "diagnosis after": lambda: diagnosis("after"),
}
