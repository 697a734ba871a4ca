"""Result of an admission simulation as a table for the terminal."""

from rich.console import Group, RenderableType
from rich.text import Text

from loadgen.report.numbers import add_figures, plain_table
from loadgen.simulator.admission.admission_results import WARMUP_SHARE, AdmissionResult

_ROWS = (
    ("evictions in 1,000 requests", "evictions_per_1k", 1.0),
    ("throughput, tok/s", "throughput_tok_s", 1.0),
    ("throughput, requests/s", "throughput_req_s", 1.0),
    ("latency, s", "latency_mean_s", 1.0),
    ("latency p99, s", "latency_p99_s", 1.0),
    ("latency max, s", "latency_max_s", 1.0),
    ("TTFT, s", "ttft_mean_s", 1.0),
    ("TTFT p99, s", "ttft_p99_s", 1.0),
    ("completed", "completed", 1),
    ("refused", "refused", 1),
    ("KV used, mean %", "kv_used_mean", 100.0),
    ("KV used, max %", "kv_used_max", 100.0),
    ("step, ms", "step_mean_s", 1e3),
)


def admission_table(result: AdmissionResult) -> RenderableType:
    """Figures with their conditions."""
    used = result.parameters
    table = plain_table("", str(used["policy"]))
    add_figures(table, _ROWS, result)
    notes = (
        f"{used['scenario']}, {used['requests']} requests at {used['rate']:g}/s, seed "
        f"{used['seed']}; {used['kv_tokens']} KV tokens, {used['max_num_seqs']} slots, "
        f"{used['max_num_batched_tokens']} tokens a step",
        f"lengths: {used['prediction']}; eviction: {used['eviction']}; order: {used['order']}; "
        f"the first {WARMUP_SHARE:.0%} of the arrivals are left out",
    )
    return Group(table, *map(Text, notes))
