"""Tables of prefix caches: what knowing them costs, and how right the router is about texts."""

from collections.abc import Iterator
from statistics import fmean

from docs.kept_figures import Figures, Row, kept, words_table
from loadgen.figures.tables import Table

_INDEX = "prefix/index.json"


def index_cost() -> Table:
    """Memory and times of the index, by workers and tokens of a block."""
    rows = [_index_row(row) for row in kept(_INDEX)["index"]]
    header = (
        *("workers x tokens", "tokens of a block", "memory", "a block stored"),
        *("stored or removed, in calls of 1 / 16 / 128 / 500", "look at 100,000 tokens: median"),
        *("90 %", "a worker forgotten"),
    )
    return words_table(header, rows)


def _index_row(row: Figures) -> Row:
    batches = row["stored_or_removed_us_by_batch"].values()
    return (
        f"{row['workers']} x {row['tokens']:,}",
        str(row["block_tokens"]),
        # What was freed before may be used again, so the process may seem to have taken little.
        f"{max(row['memory_mb'], row['counted_memory_mb']) / 1e3:.2f} GB",
        f"{row['stored_us']:.1f} us",
        f"{' / '.join(f'{each:.1f}' for each in batches)} us",
        f"{row['look_us']:.0f} us",
        f"{row['look_p90_us']:.0f} us",
        f"{row['worker_cleared_ms']:.0f} ms",
    )


def hot_prefix() -> str:
    """What a step costs while many requests wait whose common prefix is being computed."""
    figures = kept(_INDEX)
    found, load = figures["hot_prefix"], max(figures["load_averages"])
    return (
        f"The load average was at most {load:.0f} on two cores. "
        f"While {found['waiting']:,} requests wait that share a prompt of 100,000 tokens and one "
        f"of {found['workers']} workers computes it, receiving a step of all workers takes "
        f"{found['step_heard_ms']:.1f} ms, looking up all requests {found['all_asked_ms']:.1f} ms, "
        f"and {found['all_asked_again_ms']:.1f} ms where nothing has changed."
    )


def foretold_texts() -> Table:
    """How many texts are foretold right, by size of block and turn."""
    rows = []
    for each in kept("prefix/text.json")["blocks"]:
        for turns in ("all", "first_turns", "later_turns"):
            found = each[turns]
            rows.append(
                (
                    str(each["block_tokens"]),
                    turns.replace("_", " "),
                    f"{100 * found['exact']:.1f} %",
                    f"{100 * found['within_a_chunk']:.1f} %",
                    f"x {found['foretold_of_held']:.3f}",
                )
            )
    header = (
        *("tokens of a block", "requests", "exact", "within a chunk"),
        "cached tokens foretold, all together",
    )
    return words_table(header, rows)


def conversations() -> Table:
    """Conversations before two real engines: hits and first tokens, beside sticky sessions."""
    rows = []
    for name, part in kept("prefix/conversations.json").items():
        prompts, cache, dealt = name.split()
        case = f"{prompts} system prompts, {int(cache):,} tokens, {dealt.replace(',', ' and ')}"
        runs = part["runs"]
        sticky = [run for run in runs if run["policy"] == "sticky"]
        for policy in dict.fromkeys(run["policy"] for run in runs):
            its = [run for run in runs if run["policy"] == policy]
            pairs = list(zip(its, sticky, strict=True))
            ttfts = [run["ttft_s"] / best["ttft_s"] for run, best in pairs]
            rows.append(
                (
                    case,
                    policy,
                    str(len(its)),
                    f"{100 * fmean(map(_hit_share, its)):.1f} %",
                    f"x {fmean(_hit_share(run) / _hit_share(best) for run, best in pairs):.2f}",
                    f"x {fmean(_computed(run) / _computed(best) for run, best in pairs):.2f}",
                    f"{fmean(run['ttft_s'] for run in its):.1f} s",
                    f"x {fmean(ttfts):.2f}"
                    + (f" ({min(ttfts):.2f} to {max(ttfts):.2f})" if len(ttfts) > 1 else ""),
                )
            )
    header = (
        *("conversations, cache of an engine, sticky's share", "policy", "runs", "cached"),
        *("of sticky's", "computed, of sticky's", "TTFT", "of sticky's"),
    )
    return words_table(header, rows)


