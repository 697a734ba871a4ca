"""Wall time of a demo's runs, and their time scale, from a short trial on this machine."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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
# A run may take so many times its share of the time that is left; a trial, this part of it.
RUN_SHARES, TRIAL_SHARES = 2.0, 0.5
# No replay is interrupted sooner: before that it may have no report.
LEAST_S = 10.0


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of a trial's steady window, in engine seconds; lateness as a share of a step."""

    time_scale: float
    lateness_p99: float
    throughput_tok_s: float
    step_s: float

    @property
    def scale_needed(self) -> float:
        """Time scale at which runs should keep up; never faster than the trial's."""
        if self.lateness_p99 <= LATENESS_LIMIT:
            return self.time_scale
        needed = self.time_scale * self.lateness_p99 / LATENESS_LIMIT * MARGIN
        return round(min(needed, SCALE_MAX), 1)

    def scale_of(self, requests: int, mean_output: float, cap_tokens: int, wall_s: float) -> float:
        """The needed scale, or the largest one with which a run takes so long.

        Never faster than the trial's: the machine's behaviour there is unknown. At its end, every
        run waits for a request of the most output tokens.
        """
        request_s = mean_output / self.throughput_tok_s * SLOWER
        affordable = wall_s / (requests * request_s + cap_tokens * self.step_s)
        return round(max(min(self.scale_needed, affordable), self.time_scale), 1)


def calibrate(execute: Callable[[RunPlan], Outcome], plan: RunPlan, fleet: Fleet) -> list[Trial]:
    """Try the machine, again if it was late: one hiccup of a shared machine is no measure."""
    trials: list[Trial] = []
    while len(trials) < TRIALS:
        outcome = execute(replace(plan, requests=TRIAL_REQUESTS))
        figures = step_figures(steady_steps(outcome) or outcome.record, fleet)
        assert figures is not None
        trials.append(
            Trial(
                time_scale=outcome.plan.time_scale,
                lateness_p99=figures.lateness_p99,
                throughput_tok_s=figures.throughput_tok_s,
                step_s=figures.step_mean_s,
            )
        )
        if trials[-1].lateness_p99 <= LATENESS_LIMIT:
            break
    return trials


def least_late(trials: Sequence[Trial]) -> Trial:
    """The trial that represents the machine."""
    return min(trials, key=lambda trial: trial.lateness_p99)


@dataclass(slots=True)
class TimeLeft:
    """Wall time until ``end_s`` for the replays of so many runs to come."""

    end_s: float
    runs: int
    clock: Callable[[], float] = time.monotonic
    overhead_s: float = 0.0  # the most that starting and ending one has taken

    @property
    def seconds(self) -> float:
        return self.end_s - self.clock() - self.overhead_s * self.runs

    @property
    def share_s(self) -> float:
        """Of each run to come."""
        return self.seconds / self.runs

    def execute(self, run: Callable[[float], Outcome], shares: float) -> Outcome:
        """Execute a run for so many shares at most, and learn what starting and ending takes."""
        start_s = self.clock()
        outcome = run(max(min(self.seconds, shares * self.share_s), LEAST_S))
        spent_s = self.clock() - start_s - outcome.report["wall_duration_s"]
        self.overhead_s = max(self.overhead_s, spent_s)
        return outcome
