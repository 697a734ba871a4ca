"""Tables of engines: what steps, snapshots and the plug-in cost, and what real ones did."""

from collections.abc import Mapping, Sequence
from itertools import starmap
from statistics import fmean

from docs.kept_figures import Figures, Row, kept, words_table
from loadgen.figures.tables import Table
from loadgen.report.intervals import paired


def step_costs() -> Table:
    """How far learned numbers are off, and how often their intervals hold the truth."""
    rows = [
        (
            f"{100 * found['noise']:.0f} %",
            title,
            *(f"{100 * found[off][number]:.2f} %" for off in ("median_off", "largest_off")),
            f"{100 * found['near_or_inside'][number]:.0f} %",
        )
        for found in kept("step_fit/step_fit.json")["learned"]
        for number, title in _NUMBERS.items()
    ]
    header = ("noise of a step", "number", "off: median", "largest", "within 5 % or its interval")
    return words_table(header, rows)


_NUMBERS = {
    "base_s": "C",
    "per_token_s": "t_l",
    "per_request_s": "t_r",
    "per_prompt_token_s": "t_p",
}


def prompts_on_ranks() -> Table:
    """What serve's defaults win over FCFS on emulated ranks that compute prompts."""
    header = (
        *("a prompt token costs as", "a step computes at most", "FCFS, tokens/s", "bfio, tokens/s"),
        *("gain (each pair)", "whole runs", "TTFT p99, s: FCFS / bfio"),
    )
    return Table(header, list(starmap(_prompts_row, kept("live/prompts_on_ranks.json").items())))


def _prompts_row(case: str, found: Figures) -> Row:
    worth, _, chunks = case.partition(", chunks ")
    of = {
        policy: [run for run in found["runs"] if run["policy"] == policy]
        for policy in ("fcfs", "bfio")
    }
    tokens_s = [f"{fmean(run['tokens_s'] for run in runs):,.0f}" for runs in of.values()]
    last = [f"{fmean(run['ttft_p99_s'] for run in runs):.2f}" for runs in of.values()]
    each = ", ".join(f"{gain:.2f}" for gain in found["gains"])
    return (
        f"{int(worth):,} resident ones",
        "512 in all" if chunks else "512 of each prompt, 2,048 in all",
        *tokens_s,
        f"x {fmean(found['gains']):.2f} ({each})",
        f"x {fmean(found['whole_gains']):.2f}",
        " / ".join(last),
    )


def serving_live(file: str = "live/serving.json") -> Table:
    """Live router and emulated engines beside the simulation of the same requests."""
    rows = [
        (
            row["policy"],
            str(row["seed"]),
            *(f"{row[f'{how}_ttft_s']:.3f}" for how in ("live", "simulated")),
            *(f"{1e3 * row[f'{how}_tpot_s']:.2f}" for how in ("live", "simulated")),
            " / ".join(f"{off:+.1%}" for off in row["off"]),
        )
        for row in kept(file)["rows"]
    ]
    header = (
        *("policy", "seed", "TTFT, s: live", "simulated"),
        *("TPOT, ms: live", "simulated", "difference: TTFT / TPOT"),
    )
    return Table(header, rows)


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


def pick_cost() -> Table:
    """CPU of gateway and picker for a request, beside the router's own."""
    figures = kept("pick/cost.json")
    rows, parts = [], ("envoy_us", "router_us", "both_us")
    for name, what in figures["targets"].items():
        if name == "evenstep-2":  # was measured as well, and is no more
            continue
        each = [figures["medians"][test][name] for test in ("unary", "stream")]
        rows.append((what, *(f"{of[part]:,.0f}" for of in each for part in parts)))
    said = ("Envoy", "picker or router", "both")
    header = [f"{test}: {part}" for test in ("at once", "stream") for part in said]
    return words_table(("CPU us a request", *header), rows)
