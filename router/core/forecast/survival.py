"""Survival curves of output lengths, learned from ends (Kaplan and Meier, 1958).

The hazard at x is, per bucket of prompt lengths, the share of requests that reached their x-th
output token and ended with it. Survival is the product of the complements. A request that was
aborted, reached its cap, or still runs was at risk up to its present length only, and is no end.
One first seen with some output, or again after a preemption, was at risk from there on.

Every request, ended or not, weighs exp(-(steps since it began) / memory). Weights by the step of
the end would favour short requests at the start and after every change.
"""

from __future__ import annotations

import math

import numpy as np

from router.core.forecast.end_signals import Departure, steps_to_cap
from router.core.forecast.forecast import Chances, Running
from router.core.forecast.step_cost import Floats, Ints, WorkProfile

MEMORY_STEPS = 10_000.0
REFRESH_STEPS = 256  # steps between two updates of the curves
LEARNED_TOKENS = 8192
BORROWED = 32.0  # weight of the pooled curve in each bucket, in requests

_SHORTEST, _LONGEST = 4, 15  # powers of two that bound the prompt buckets
_BUCKETS = _LONGEST - _SHORTEST + 1
_BEYOND = 512  # columns behind the longest age, as room for a look-ahead
_FIRST_MEAN_TOKENS = 256.0  # of the one request assumed at the start


class SurvivalSignal:
    """Chances by the curve of a request's prompt bucket, given its output so far.

    Args:
        profile: tokens per step, and time of the first one.
        memory_steps: steps after which a request counts 1/e.
        borrowed: weight, in requests, of the pooled curve in a bucket at every token, and of a
            constant hazard in the pooled curve.
        learned_tokens: output length from which the hazard is constant.

    Attributes:
        stale: true if the curves are due for an update.
    """

    def __init__(
        self,
        profile: WorkProfile | None = None,
        memory_steps: float = MEMORY_STEPS,
        borrowed: float = BORROWED,
        learned_tokens: int = LEARNED_TOKENS,
    ) -> None:
        self._profile = profile or WorkProfile()
        self._memory_steps = memory_steps
        self._borrowed = borrowed
        self._longest = learned_tokens
        self._ended = np.zeros((_BUCKETS, learned_tokens + 1))
        self._left = np.zeros((_BUCKETS, learned_tokens + 1))
        self._since_refresh = 0
        self.stale = False
        self._log_survival = self._draw(self._ended, self._left)

    def survival(self, prompt_tokens: int) -> Floats:
        """Probability of an output longer than x tokens, x = 0, 1, …, for this prompt length."""
        bucket = int(_bucket(np.array([prompt_tokens]))[0])
        return np.exp(self._log_survival[bucket, : self._longest + 1])

    def predict(self, running: Running, horizon: int) -> Chances:
        """Column h: S(generated + tokens yielded by then) / S(generated), 0 from the cap on."""
        age = np.minimum(running.generated_tokens, self._longest)
        start = _bucket(running.prompt_tokens) * self._log_survival.shape[1] + age
        curve = self._log_survival.ravel()
        from_start = curve.take(start)
        cap = steps_to_cap(running, self._profile)
        ahead = np.arange(horizon + 1)[:, None]
        tokens = self._profile.step_tokens * self._profile.decoded(running.prefill_left, ahead)
        later = start + np.minimum(tokens, _BEYOND).astype(np.int64)
        chances = curve.take(later, mode="clip")
        chances -= from_start
        np.exp(chances, out=chances)
        if cap.min(initial=horizon + 1) <= horizon:
            chances *= ahead < cap
        return Chances(chances.T)

    def ended(self, departure: Departure) -> None:
        length = departure.generated_tokens
        known = self._ended if departure.by_itself and length <= self._longest else self._left
        bucket = min(max(departure.prompt_tokens.bit_length(), _SHORTEST), _LONGEST) - _SHORTEST
        began = self._since_refresh - length / self._profile.step_tokens
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
        """Update the curves from all running requests if that is due."""
        if not self.stale:
            return
        age = np.minimum(running.generated_tokens, self._longest)
        weight = np.exp(-running.generated_tokens / self._profile.step_tokens / self._memory_steps)
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
    """Bucket by the bits of the prompt's length; shape (n,)."""
    bits = np.frexp(prompt_tokens)[1].astype(np.int64)
    # Same as np.clip, in half the time on short arrays.
    return np.minimum(np.maximum(bits, _SHORTEST), _LONGEST) - _SHORTEST
