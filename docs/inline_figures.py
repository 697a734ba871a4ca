"""Figures within the sentences of the pages, made of what is kept under tests/data.

``FIGURES`` has the texts by group, ``<!-- figure: GROUP, ITEM -->``, or one text alone.
"""

from collections.abc import Callable, Iterable, Mapping
from math import ceil
from statistics import fmean, median

from docs.kept_figures import Figures, kept
from tests.bench.league.places import league_line

Texts = str | Mapping[str, str]


def _between(values: Iterable[float], form: str = ".2f") -> str:
    """``1.5 to 2.0``, or one number if both would look alike."""
    each = list(values)
    return " to ".join(dict.fromkeys(f"{one:{form}}" for one in (min(each), max(each))))


def _within(values: Iterable[float]) -> str:
    """The whole percent that bounds them."""
    return f"{ceil(100 * max(map(abs, values)))} %"


def _listed(values: Iterable[float]) -> str:
    *first, last = (f"{one:.2f}" for one in values)
    return f"{', '.join(first)} and {last} times"


# --- live -----------------------------------------------------------------------------------------


def _demo() -> Texts:
    found = kept("demo/summary.json")["decode"]
    ratios = found["comparison"]
    runs = {f"{run['policy']}-{run['dispatch']}": run for run in found["runs"]}
    ours, theirs = runs[ratios["subject"]], runs[ratios["baseline"]]
    whole = ours["replay"]["output_throughput"] / theirs["replay"]["output_throughput"]
    return {
        "ratios": f"imbalance x {ratios['imbalance_ratio']:.2f}, throughput x "
        f"{ratios['throughput_ratio']:.3f}, TPOT x {ratios['tpot_ratio']:.3f}",
        "cut": f"{100 * found['conditions']['outputs_cut_share']:.1f} %",
        "whole run": f"x {whole:.3f}",
    }


def _switches() -> Texts:
    rows = kept("diagnose/bench.json")["switches"]
    (shown,) = (row for row in rows if (row["fleet"], row["seed"]) == ("demo", 0))
    speed = shown["throughput_tok_s"]
    measured, predicted = (
        f"{speed[key] - speed['before']:+,.0f}" for key in ("measured", "predicted")
    )
    decoding = [row for row in rows if row["fleet"] != "prompts"]
    idle, tokens = (
        _within(row[name]["gain_error"] for row in rows)
        for name in ("idle_share", "throughput_tok_s")
    )
    return {
        "gain": f"{measured} tokens/s, not {predicted}",
        "both": f"{idle} (idle share) and {tokens} (tokens/s)",
        "idle share": idle,
        "tokens/s": tokens,
        "imbalance": _within(row["imbalance_tokens"]["gain_error"] for row in decoding),
    }


def _prompts_on_ranks() -> Texts:
    found = kept("live/prompts_on_ranks.json")
    gains = {case: fmean(found[case]["gains"]) for case in found}

    def runs(case: str, policy: str) -> list[Figures]:
        return [run for run in found[case]["runs"] if run["policy"] == policy]

    last = [
        fmean(run["ttft_p99_s"] for run in runs(case, "bfio"))
        / fmean(run["ttft_p99_s"] for run in runs(case, "fcfs"))
        for case in found
    ]
    late = {
        policy: [100 * run["lateness_p99"] for case in found for run in runs(case, policy)]
        for policy in ("bfio", "fcfs")
    }
    return {
        "tokens/s": f"{_between(gains.values())} times",
        "p99 TTFT": f"{_between(last, '.1f')} times",
        "512 a step": f"{gains['100, chunks of a step']:.2f} times",
        "bfio late": f"{_between(late['bfio'], '.0f')} %",
        "FCFS late": f"{max(late['fcfs']):.0f} %",
    }


def _live() -> Texts:
    found = kept("live/live.json")
    ratios = [row["live_tokens"] / row["simulated_tokens"] for row in found["rows"]]
    return {
        "imbalance": f"{found['live_tokens'] / found['simulated_tokens']:.2f} times",
        "seeds": _between(ratios),
    }


def _off(file: str) -> str:
    return _within(off for row in kept(file)["rows"] for off in row["off"])


def _lockstep() -> Texts:
    found = kept("lockstep/lockstep.json")
    each = {way: [1e3 * one["step_mean_s"] for one in runs] for way, runs in found["ways"].items()}
    one_server = each.pop("vLLM's own balancer")
    steps = sum(one["whole"]["steps"] for runs in found["ways"].values() for one in runs)
    return {
        "steps": f"{steps:,} steps",
        "alone": f"{1e3 * found['barrier']['alone_s']:.0f} ms",
        "light": f"{1e3 * found['barrier']['light_s']:.0f} ms",
        "heavy": f"{1e3 * found['barrier']['heavy_s']:.0f} ms",
        "servers": f"{_between((ms for way in each.values() for ms in way), '.0f')} ms",
        "one server": f"{_between(one_server, '.0f')} ms",
    }


def _takeovers() -> Texts:
    found = kept("replicas/takeovers.json")
    both = file, lease = found["file"], found["lease"]
    steps = file["steps_to_even"] + lease["steps_to_even"]
    requests = sum(each["requests_that_reached_engines"] for each in both)
    return {
        "file": f"{_between(file['kill_to_first_dispatch_s'])} s",
        "Lease": f"{_between(lease['kill_to_first_dispatch_s'])} s",
        "twice": f"{sum(each['slots_booked_twice'] for each in both)} of {requests:,}",
        "broken": f"{sum(each['answers_lost_of_killed_replicas'] for each in both):,}",
        "even": f"{steps.count(0)} rounds of {len(steps)}",
    }