def without_plugin() -> Table:
    """Conversations before emulated engines that tell nothing of themselves, by policy."""
    every = kept("prefix/without_plugin.json")["rows"]
    ours = [row for row in every if row["policy"] == "bfio"]
    rows = []
    for policy in dict.fromkeys(row["policy"] for row in every):
        its = [row for row in every if row["policy"] == policy]
        ttfts = [
            row["mean_ttft_ms"] / own["mean_ttft_ms"] for row, own in zip(its, ours, strict=True)
        ]
        names = "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms"
        cells = [f"{fmean(row[name] for row in its):.0f} ms" for name in names]
        cached = f"{100 * fmean(row['cached_prompt_share'] for row in its):.1f} %"
        ratio = f"x {fmean(ttfts):.2f} ({min(ttfts):.2f} to {max(ttfts):.2f})"
        rows.append((policy, str(len(its)), *cells, cached, ratio))
    header = "policy", "runs", "TTFT", "its p99", "TPOT", "cached", "TTFT, of bfio's"
    return words_table(header, rows)


def _hit_share(run: Figures) -> float:
    share: float = run["hit_tokens"] / run["prompt_tokens"]
    return share


def _computed(run: Figures) -> int:
    tokens: int = run["prompt_tokens"] - run["hit_tokens"]
    return tokens


def plugin_cost() -> Table:
    """CPU time of the plug-in's hooks for the prefix cache, beside vLLM's own work."""
    rows = []
    for name, row in kept("plugin/cost.json")["cache"].items():
        if "decoding" in name:
            beside = f"the whole step: {row['step_us']:.0f} us; {row['bytes']:.0f} B are sent"
        elif "prompt" in name:
            beside = f"vLLM's own hashes: {row['vllm_hashes_us']:.0f} us"
        else:  # how it was measured
            continue
        rows.append((name, f"{row['hook_us']:.0f} us", beside))
    return words_table(("", "hooks", "beside it"), rows)


_LOADS = {"mooncake-synthetic": "Mooncake's synthetic", "azure-conv": "Azure conversations"}
_ARMS = {"through": "`bfio`, all through prefill workers", "bfio": "`bfio`"}


def short_misses() -> Table:
    """Prefill and decode apart, with prefix caches at both: means over seeds, and each seed's."""
    rows = []
    for load, arm, runs, ours in _misses("handoff/short_misses.json"):
        past = fmean(run["passed_share"] for run in runs)
        hits = fmean(run["decode_hit_share"] for run in runs)
        shares = f"{100 * past:.1f} %", f"{100 * hits:.1f} %"
        rows.append((load, arm, _time(runs, ours, "ttft"), _time(runs, ours, "tpot"), *shares))
    header = (
        *("trace, rate", "policy", "TTFT, s (of `bfio`'s, each seed's)", "TPOT, ms (the same)"),
        *("prompts past prefill workers", "prompt tokens not fetched"),
    )
    return words_table(header, rows)


def short_misses_live() -> Table:
    """Live router and emulated engines beside the simulation of the same requests."""
    rows = []
    for load, arm, runs, ours in _misses("handoff/short_misses_live.json"):
        ways = [([run[how] for run in runs], [run[how] for run in ours]) for how in _HOW]
        times = [_time(its, best, name) for name in _UNITS for its, best in ways]
        past = [f"{100 * fmean(run['passed_share'] for run in its):.1f}" for its, _ in ways]
        late = 1e3 * max(run["lateness_p99_s"] for run in runs)
        rows.append((load, arm, *times, f"{' / '.join(past)} %", f"{late:.0f} ms"))
    header = (
        *("trace, rate", "policy", "TTFT, s: live (of `bfio`'s, each seed's)", "simulated"),
        *("TPOT, ms: live", "simulated", "past prefill workers: live / simulated"),
        "client late (p99)",
    )
    return words_table(header, rows)


_HOW = "live", "simulated"
_UNITS = {"ttft": (1, 3), "tpot": (1e3, 2)}  # factor, digits


def _misses(file: str) -> Iterator[tuple[str, str, list[Figures], list[Figures]]]:
    """Load, policy, its runs, and those of bfio."""
    for found in kept(file).values():
        ours = [run for run in found["rows"] if run["arm"] == "bfio"]
        load = f"{_LOADS[found['trace']]}, {found['rate']:g}/s"
        for arm in dict.fromkeys(run["arm"] for run in found["rows"]):
            runs = [run for run in found["rows"] if run["arm"] == arm]
            yield load, _ARMS.get(arm, f"`{arm}`"), runs, ours


def _time(runs: list[Figures], ours: list[Figures], name: str) -> str:
    key, (scale, digits) = f"{name}_mean_s", _UNITS[name]
    mean = f"{scale * fmean(run[key] for run in runs):.{digits}f}"
    if runs == ours:
        return mean
    ratios = [run[key] / own[key] for run, own in zip(runs, ours, strict=True)]
    return f"{mean} (x {min(ratios):.2f} to {max(ratios):.2f})"
