"""The look-ahead of one group: what BF-IO is told at each decision, live and simulated alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from router.forecast import Outlook, Running, Signal, forecast
from router.signals import CapSignal, Departure, LearningSignal, NoSignal, ReportedSignal
from router.survival import SurvivalSignal
from router.tuning import Parameters, SkillMeter, choose
from router.types import DEFAULT_SLOTS
from router.workload import Floats, Ints, WorkProfile

# What a live router can go by, by name.
SIGNALS: Mapping[str, Callable[[WorkProfile], Signal]] = MappingProxyType(
    {
        "none": lambda _: NoSignal(),
        "cap": CapSignal,
        "survival": SurvivalSignal,
        "auto": lambda profile: ReportedSignal(profile, SurvivalSignal(profile)),
    }
)

REVIEW_STEPS = 64
FIRST_OUTPUT_TOKENS = 256.0  # mean output length before any is known
OUTPUTS_REMEMBERED = 4096


class LookAhead:
    """Forecasts for one group, with parameters that follow the work unless they are given.

    Of each step, tell the ends (``ended``) first, then that it has passed (``advance``). The same
    calls give the same outlooks: there is no clock and no chance in it.

    Args:
        signal: what is known of coming ends.
        profile: what requests cost.
        horizon: H; None: by the rule of ``tuning.choose``, reviewed every ``REVIEW_STEPS`` steps.
        discount: gamma; None: by the rule.
        tie_weight: mu; None: by the rule.
        lead_tokens: see ``Parameters``; None: by the rule.
    """

    def __init__(
        self,
        signal: Signal,
        profile: WorkProfile | None = None,
        horizon: int | None = None,
        discount: float | None = None,
        tie_weight: float | None = None,
        lead_tokens: float | None = None,
    ) -> None:
        self.signal = signal
        self.profile = profile or WorkProfile()
        self._horizon = horizon
        self._discount = discount
        self._tie_weight = tie_weight
        self._lead_tokens = lead_tokens
        self._learner = signal if isinstance(signal, LearningSignal) else None
        self._meter = None if isinstance(signal, NoSignal) else SkillMeter()
        self._lengths = MeanOutput()
        self._fleet = (1, DEFAULT_SLOTS)
        self._unreviewed = 0
        self._parameters = self._choose()
        self._versions: Sequence[int] = ()
        self._work: Floats = np.empty((0, 0))

    @property
    def parameters(self) -> Parameters:
        """Those in force."""
        return self._parameters

    @property
    def skill(self) -> float | None:
        """The signal's, None while unknown (or where nothing depends on it)."""
        return self._meter.skill if self._meter else None

    @property
    def mean_output_tokens(self) -> float:
        """Output length of the requests seen."""
        return self._lengths.mean_tokens

    @property
    def needs_running(self) -> bool:
        """The next outlook takes the running requests; else their sums by worker will do."""
        if self._parameters.horizon > 0 or not self.profile.plain:
            return True
        return self._horizon is None and self._meter is not None and self._meter.due

    def outlook(self, running: Running, workers: int, slots: int) -> Outlook:
        """Forecast before a decision.

        Args:
            running: every request that runs in the group.
            workers: G.
            slots: B of each worker.
        """
        self._settle(workers, slots)
        self._observe(running)
        return self._weighed(self._forecast(running, workers))

    def renewed(
        self, versions: Sequence[int], running: Callable[[Iterable[int]], Running], slots: int
    ) -> Outlook:
        """The same, worked out for those workers only that have changed since the last time.

        Args:
            versions: of each worker, never the same again once its requests have changed.
            running: the requests of some workers, which are numbered in the order in which they
                are asked for.
            slots: B of each worker.
        """
        workers = len(versions)
        self._settle(workers, slots)
        if self._learns or self._work.shape != (workers, self._parameters.horizon + 1):
            now = running(range(workers))
            self._observe(now)
            self._work = self._forecast(now, workers)
        elif changed := [i for i in range(workers) if versions[i] != self._versions[i]]:
            self._work = self._work.copy()  # the last outlook keeps its own
            self._work[changed] = self._forecast(running(changed), len(changed))
        self._versions = versions
        return self._weighed(self._work)

    def outlook_from_loads(self, loads: Floats | Ints, requests: Ints, slots: int) -> Outlook:
        """The same without the running requests, where ``needs_running`` is False.

        Args:
            loads: shape (G,), KV tokens on each worker at step k.
            requests: shape (G,), requests on each.
            slots: B of each worker.
        """
        assert not self.needs_running
        self._settle(len(loads), slots)
        return self._weighed((loads + self.profile.request_tokens * requests)[:, None])

    def ended(self, departure: Departure) -> None:
        """A request has left its worker."""
        self._lengths.ended(departure)
        if self._learner is not None:
            self._learner.ended(departure)
        if self._meter is not None:
            self._meter.ended(departure)

    def advance(self, steps: int = 1) -> None:
        """Steps have passed, or none; the ends at them have been told."""
        if self._learner is not None:
            self._learner.advance(steps)
        if self._meter is not None:
            self._meter.advance(steps)
        self._unreviewed += steps
        if self._unreviewed >= REVIEW_STEPS:
            self._unreviewed = 0
            self._parameters = self._choose()

    @property
    def _learns(self) -> bool:
        """The next outlook has to show every request to the signal or the meter."""
        stale = self._learner is not None and self._learner.stale
        return stale or (self._meter is not None and self._meter.due)

    def _observe(self, running: Running) -> None:
        self._work = np.empty((0, 0))  # what was said so far need not hold from here on
        if self._learner is not None:
            self._learner.observe(running)
        if self._meter is not None and self._meter.due:
            self._meter.note(running, self.signal)

    def _forecast(self, running: Running, workers: int) -> Floats:
        horizon = self._parameters.horizon
        prediction = self.signal.predict(running, horizon)
        return forecast(running, prediction, self.profile, workers, horizon)

    def _settle(self, workers: int, slots: int) -> None:
        """Another fleet changes the weights at once, the horizon at the next review."""
        if self._fleet != (workers, slots):
            self._fleet = (workers, slots)
            self._parameters = self._choose(self._parameters.horizon)

    def _choose(self, horizon: int | None = None) -> Parameters:
        horizon = self._horizon if horizon is None else horizon
        output_steps = self.mean_output_tokens / self.profile.step_tokens
        chosen = choose(*self._fleet, output_steps, self.skill, horizon, self.profile.growth)
        if self._discount is not None:
            chosen = replace(chosen, discount=self._discount)
        if self._tie_weight is not None:
            chosen = replace(chosen, tie_weight=self._tie_weight)
        if self._lead_tokens is not None:
            chosen = replace(chosen, lead_tokens=self._lead_tokens)
        return chosen

    def _weighed(self, work: Floats) -> Outlook:
        chosen = self._parameters
        return Outlook(work, self.profile, chosen.discount, chosen.tie_weight, chosen.lead_tokens)


class MeanOutput:
    """Mean output length: tokens per completion, aborted requests' tokens included.

    That is the maximum-likelihood mean of an exponential law with censoring; older requests fade.
    A request that leaves and comes back, as after a preemption, adds what is new each time.
    """

    def __init__(self) -> None:
        self._tokens = FIRST_OUTPUT_TOKENS
        self._completions = 1.0

    @property
    def mean_tokens(self) -> float:
        """In tokens."""
        return self._tokens / self._completions

    def ended(self, departure: Departure) -> None:
        """A request has left its worker."""
        fade = math.exp(-1 / OUTPUTS_REMEMBERED)
        self._tokens = self._tokens * fade + departure.new_tokens
        self._completions = self._completions * fade + departure.completed
