"""Result of a simulation of whole engines as a table for the terminal."""

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from loadgen.report.numbers import add_figures, plain_table
from loadgen.simulator.serving.serving_config import AUTO
from loadgen.simulator.serving.serving_results import ServingResult

_ROWS = (
    ("TTFT, s", "ttft_mean_s", 1.0),
    ("TTFT p50, s", "ttft_p50_s", 1.0),
    ("TTFT p99, s", "ttft_p99_s", 1.0),
    ("TPOT, ms", "tpot_mean_s", 1e3),
    ("TPOT p99, ms", "tpot_p99_s", 1e3),
    ("throughput, tok/s", "throughput_tok_s", 1.0),
    ("of the prompts cached, %", "prefix_hit_share", 100.0),
    ("idle share, %", "idle_share", 100.0),
    ("step, ms", "step_mean_s", 1e3),
    ("evictions in 1,000 requests", "evictions_per_1k", 1.0),
    ("completed", "completed", 1),
)


def serving_table(result: ServingResult) -> RenderableType:
    """Figures with their conditions."""
    used = result.parameters
    table = plain_table("", str(used["policy"]))
    add_figures(table, _ROWS, result)
    budget = used["prompt_budget"]
    prompts = "" if budget is None else f", {_bound(used)}"
    sessions = "" if used["think"] is None else f", turns {used['think']:g} s after an answer"
    workers = f"{used['workers']} workers{'' if used['barrier'] else ', each stepping alone,'}"
    notes = (
        f"{used['trace']}, {used['requests']} requests, arrivals {used['arrivals']}{sessions}, "
        f"seed {used['seed']}; the first {used['warmup']:.0%} are left out",
        f"{workers} of {used['slots']} slots and {used['kv_tokens']} KV tokens, "
        f"{used['batch_tokens']} tokens a step{prompts}, in {used['prefill_window']} steps; "
        f"{used['dispatch']} dispatch",
        f"step time {used['step_time']}, learned {used['learned_step_time'] or 'none'}",
    )
    return Group(table, *map(Text, notes))


def _bound(used: Mapping[str, object]) -> str:
    if used["prompt_budget"] != AUTO:
        return f"{used['prompt_budget']} of them prompts'"
    targets = ((name, used[f"target_{name}_s"]) for name in ("ttft", "tpot"))
    told = [f"{name.upper()} {target:g} s" for name, target in targets if target is not None]
    return f"prompts' by the router's budget{' for ' * bool(told)}{' and '.join(told)}"