def _black_hole() -> str:
    found = kept("reliability/black_hole.json")
    bare, retries, both = found["ways"].values()
    return (
        f"Of {found['requests']} requests {bare['failed']} fail without retries and breaker, and "
        f"{retries['failed']} with retries alone. With both, {both['failed']} fail and "
        f"{both['asked_anew']} are sent twice"
    )


# --- costs ----------------------------------------------------------------------------------------


def _plugin() -> Texts:
    engine = kept("plugin/cost.json")["engine"]
    wall, cpu = engine["wall"], engine["cpu"]
    share = f"{100 * wall['more_us'] / wall['without_us']:.1f} %"
    return {
        "step": f"{wall['without_us'] / 1e3:.1f} ms",
        "share": share,
        "wall": f"{wall['more_us']:.0f} us ({share})",
        "CPU": f"{cpu['more_us']:.0f} us",
        "neither": f"{_between(wall['runs_us']['neither'], '.0f')} us",
    }


def _admission() -> str:
    found = kept("costs/admission.json")
    names = ("headroom", "wait", "nested_wait", "memory_checked")
    *us, seen = (found[name]["mean_us"] for name in (*names, "memory_checked, lengths seen"))
    each = ", ".join(f"`{name}` {cost:.0f} us" for name, cost in zip(names, us, strict=True))
    return f"{each} with given lengths and {seen:.0f} us with lengths seen, without a margin"


def _log_line() -> str:
    us = kept("costs/request_log.json")["us_per_request"]
    more = [us[f"info, {form}"] - us["warning, text"] for form in ("text", "json")]
    return f"{_between(more, '.0f')} us"


def _recording() -> str:
    found = kept("costs/recording.json")
    step, request = (
        f"{found[part]['us']:.0f} µs of CPU and {found[part]['bytes'] / 1e3:.1f} kB"
        for part in ("a step", "a request")
    )
    return f"{step} for a step of {found['workers']} workers, {request} for a request"


def _checks() -> Texts:
    pairs = kept("costs/http_front.json")["more_us_per_request"]
    return {"median": f"{median(pairs):.0f} µs", "pairs": _between(pairs, ".0f")}


def _scrape() -> Texts:
    found = kept("costs/scrape.json")
    return {"all": f"{found['cpu_ms']:.0f} ms", "a turn": f"{found['turn_ms']:.1f} ms"}


def _page() -> Texts:
    found = kept("page/cost.json")
    page, tokens = found["page"], found["tokens"]
    pairs = _between(tokens["ratio_of_each_pair"])
    return {
        "state": f"{page['state_cpu_ms']:.2f} ms and has {page['state_bytes'] / 1e3:.0f} kB",
        "viewer": f"{100 * page['cpu_share_more']:z.1f} %",
        "Chromium": f"{100 * page['chromium_cpu_share']:.0f} % of a core",
        "tokens": f"x {tokens['ratio']:.3f} ({pairs} in the pairs)",
        "a token": f"{tokens['us_per_token_alone']:.0f} µs",
    }


def _gbp_cr() -> Texts:
    found = kept("chains/gbp_cr.json")
    alike, unlike = found["equal"], found["unequal"]
    return {
        "equal": f"{alike['optimal']} of {alike['fleets']}",
        "unequal": f"{unlike['optimal']} of {unlike['fleets']}",
        "too slow": f"{unlike['called_too_slow']}",
        "more": f"{100 * (unlike['mean_ratio'] - 1):.1f} %",
    }


def _planning() -> Texts:
    mixed, unlike = kept("chains/planning.json")["cpu_s"].values()
    return {
        "mixed": f"{min(mixed):.2f} to {max(mixed):.1f} s",
        "unequal": f"{max(unlike[:-1]):.1f} s",
        "overload": f"{unlike[-1]:.0f} s",
    }


def _long_pools() -> Texts:
    found = kept("pools/long_pools.json")
    return {
        "imbalance": _listed(row["ratio"] for row in found["pools"]),
        "wait": _listed(row["longest_wait_over_bound"] for row in found["pools"]),
        "round": f"{_between((row['p50_ms'] for row in found['rounds']), '.1f')} ms",
    }


FIGURES: Mapping[str, Callable[[], Texts]] = {
    "demo": _demo,
    "league": league_line,
    "switches": _switches,
    "prompts on ranks": _prompts_on_ranks,
    "live": _live,
    "whole engines": lambda: _off("live/serving.json"),
    "whole engines with prefixes": lambda: _off("live/serving_prefixes.json"),
    "lockstep": _lockstep,
    "takeover": _takeovers,
    "black hole": _black_hole,
    "plug-in": _plugin,
    "admission": _admission,
    "log line": _log_line,
    "recording": _recording,
    "request checks": _checks,
    "scrape": _scrape,
    "page": _page,
    "GBP-CR": _gbp_cr,
    "planning": _planning,
    "long pools": _long_pools,
}


def figure(name: str) -> str:
    """The text of a figure, by ``GROUP, ITEM`` or ``GROUP``."""
    group, _, item = name.partition(", ")
    made = FIGURES[group]() if group in FIGURES else {}
    texts = {"": made} if isinstance(made, str) else made
    if item not in texts:
        raise ValueError(f"no figure is called {name!r}")
    return texts[item]
