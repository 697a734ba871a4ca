"""BF-IO's input at each decision of one group, live and simulated alike."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from router.core.forecast.end_signals import (
    CapSignal,
    Departure,
    NoSignal,
    ProvenSignal,
    Signal,
    SkillMeter,
    SurvivalSignal,
)
from router.core.forecast.forecast import Floats, Ints, Outlook, Running, WorkProfile, forecast
from router.core.types import DEFAULT_SLOTS

NEEDED_SKILL = 0.35
BLIND_TIE_WEIGHT = 0.1
WINDOW = 2.0  # effective look-ahead in steps where a worker completes one request per step
WINDOW_STEPS = (1.5, 10.0)  # its bounds
WINDOWS_SEEN = 4.0  # the horizon, in effective look-aheads
# Of requests of one token, where a worker completes one per step; its bounds.
TIE_WEIGHT = 0.05
TIE_WEIGHTS = (0.04, 1.0)
MANY_WORKERS = 64  # from here on 30,000 moves even out all only with a larger mu
MANY_TIE_WEIGHT = 0.4
# Lead of a worker with free slots below the others, as a share of the tokens that it gains until
# its next free slot: without and with look-ahead.
BLIND_LEAD = 1.5
LEAD = 0.5


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of BF-IO's objective (arXiv 2601.17855, section 4)."""

    horizon: int  # H, steps beyond the coming one
    discount: float  # gamma, weight of a step relative to the one before
    tie_weight: float  # mu of the quadratic term, in 1/tokens
    lead_tokens: float = 0.0  # how far below the others a worker with free slots should end

    def __post_init__(self) -> None:
        if self.horizon < 0:
            raise ValueError(f"horizon {self.horizon}: give 0 steps or more")
        if not 0 < self.discount <= 1:
            raise ValueError(f"discount {self.discount}: give more than 0 and at most 1")
        if not 0 <= self.tie_weight < math.inf:
            raise ValueError(f"tie_weight {self.tie_weight}: give a number from 0 up")
        if not 0 <= self.lead_tokens < math.inf:
            raise ValueError(f"lead_tokens {self.lead_tokens}: give a number from 0 up")


def choose(
    workers: int,
    slots: int,
    output_steps: float,
    size_tokens: float,
    skill: float | None,
    horizon: int | None = None,
    growth: float = 1.0,
) -> Parameters:
    """The rule for H, gamma, mu and the lead.

    A request decodes for S steps, so a full worker completes one every e = S / B steps. A choice
    matters until later ones on that worker make up for it. So the effective look-ahead w = 1 / (1 -
    gamma) grows with e, though more slowly: distant steps depend on open choices. Without a signal
    no look-ahead is best, and mu does the work.

    =====  ==========================  =============================
    .      skill < ``NEEDED_SKILL``    else
    =====  ==========================  =============================
    w      -                           2 e^(1/2), 1.5 to 10 steps
    H      0                           4 w
    gamma  1                           1 - 1 / w
    mu     0.1                         0.05 e / Z, 0.04 / Z to 1 / Z; 0.4 / Z or more from G = 64
    lead   1.5 S growth                0.5 S growth
    =====  ==========================  =============================

    Loads farther from their mean than 1 / mu count by their squares. Each request that ends lowers
    a load by its size, until a later choice fills the slot. So 1 / mu is a number of mean sizes Z:
    if it were less, the many ends of far steps would decide instead of what enters now. The fewer
    ends the window has, the smaller it may be.

    The lead is not in the paper. The program ignores that the others refill as requests end, while
    a worker just filled gains S growth tokens until its next end.

    Fitted to simulations of BurstGPT, Azure conv, Mooncake and Vidur arXiv lengths (Z from 400 to
    15,000, e from 0.8 to 12, oracles that miss none to half of the ends) at 16 to 64 workers. A
    single worker has nothing to balance: H = 0.

    ``workers`` is G, ``slots`` B of each, ``output_steps`` the mean S, ``size_tokens`` Z, the mean
    load that leaves with a request, ``growth`` tokens per step. A given horizon is kept.
    """
    completion_steps = output_steps / slots
    window = _between(WINDOW_STEPS, WINDOW * math.sqrt(completion_steps))
    if horizon is None:
        sees = workers > 1 and skill is not None and skill >= NEEDED_SKILL
        horizon = math.ceil(WINDOWS_SEEN * window) if sees else 0
    if horizon == 0:
        return Parameters(0, 1.0, BLIND_TIE_WEIGHT, BLIND_LEAD * growth * output_steps)
    least, most = TIE_WEIGHTS
    bounds = (MANY_TIE_WEIGHT if workers >= MANY_WORKERS else least, most)
    tie_weight = _between(bounds, TIE_WEIGHT * completion_steps) / size_tokens
    return Parameters(horizon, 1 - 1 / window, tie_weight, LEAD * growth * output_steps)


def _between(bounds: tuple[float, float], value: float) -> float:
    return min(max(value, bounds[0]), bounds[1])


# Signals of a live router, by name.
SIGNALS: Mapping[str, Callable[[WorkProfile], Signal]] = {
    "none": NoSignal,
    "cap": CapSignal,
    "survival": SurvivalSignal,
    "auto": ProvenSignal,
}

REVIEW_STEPS = 64
FIRST_OUTPUT_TOKENS = 256.0  # mean output length before the first end
FIRST_SIZE_TOKENS = 1024.0  # mean KV tokens of a request at its end, likewise
OUTPUTS_REMEMBERED = 4096


