"""Time scale and number of requests of a demo's runs, from a short trial on this machine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

from loadgen.demo.figures import LATENESS_LIMIT, steady_steps, step_figures
from loadgen.demo.run import Fleet, Outcome, RunPlan

FIRST_SCALE = 2.0
SCALE_MAX = 32.0
TRIALS = 2
TRIAL_REQUESTS = 1500
# Lateness is wall time that the machine adds at a step's end, whatever the step's length. Margin of
# the runs over the trial.
MARGIN = 1.4
# Baselines take longer for the same requests than the policy of the trial.
SLOWER = 1.25
FEWEST_REQUESTS = 500
# With fewer, the long prompts that BF-IO postpones distort the comparison: its load stays lower.
ENOUGH_REQUESTS = 5000
MOST_REQUESTS = 12000


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of a trial's steady window, in engine seconds; lateness as a share of a step's length.

    Starting and ending took ``overhead_s`` wall seconds.
    """

    time_scale: float
    lateness_p99: float
    throughput_tok_s: float
    step_s: float
    overhead_s: float

    @property
    def scale_needed(self) -> float:
        """Time scale at which runs should keep up; never faster than the trial's."""
        if self.lateness_p99 <= LATENESS_LIMIT:
            return self.time_scale
        needed = self.time_scale * self.lateness_p99 / LATENESS_LIMIT * MARGIN
        return round(min(needed, SCALE_MAX), 1)


def calibrate(
    execute: Callable[[RunPlan], Outcome], plan: RunPlan, fleet: Fleet, clock: Callable[[], float]
) -> list[Trial]:
    """Try the machine, again if it was late: one hiccup of a shared machine is no measure."""
    trials: list[Trial] = []
    while len(trials) < TRIALS:
        start_s = clock()
        outcome = execute(replace(plan, requests=TRIAL_REQUESTS))
        elapsed_s = clock() - start_s
        figures = step_figures(steady_steps(outcome) or outcome.record, fleet)
        assert figures is not None
        trials.append(
            Trial(
                time_scale=outcome.plan.time_scale,
                lateness_p99=figures.lateness_p99,
                throughput_tok_s=figures.throughput_tok_s,
                step_s=figures.step_mean_s,
                overhead_s=elapsed_s - cast(float, outcome.report["wall_duration_s"]),
            )
        )
        if trials[-1].lateness_p99 <= LATENESS_LIMIT:
            break
    return trials


def least_late(trials: Sequence[Trial]) -> Trial:
    """The trial that represents the machine."""
    return min(trials, key=lambda trial: trial.lateness_p99)


@dataclass(frozen=True, slots=True)
class Allowance:
    """Wall time of a run with starting and ending, mean and longest output tokens of a request.

    Every run waits for a longest one at its end.
    """

    wall_s: float
    mean_output: float
    cap_tokens: int

    def requests(self, trial: Trial, time_scale: float) -> int:
        engine_s = (self.wall_s - trial.overhead_s) / time_scale - self._drain_s(trial)
        affordable = int(engine_s / self._request_s(trial))
        return min(max(affordable, FEWEST_REQUESTS), MOST_REQUESTS)

    def time_scale(self, trial: Trial) -> float:
        """The needed scale, or the largest one that leaves enough requests for averages.

        Never faster than the trial's: the machine's behaviour there is unknown.
        """
        engine_s = ENOUGH_REQUESTS * self._request_s(trial) + self._drain_s(trial)
        affordable = (self.wall_s - trial.overhead_s) / engine_s
        return round(max(min(trial.scale_needed, affordable), trial.time_scale), 1)

    def _request_s(self, trial: Trial) -> float:
        return self.mean_output / trial.throughput_tok_s * SLOWER

    def _drain_s(self, trial: Trial) -> float:
        return self.cap_tokens * trial.step_s
