"""Figures of a demo run, from the fleet's own step record: the ground truth."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from loadgen.demo.run import Fleet, Outcome
from loadgen.emulator.record import StepRecord
from router.core.step_time import StepTime

# Lateness of a step's end, as a fraction of its length, up to which a fleet counts as in time.
LATENESS_LIMIT = 0.1


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Averages over a fleet's steps; times in engine seconds."""

    steps: int
    step_mean_s: float
    imbalance_tokens: float  # mean of G max L - sum L
    mean_load_tokens: float
    max_load_tokens: float
    idle_share: float  # modelled, t_l times the imbalance over G times the step time
    slots_used: float  # mean share of slots that hold a request
    throughput_tok_s: float
    energy_j: float
    energy_j_per_token: float
    lateness_p50: float
    lateness_p99: float  # 99th percentile of the lateness, as a fraction of the step's length


def step_figures(record: Sequence[StepRecord], fleet: Fleet) -> StepFigures | None:
    """Averages over steps; None without steps."""
    if not record:
        return None
    seconds = sum(row.step_s for row in record)
    tokens = sum(sum(row.running) for row in record)
    imbalance = [
        len(row.load_tokens) * max(row.load_tokens) - sum(row.load_tokens) for row in record
    ]
    per_token_s = StepTime.parse(fleet.step_time).per_token_s
    energy_j = sum(sum(row.power_w) * row.step_s for row in record)
    late_p50, late_p99 = np.percentile([row.lateness for row in record], (50, 99)).tolist()
    return StepFigures(
        steps=len(record),
        step_mean_s=seconds / len(record),
        imbalance_tokens=fmean(imbalance),
        mean_load_tokens=fmean(fmean(row.load_tokens) for row in record),
        max_load_tokens=fmean(max(row.load_tokens) for row in record),
        idle_share=per_token_s * sum(imbalance) / (fleet.workers * seconds),
        slots_used=tokens / (len(record) * fleet.workers * fleet.slots),
        throughput_tok_s=tokens / seconds,
        energy_j=energy_j,
        energy_j_per_token=energy_j / max(tokens, 1),
        lateness_p50=late_p50,
        lateness_p99=late_p99,
    )


def steady_steps(outcome: Outcome) -> list[StepRecord]:
    """Steps that ended in the replay's steady window; none if the run is too short."""
    steady = outcome.report["steady"]
    if steady is None:
        return []
    scale = outcome.plan.time_scale
    start_s = outcome.report["start_unix_s"] + steady["start_s"] * scale
    end_s = start_s + steady["duration"] * scale
    return [row for row in outcome.record if start_s <= row.time_s <= end_s]
