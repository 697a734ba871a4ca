"""One policy's results as a table, and several on the same requests: means and differences."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from loadgen.report.intervals import Estimate, estimate, paired
from loadgen.report.numbers import figures_with_notes, number, plain_table, with_interval
from loadgen.simulator.decode.decode_results import DecodeResult, Report

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
        _conditions(used),
        f"{result.steps} steps after a warm-up of {used['warmup']}, seed {used['seed']}",
        f"look-ahead {used['lookahead']}: H {number(used['horizon'])}, gamma "
        f"{number(used['discount'])}, mu {number(used['tie_weight'])}",
    )
    told = notes if used["horizon"] is not None else notes[:2]
    prefill = [] if result.prefill is None else [(_PREFILL_ROWS, result.prefill)]
    return figures_with_notes(str(used["policy"]), told, (ROWS, result), *prefill)


_PROMPT = "mean_admitted_prompt_tokens"
_ALIKE = 0.001  # smaller differences are not worth a note


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs of several policies; the first policy is the baseline."""

    # Results by policy, one per seed; all policies have the same seeds.
    runs: Mapping[str, Sequence[DecodeResult]]

    @property
    def baseline(self) -> str:
        return next(iter(self.runs))

    @property
    def others(self) -> list[str]:
        return list(self.runs)[1:]

    def mean(self, policy: str, key: str) -> Estimate | None:
        """None where a run has none."""
        values = self._each(policy, key)
        return estimate(values) if values else None

    def difference(self, policy: str, key: str) -> Estimate | None:
        """Relative to the baseline, with paired seeds."""
        one, other = self._each(policy, key), self._each(self.baseline, key)
        return paired(one, other) if one and other else None

    def notes(self) -> list[str]:
        """Warnings where a policy admitted shorter prompts, which flatters it."""
        found = []
        for policy in self.others:
            prompt = self.difference(policy, _PROMPT)
            if prompt is not None and abs(prompt.mean) >= _ALIKE:
                one, other = (policy, self.baseline) if prompt.mean < 0 else (self.baseline, policy)
                found.append(
                    f"{one} admitted shorter prompts than {other} ({policy} {_share(prompt)}): "
                    "that alone lowers its loads, and flatters its throughput and TPOT"
                )
        return found

    def report(self) -> Report:
        reports = {name: [run.report() for run in runs] for name, runs in self.runs.items()}
        first = reports[self.baseline][0]
        keys = [key for key in first if key != "parameters"]
        return {
            "baseline": self.baseline,
            "seeds": len(reports[self.baseline]),
            "means": {
                policy: {key: _shown(self.mean(policy, key)) for key in keys} for policy in reports
            },
            "differences": {
                policy: {key: _shown(self.difference(policy, key)) for key in keys}
                for policy in self.others
            },
            "notes": self.notes(),
            "runs": reports,
        }

    def _each(self, policy: str, key: str) -> list[float]:
        values = [run.report()[key] for run in self.runs[policy]]
        numbers = [float(each) for each in values if isinstance(each, int | float)]
        return numbers if len(numbers) == len(values) else []


def comparison_table(comparison: Comparison) -> RenderableType:
    """All policies side by side, with notes."""
    baseline, others = comparison.baseline, comparison.others
    against = [f"{policy} against {baseline}" for policy in others]
    table = plain_table("", *comparison.runs, *against)
    for label, key, scale in ROWS:
        means = [with_interval(comparison.mean(policy, key), scale) for policy in comparison.runs]
        shares = [_share(comparison.difference(policy, key)) for policy in others]
        table.add_row(label, *means, *shares)
    used = comparison.runs[baseline][0].parameters
    runs = len(comparison.runs[baseline])
    seeds = f"seed {used['seed']}"
    if runs > 1:
        seeds = f"{runs} seeds from {used['seed']} on, ± half of the 95 % interval"
    return Group(table, *map(Text, (f"{_conditions(used)}; {seeds}", *comparison.notes())))


def _conditions(used: Report) -> str:
    return (
        f"{used['lengths']}, arrivals {used['arrivals']}, {used['workers']} workers of "
        f"{used['slots']} slots, pool {used['pool']}, {used['dispatch']} dispatch"
    )


def _share(difference: Estimate | None) -> str:
    if difference is None:
        return "-"
    width = "" if difference.half_width is None else f" ± {difference.half_width:.1%}"
    return f"{difference.mean:+.1%}{width}"


def _shown(figure: Estimate | None) -> Report | None:
    return None if figure is None else asdict(figure)
