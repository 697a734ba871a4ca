"""Signals that predict the ends of running requests, and a meter of their skill.

No signal lets a request outlive its cap, and none uses the future.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec
import numpy as np

from router.core.forecast.forecast import (
    Chances,
    Ends,
    Floats,
    Ints,
    Prediction,
    Running,
    WorkProfile,
)


class Departure(msgspec.Struct, frozen=True, gc=False):
    """An engine request that left its worker."""

    id: int
    prompt_tokens: int
    generated_tokens: int
    completed: bool  # true if it ended by itself or at its cap; false if aborted or failed
    max_tokens: int  # its cap, or ``NO_CAP``
    engine_id: str = ""  # empty: unknown
    # Output at its first sight, or at its return after a preemption or a silence; earlier
    # departures cover the output before.
    from_tokens: int = 0

    @property
    def new_tokens(self) -> int:
        return max(0, self.generated_tokens - self.from_tokens)

    @property
    def by_itself(self) -> bool:
        """True if the model ended it; at a cap it might have gone on."""
        return self.completed and self.generated_tokens < self.max_tokens


class Signal:
    """Predicts the ends of running requests; this one knows their caps alone.

    One that learns is told of departures and steps. Unless it is stale, what it predicts of a
    request depends on that request alone.
    """

    def __init__(self, profile: WorkProfile | None = None) -> None:
        self.profile = profile or WorkProfile()

    @property
    def stale(self) -> bool:
        """True if it must observe before the next prediction."""
        return False

    def predict(self, running: Running, horizon: int) -> Prediction:
        """Ends within steps k to k + horizon; rows as in ``running``."""
        return Chances(self.chances(running, np.arange(horizon + 1)[:, None]).T)

    def chances(self, running: Running, ahead: Ints) -> Floats:
        """Of each request, that it still runs so many steps on: (K, n) for ``ahead`` of (K, 1)."""
        return (ahead < steps_to_cap(running, self.profile)).astype(np.float64)

    def follow(self, profile: WorkProfile) -> None:
        """From now on requests compute and grow as this profile says."""
        self.profile = profile

    def observe(self, running: Running) -> None:
        """Look at the requests that run."""

    def ended(self, departure: Departure) -> None:
        """Learn from a departure."""

    def advance(self, steps: int) -> None:
        """Count steps; the ends at them have been reported."""


class NoSignal(Signal):
    """Every request goes on."""

    def predict(self, running: Running, horizon: int) -> Ends:
        return Ends(np.full(len(running), horizon + 1, dtype=np.int64))


class CapSignal(Signal):
    """Every request goes on to its cap."""

    def predict(self, running: Running, horizon: int) -> Ends:
        return Ends(steps_to_cap(running, self.profile))


class ReportedSignal(Signal):
    """The engine's probability p of the end token: t more tokens with chance (1 - p)^t.

    Requests without p go on to their caps.
    """

    def chances(self, running: Running, ahead: Ints) -> Floats:
        going_on = (1 - np.nan_to_num(running.end_probability)) ** self.profile.step_tokens
        first = self.profile.steps_before_first(running.prefill_left)
        chances: Floats = going_on ** np.maximum(0, ahead - first)
        return chances * super().chances(running, ahead)


def steps_to_cap(running: Running, profile: WorkProfile) -> Ints:
    """Steps that each request runs if it ends at its cap; shape (n,), at least 1."""
    tokens = np.maximum(1, running.max_tokens - running.generated_tokens)
    decodes: Ints = np.ceil(tokens / profile.step_tokens).astype(np.int64)
    if profile.prefill_beta:
        decodes += profile.steps_before_first(running.prefill_left)
    return decodes


MEMORY_STEPS = 10_000.0
REFRESH_STEPS = 256  # steps between two updates of the curves
LEARNED_TOKENS = 8192
BORROWED = 32.0  # weight of the pooled curve in each bucket, in requests

_SHORTEST, _LONGEST = 4, 15  # powers of two that bound the prompt buckets
_BUCKETS = _LONGEST - _SHORTEST + 1
_BEYOND = 512  # columns behind the longest age, as room for a look-ahead
_FIRST_MEAN_TOKENS = 256.0  # of the one request assumed at the start


class SurvivalSignal(Signal):
    """Chances by a survival curve of output lengths (Kaplan and Meier, 1958).

    The hazard at x is, per bucket of prompt lengths, the share of requests that reached their x-th
    output token and ended with it. Survival is the product of the complements. A request that was
    aborted, reached its cap, or still runs was at risk up to its present length, and is no end. One
    first seen with some output, or again after a preemption, was at risk from there on.

    Every request, ended or not, weighs exp(-(steps since it began) / memory). Weights by the step
    of the end would favour short requests at the start and after every change.

    Args:
        memory_steps: steps after which a request counts 1/e.
        borrowed: weight, in requests, of the pooled curve in a bucket at every token, and of a
            constant hazard in the pooled curve.
        learned_tokens: output length from which the hazard is constant.
    """

    stale = False

    def __init__(
        self,
        profile: WorkProfile | None = None,
        memory_steps: float = MEMORY_STEPS,
        borrowed: float = BORROWED,
        learned_tokens: int = LEARNED_TOKENS,
    ) -> None:
        super().__init__(profile)
        self._memory_steps = memory_steps
        self._borrowed = borrowed
        self._longest = learned_tokens
        self._ended = np.zeros((_BUCKETS, learned_tokens + 1))
        self._left = np.zeros((_BUCKETS, learned_tokens + 1))
        self._since_refresh = 0
        self._log_survival = self._draw(self._ended, self._left)

    def survival(self, prompt_tokens: int) -> Floats:
        """Probability of an output longer than x = 0, 1, … tokens."""
        bucket = int(_bucket(np.array([prompt_tokens]))[0])
        return np.exp(self._log_survival[bucket, : self._longest + 1])

    def chances(self, running: Running, ahead: Ints) -> Floats:
        """S(generated + tokens yielded by then) / S(generated), 0 from the cap on."""
        age = np.minimum(running.generated_tokens, self._longest)
        row = _bucket(running.prompt_tokens) * self._log_survival.shape[1]
        curve = self._log_survival.ravel()
        tokens = self.profile.step_tokens * self.profile.decoded(running.prefill_left, ahead)
        later = age + tokens.astype(np.int64)
        if tokens.max(initial=0) > _BEYOND:
            np.minimum(later, self._longest + _BEYOND, out=later)
        later += row
        chances = curve.take(later, mode="clip")
        chances -= curve.take(row + age)
        np.exp(chances, out=chances)
        cap, last = steps_to_cap(running, self.profile), int(ahead[-1, 0])
        if cap.min(initial=last + 1) <= last:
            chances *= ahead < cap
        return chances

    def ended(self, departure: Departure) -> None:
        length = departure.generated_tokens
        known = self._ended if departure.by_itself and length <= self._longest else self._left
        bucket = min(max(departure.prompt_tokens.bit_length(), _SHORTEST), _LONGEST) - _SHORTEST
        began = self._since_refresh - length / self.profile.step_tokens
        weight = math.exp(began / self._memory_steps)
        known[bucket, min(length, self._longest)] += weight
        self._left[bucket, min(length - departure.new_tokens, self._longest)] -= weight

    def advance(self, steps: int) -> None:
        self._since_refresh += steps
        if self._since_refresh >= REFRESH_STEPS:
            fade = math.exp(-self._since_refresh / self._memory_steps)
            self._ended *= fade
            self._left *= fade
            self._since_refresh = 0
            self.stale = True

    def observe(self, running: Running) -> None:
        if not self.stale:
            return
        age = np.minimum(running.generated_tokens, self._longest)
        weight = np.exp(-running.generated_tokens / self.profile.step_tokens / self._memory_steps)
        row = _bucket(running.prompt_tokens) * (self._longest + 1)
        entry = np.minimum(running.from_tokens, age)
        alive = np.bincount(row + age, weight, self._left.size)
        alive -= np.bincount(row + entry, weight, self._left.size)
        self._log_survival = self._draw(self._ended, self._left + alive.reshape(self._left.shape))
        self.stale = False

    def _draw(self, ended: Floats, left: Floats) -> Floats:
        """Logarithms of the survival curves; shape (buckets, ages)."""
        at_risk = (ended + left)[:, ::-1].cumsum(axis=1)[:, ::-1]
        overall = (ended[:, 1:].sum() + 1) / (at_risk[:, 1:].sum() + _FIRST_MEAN_TOKENS)
        pooled = self._hazard(ended.sum(axis=0), at_risk.sum(axis=0), overall)
        hazard = np.full((_BUCKETS, self._longest + 1 + _BEYOND), overall)
        hazard[:, : self._longest + 1] = self._hazard(ended, at_risk, pooled)
        hazard[:, 0] = 0.0
        survival: Floats = np.log1p(-np.minimum(hazard, 1 - 1e-12)).cumsum(axis=1)
        return survival

    def _hazard(self, ended: Floats, at_risk: Floats, prior: Floats | float) -> Floats:
        hazard: Floats = (ended + self._borrowed * prior) / (at_risk + self._borrowed)
        return hazard


def _bucket(prompt_tokens: Ints) -> Ints:
    bits = np.frexp(prompt_tokens)[1].astype(np.int64)
    # Same as np.clip, in half the time on short arrays.
    return np.minimum(np.maximum(bits, _SHORTEST), _LONGEST) - _SHORTEST


@dataclass(slots=True, eq=False)
class SkillMeter:
    """Brier skill of a signal's predictions of ends, ``steps`` ahead.

    The score is the mean of (chance - outcome)^2. The skill is 1 less the ratio of the score to
    that of the base rate: 1 for an oracle, 0 for no gain. It notes a ``sample`` of the running
    requests, and the next one once these outcomes are known (``due``), without aborted requests.
    After ``memory`` outcomes an older one counts 1/e; ``evidence`` of each kind makes a result.
    """

    steps: int = 16
    sample: int = 512
    memory: int = 16384
    evidence: float = 16
    due: bool = True
    _noted: dict[int, float] = field(default_factory=dict)
    _left: int = 0
    _fresh: Floats = field(default_factory=lambda: np.zeros(3))
    _sums: Floats = field(default_factory=lambda: np.zeros(3))

    @property
    def skill(self) -> float | None:
        """At most 1; None with too few outcomes."""
        count, ends, errors = self._sums.tolist()
        if min(ends, count - ends) < self.evidence:
            return None
        return 1 - float(errors / (ends * (1 - ends / count)))

    def note(self, running: Running, signal: Signal) -> None:
        count, sample = len(running.id), running
        if count > self.sample:
            sample = running.take(slice(None, None, -(-count // self.sample)))
        chances = signal.predict(sample, self.steps).chances(self.steps + 1)
        self._noted = dict(zip(sample.id.tolist(), (1 - chances[:, -1]).tolist(), strict=True))
        self._left = self.steps
        self.due = False

    def ended(self, departure: Departure) -> None:
        chance = self._noted.pop(departure.id, None)
        if chance is not None and departure.completed:
            self._fresh += (1.0, 1.0, (chance - 1) ** 2)

    def advance(self, steps: int) -> None:
        if self.due:
            return
        self._left -= steps
        if self._left <= 0:
            self.due = True
            self._close()

    def _close(self) -> None:
        chances = np.array(list(self._noted.values()))
        self._fresh += (len(chances), 0.0, np.square(chances).sum())
        self._sums *= math.exp(-self._fresh[0] / self.memory)
        self._sums += self._fresh
        self._fresh = np.zeros(3)
        self._noted = {}


# By so much the skill of reported probabilities exceeds that of learned lengths if they count.
BETTER = 0.02


class ProvenSignal(Signal):
    """Learned lengths, and reported probabilities instead where these have foretold ends better.

    Both are scored on the requests whose engines report a probability. What a model's end token
    tells of the steps ahead differs from model to model: often it is likely in the last step only.
    """

    def __init__(self, profile: WorkProfile | None = None) -> None:
        super().__init__(profile)
        self._survival = SurvivalSignal(profile)
        self._reported = ReportedSignal(profile)
        self._scores: tuple[tuple[SkillMeter, Signal], ...] = (
            (SkillMeter(), self._survival),
            (SkillMeter(), self._reported),
        )
        self._told = False
        self._pays = False

    def follow(self, profile: WorkProfile) -> None:
        super().follow(profile)
        self._survival.follow(profile)
        self._reported.follow(profile)

    def chances(self, running: Running, ahead: Ints) -> Floats:
        chances = self._survival.chances(running, ahead)
        told = ~np.isnan(running.end_probability)
        if told.any():
            self._told = True
            if self._pays:
                chances[:, told] = self._reported.chances(running.take(told), ahead)
        return chances

    @property
    def stale(self) -> bool:
        return self._survival.stale or (self._told and self._scores[0][0].due)

    def observe(self, running: Running) -> None:
        self._survival.observe(running)
        told = running.take(~np.isnan(running.end_probability))
        self._told = len(told) > 0
        if not self._told or not self._scores[0][0].due:
            return
        learned, reported = (meter.skill for meter, _ in self._scores)
        if learned is not None and reported is not None:
            self._pays = reported > learned + BETTER
        for meter, signal in self._scores:
            meter.note(told, signal)

    def ended(self, departure: Departure) -> None:
        self._survival.ended(departure)
        for meter, _ in self._scores:
            meter.ended(departure)

    def advance(self, steps: int) -> None:
        self._survival.advance(steps)
        for meter, _ in self._scores:
            meter.advance(steps)
