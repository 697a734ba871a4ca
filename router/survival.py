"""Survival curves of output lengths, learned as requests end (Kaplan and Meier, 1958).

For each bucket of prompt lengths, of the requests that reached their x-th output token, the share
that ended with it is the hazard at x; survival is the product of what the hazards leave. A request
that was aborted, ended at its cap, or still runs has been at risk up to where it got, and no more:
so it counts among those that reached a token, never among the ends. One that was first seen with
some output, or again after a preemption, was at risk from there on only.

Every request weighs exp(-(steps since it began) / memory), be it over or not. Weights by the step
of its end instead would let the short ones speak first at the start and after every change.
"""

from __future__ import annotations

import math

import numpy as np

from router.forecast import Chances, Running
from router.signals import Departure, steps_to_cap
from router.workload import Floats, Ints, WorkProfile

MEMORY_STEPS = 10_000.0
REFRESH_STEPS = 256  # the curves are drawn anew this often
LEARNED_TOKENS = 8192
BORROWED = 32.0  # requests' worth of the pooled curve that each bucket starts from

_SHORTEST, _LONGEST = 4, 15  # powers of two between which prompts are told apart
_BUCKETS = _LONGEST - _SHORTEST + 1
_BEYOND = 512  # columns behind the longest age, so that a look-ahead from there stays inside
_FIRST_MEAN_TOKENS = 256.0  # of the one request that is assumed before any has ended


class SurvivalSignal:
    """Chances by the curve of a request's prompt bucket, given how far it has come.

    Args:
        profile: how many tokens a step yields, and when the first one comes.
        memory_steps: after which a request counts 1/e.
        borrowed: requests' worth of evidence that a bucket takes from the pooled curve at every
            token, and the pooled curve from a constant hazard.
        learned_tokens: output length up to which hazards are learned; from there on, constant.

    Attributes:
        stale: the curves are to be drawn anew.
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
        """Probability that an output is longer than x tokens, x = 0, 1, …, for such a prompt."""
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
        """A request has left its worker."""
        length = departure.generated_tokens
        known = self._ended if departure.by_itself and length <= self._longest else self._left
        bucket = min(max(departure.prompt_tokens.bit_length(), _SHORTEST), _LONGEST) - _SHORTEST
        began = self._since_refresh - length / self._profile.step_tokens
        weight = math.exp(began / self._memory_steps)
        known[bucket, min(length, self._longest)] += weight
        self._left[bucket, min(length - departure.new_tokens, self._longest)] -= weight

    def advance(self, steps: int) -> None:
        """Steps have passed; the ends at them have been told."""
        self._since_refresh += steps
        if self._since_refresh >= REFRESH_STEPS:
            fade = math.exp(-self._since_refresh / self._memory_steps)
            self._ended *= fade
            self._left *= fade
            self._since_refresh = 0
            self.stale = True

    def observe(self, running: Running) -> None:
        """All requests that run now; draws the curves anew if that is due."""
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
    """By the bits of the prompt's length; shape (n,)."""
    bits = np.frexp(prompt_tokens)[1].astype(np.int64)
    # As np.clip does, in half the time where they are few.
    return np.minimum(np.maximum(bits, _SHORTEST), _LONGEST) - _SHORTEST
