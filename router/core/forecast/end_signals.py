"""Signals that predict the ends of running requests; ``survival`` holds the learned curve.

No signal lets a request outlive its cap, and none uses the future; oracles exist in the simulator
only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np

from router.core.forecast.forecast import Chances, Ends, Prediction, Running, Signal
from router.core.forecast.step_cost import Floats, Ints, WorkProfile


class Departure(msgspec.Struct, frozen=True, gc=False):
    """An engine request that left its worker.

    Attributes:
        completed: true if it ended by itself or at its cap; false if aborted or failed.
        max_tokens: its cap, or ``NO_CAP``.
        engine_id: the engine's id, if known.
        from_tokens: output at its first sight, or at its return after a preemption or a silence;
            earlier departures cover the output before.
    """

    id: int
    prompt_tokens: int
    generated_tokens: int
    completed: bool
    max_tokens: int
    engine_id: str = ""
    from_tokens: int = 0

    @property
    def new_tokens(self) -> int:
        """Output tokens not covered by an earlier departure."""
        return max(0, self.generated_tokens - self.from_tokens)

    @property
    def by_itself(self) -> bool:
        """True if the model ended it; at a cap it might have gone on."""
        return self.completed and self.generated_tokens < self.max_tokens


@runtime_checkable
class LearningSignal(Signal, Protocol):
    """A signal that learns from departures.

    While it is not stale, its prediction for a request depends on that request alone.
    """

    @property
    def stale(self) -> bool:
        """True if it must observe before the next prediction."""
        ...

    def observe(self, running: Running) -> None: ...

    def ended(self, departure: Departure) -> None: ...

    def advance(self, steps: int) -> None:
        """Count steps; the ends at them have been reported."""
        ...


class NoSignal:
    """No knowledge: every request goes on."""

    def predict(self, running: Running, horizon: int) -> Ends:
        return Ends(np.full(len(running), horizon + 1, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class CapSignal:
    """Every request goes on to its ``max_tokens``."""

    profile: WorkProfile = field(default_factory=WorkProfile)

    def predict(self, running: Running, horizon: int) -> Ends:
        return Ends(steps_to_cap(running, self.profile))


@dataclass(frozen=True, slots=True)
class ReportedSignal:
    """The engine's probability p of the end token, taken as constant.

    A request goes on for t more tokens with probability (1 - p)^t.

    Attributes:
        otherwise: signal for requests without p; None: the cap.
    """

    profile: WorkProfile = field(default_factory=WorkProfile)
    otherwise: Signal | None = None
    _learner: LearningSignal | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Checked once: an isinstance test of a protocol costs more than the calls.
        learner = self.otherwise if isinstance(self.otherwise, LearningSignal) else None
        object.__setattr__(self, "_learner", learner)

    def predict(self, running: Running, horizon: int) -> Prediction:
        told = ~np.isnan(running.end_probability)
        otherwise = self.otherwise or CapSignal(self.profile)
        if not told.any():
            return otherwise.predict(running, horizon)
        if told.all():
            return Chances(self._reported(running, horizon + 1).T)
        untold = otherwise.predict(running.take(~told), horizon)
        chances = np.empty((horizon + 1, len(running)))
        chances[:, told] = self._reported(running.take(told), horizon + 1)
        chances[:, ~told] = untold.chances(horizon + 1).T
        return Chances(chances.T)

    def _reported(self, running: Running, steps: int) -> Floats:
        """Shape (K, n)."""
        going_on = (1 - running.end_probability) ** self.profile.step_tokens
        first = self.profile.steps_before_first(running.prefill_left)
        cap = steps_to_cap(running, self.profile)
        chances = np.ones((steps, len(running)))
        for ahead in range(1, steps):
            passing = np.where(ahead > first, going_on, 1.0)
            chances[ahead] = chances[ahead - 1] * passing * (ahead < cap)
        return chances

    @property
    def stale(self) -> bool:
        return self._learner is not None and self._learner.stale

    def observe(self, running: Running) -> None:
        if self._learner is not None:
            self._learner.observe(running)

    def ended(self, departure: Departure) -> None:
        if self._learner is not None:
            self._learner.ended(departure)

    def advance(self, steps: int) -> None:
        if self._learner is not None:
            self._learner.advance(steps)


def steps_to_cap(running: Running, profile: WorkProfile) -> Ints:
    """Steps that each request runs if it ends at its cap; shape (n,), at least 1."""
    tokens = np.maximum(1, running.max_tokens - running.generated_tokens)
    decodes: Ints = np.ceil(tokens / profile.step_tokens).astype(np.int64)
    decodes += profile.steps_before_first(running.prefill_left)
    return decodes
