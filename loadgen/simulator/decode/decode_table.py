"""Result of a simulation as a table for the terminal."""

from rich.console import RenderableType

from loadgen.report.numbers import figures_with_notes, number
from loadgen.simulator.decode.decode_results import DecodeResult

ROWS = (
    ("imbalance, tokens", "avg_imbalance_tokens", 1.0),
    ("throughput, tok/s", "throughput_tok_s", 1.0),
    ("TPOT, ms", "tpot_mean_s", 1e3),
    ("TTFT, ms", "ttft_mean_s", 1e3),
    ("TTFT p99, ms", "ttft_p99_s", 1e3),
    ("energy, kJ", "energy_j", 1e-3),
    ("mean load, tokens", "mean_load_tokens", 1.0),
    ("fullest worker, tokens", "max_load_tokens", 1.0),
    ("mean admitted prompt, tokens", "mean_admitted_prompt_tokens", 1.0),
    ("longest pool wait, steps", "max_pool_wait_steps", 1),
    ("slot bubble, steps", "slot_bubble_steps", 1.0),
    ("decision p50, ms", "decision_ms_p50", 1.0),
    ("decision p99, ms", "decision_ms_p99", 1.0),
    ("completed", "completed", 1),
    ("waiting at the end", "waiting_at_end", 1),
)
_PREFILL_ROWS = (
    ("of TTFT: prefill queue, ms", "prefill_queue_mean_s", 1e3),
    ("of TTFT: prefill, ms", "prefill_mean_s", 1e3),
    ("of TTFT: hand-off wait, ms", "handoff_wait_mean_s", 1e3),
    ("of TTFT: KV transfer, ms", "kv_transfer_mean_s", 1e3),
    ("of TTFT: first step, ms", "first_step_mean_s", 1e3),
    ("KV kept for decode, mean tokens", "prefill_kept_mean_tokens", 1.0),
    ("KV kept for decode, most tokens", "prefill_kept_max_tokens", 1),
    ("prefill workers in steps, %", "prefill_busy_share", 100.0),
    ("prefill workers without memory, %", "prefill_stalled_share", 100.0),
    ("prompts not computed at the end", "prefill_waiting_at_end", 1),
)


def decode_table(result: DecodeResult) -> RenderableType:
    """Figures with their conditions."""
    used = result.parameters
    notes = (
        f"{used['lengths']}, arrivals {used['arrivals']}, {used['workers']} workers of "
        f"{used['slots']} slots, pool {used['pool']}, {used['dispatch']} dispatch",
        f"{result.steps} steps after a warm-up of {used['warmup']}, seed {used['seed']}",
        f"look-ahead {used['lookahead']}: H {number(used['horizon'])}, gamma "
        f"{number(used['discount'])}, mu {number(used['tie_weight'])}",
    )
    told = notes if used["horizon"] is not None else notes[:2]
    prefill = [] if result.prefill is None else [(_PREFILL_ROWS, result.prefill)]
    return figures_with_notes(str(used["policy"]), told, (ROWS, result), *prefill)