class LookAhead:
    """Forecasts for one group; parameters that are None follow the rule (``choose``).

    At each step, report the ends (``ended``) before the step (``advance``). Deterministic: no
    clock, no random numbers. The rule's horizon is reviewed every ``REVIEW_STEPS`` steps.
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
        self.step_tokens = self.profile.step_tokens
        self._horizon = horizon
        given = {"discount": discount, "tie_weight": tie_weight, "lead_tokens": lead_tokens}
        self._given: dict[str, Any] = {
            name: value for name, value in given.items() if value is not None
        }
        self._meter = None if isinstance(signal, NoSignal) else SkillMeter()
        self._lengths = MeanLengths()
        self._fleet = (1, DEFAULT_SLOTS)
        self._unreviewed = 0
        self.parameters = self._choose()
        self._versions: Sequence[int] = ()
        self._work: Floats = np.empty((0, 0))

    @property
    def skill(self) -> float | None:
        """None while unknown, or where nothing depends on it."""
        return self._meter.skill if self._meter else None

    @property
    def needs_running(self) -> bool:
        """True if the next outlook needs the running requests; else sums by worker suffice."""
        if self.parameters.horizon > 0 or not self.profile.plain:
            return True
        return self._horizon is None and self._meter is not None and self._meter.due

    def outlook(self, running: Running, workers: int, slots: int) -> Outlook:
        self._settle(workers, slots)
        self._observe(running)
        return self._weighed(self._forecast(running, workers))

    def renewed(
        self, versions: Sequence[int], running: Callable[[Iterable[int]], Running], slots: int
    ) -> Outlook:
        """Forecast that recomputes only workers that changed since the last call.

        ``versions``: number per worker that changes with its requests and never repeats.
        ``running``: from worker indices to their requests, renumbered in that order.
        """
        workers = len(versions)
        self._settle(workers, slots)
        learns = self.signal.stale or (self._meter is not None and self._meter.due)
        if learns or self._work.shape != (workers, self.parameters.horizon + 1):
            now = running(range(workers))
            self._observe(now)
            self._work = self._forecast(now, workers)
        elif changed := [i for i in range(workers) if versions[i] != self._versions[i]]:
            self._work = self._work.copy()  # the last outlook keeps its own array
            self._work[changed] = self._forecast(running(changed), len(changed))
        self._versions = versions
        return self._weighed(self._work)

    def outlook_from_loads(self, loads: Floats | Ints, requests: Ints, slots: int) -> Outlook:
        """Forecast without ``needs_running``: KV tokens at step k, requests; each of shape (G,)."""
        assert not self.needs_running
        self._settle(len(loads), slots)
        return self._weighed((loads + self.profile.request_tokens * requests)[:, None])

    def ended(self, departure: Departure) -> None:
        self._lengths.ended(departure)
        self.signal.ended(departure)
        if self._meter is not None:
            self._meter.ended(departure)

    def follow(self, profile: WorkProfile) -> None:
        if profile == self.profile:
            return
        self.profile, self.step_tokens = profile, profile.step_tokens
        self.signal.follow(profile)
        self._work = np.empty((0, 0))
        self.parameters = self._choose(self.parameters.horizon)

    def advance(self, steps: int = 1) -> bool:
        """Count steps; true if they ended with a review."""
        self.signal.advance(steps)
        if self._meter is not None:
            self._meter.advance(steps)
        self._unreviewed += steps
        if self._unreviewed < REVIEW_STEPS:
            return False
        self._unreviewed = 0
        self.parameters = self._choose()
        return True

    def _observe(self, running: Running) -> None:
        self._work = np.empty((0, 0))  # cached work may be out of date from here on
        self.signal.observe(running)
        if self._meter is not None and self._meter.due:
            self._meter.note(running, self.signal)

    def _forecast(self, running: Running, workers: int) -> Floats:
        horizon = self.parameters.horizon
        prediction = self.signal.predict(running, horizon)
        return forecast(running, prediction, self.profile, workers, horizon)

    def _settle(self, workers: int, slots: int) -> None:
        """For another fleet the weights change at once; the horizon waits for the next review."""
        if self._fleet != (workers, slots):
            self._fleet = (workers, slots)
            self.parameters = self._choose(self.parameters.horizon)

    def _choose(self, horizon: int | None = None) -> Parameters:
        horizon = self._horizon if horizon is None else horizon
        output_steps = self._lengths.mean_tokens / self.step_tokens
        size_tokens = self._lengths.mean_size_tokens + self.profile.request_tokens
        chosen = choose(
            *self._fleet, output_steps, size_tokens, self.skill, horizon, self.profile.growth
        )
        return replace(chosen, **self._given)

    def _weighed(self, work: Floats) -> Outlook:
        chosen = self.parameters
        return Outlook(work, self.profile, chosen.discount, chosen.tie_weight, chosen.lead_tokens)


class MeanLengths:
    """Output tokens per completion, aborted requests' tokens included; KV tokens per departure.

    The first is the maximum-likelihood mean of an exponential law with censoring, both with decay.
    A request that returns, as after a preemption, adds only its new tokens to the first.
    """

    def __init__(self) -> None:
        self._tokens = FIRST_OUTPUT_TOKENS
        self._completions = 1.0
        self._size_tokens = FIRST_SIZE_TOKENS
        self._departures = 1.0
        self.mean_tokens = FIRST_OUTPUT_TOKENS
        self.mean_size_tokens = FIRST_SIZE_TOKENS

    def ended(self, departure: Departure) -> None:
        fade = math.exp(-1 / OUTPUTS_REMEMBERED)
        self._tokens = self._tokens * fade + departure.new_tokens
        self._completions = self._completions * fade + departure.completed
        self.mean_tokens = self._tokens / self._completions
        size_tokens = max(1, departure.prompt_tokens + departure.generated_tokens)
        self._size_tokens = self._size_tokens * fade + size_tokens
        self._departures = self._departures * fade + 1
        self.mean_size_tokens = self._size_tokens / self._departures
