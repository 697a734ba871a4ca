"""What may be known of the coming ends of running requests; the learned curve is in ``survival``.

No signal lets a request outlive its cap on output tokens, and none knows more than a live router
can: signals that know the future exist in the simulator only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np

from router.forecast import Chances, Ends, Prediction, Running, Signal
from router.workload import Floats, Ints, WorkProfile


class Departure(msgspec.Struct, frozen=True, gc=False):
    """An engine request that left its worker.

    Attributes:
        id: as in ``Running``.
        completed: it ended by itself or at its cap; False if it was aborted or failed.
        max_tokens: its cap, ``NO_CAP`` where there is none.
        engine_id: as its engine calls it, where that is known.
        from_tokens: output that it had when it was first seen there, or seen again: after a
            preemption or a silence it goes on, and what came before has been told, or never seen.
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
        """Output that was seen to come, and that no departure has told before."""
        return max(0, self.generated_tokens - self.from_tokens)

    @property
    def by_itself(self) -> bool:
        """The model ended it; at a cap it might have gone on."""
        return self.completed and self.generated_tokens < self.max_tokens


@runtime_checkable
class LearningSignal(Signal, Protocol):
    """A signal that learns from what it is told.

    As long as it is not stale, what it predicts of a request depends on that request alone.
    """

    @property
    def stale(self) -> bool:
        """It is to observe before it predicts again."""
        ...

    def observe(self, running: Running) -> None:
        """All requests that run before step k."""
        ...

    def ended(self, departure: Departure) -> None:
        """A request has left its worker."""
        ...

    def advance(self, steps: int) -> None:
        """Steps have passed; the ends at them have been told."""
        ...


class NoSignal:
    """Nothing is known: every request goes on."""

    def predict(self, running: Running, horizon: int) -> Ends:
        """Ends behind the look-ahead."""
        return Ends(np.full(len(running), horizon + 1, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class CapSignal:
    """A request goes on to its ``max_tokens``."""

    profile: WorkProfile = field(default_factory=WorkProfile)

    def predict(self, running: Running, horizon: int) -> Ends:
        """Ends at the cap, if it is within reach or not."""
        return Ends(steps_to_cap(running, self.profile))


@dataclass(frozen=True, slots=True)
class ReportedSignal:
    """The engine's probability of the end token, taken to stay as it is.

    Where p is reported, a request goes on for t more tokens with probability (1 - p)^t.

    Attributes:
        otherwise: what holds where an engine reports none; None: the cap.
    """

    profile: WorkProfile = field(default_factory=WorkProfile)
    otherwise: Signal | None = None
    _learner: LearningSignal | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Found once: to look whether it has the methods takes longer than to call them.
        learner = self.otherwise if isinstance(self.otherwise, LearningSignal) else None
        object.__setattr__(self, "_learner", learner)

    def predict(self, running: Running, horizon: int) -> Prediction:
        """The reported chances up to the cap; without any, what the other signal says."""
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
        """Whether the other signal is, if that learns."""
        return self._learner is not None and self._learner.stale

    def observe(self, running: Running) -> None:
        """Told on to the other signal, if that learns."""
        if self._learner is not None:
            self._learner.observe(running)

    def ended(self, departure: Departure) -> None:
        """Told on to the other signal, if that learns."""
        if self._learner is not None:
            self._learner.ended(departure)

    def advance(self, steps: int) -> None:
        """Told on to the other signal, if that learns."""
        if self._learner is not None:
            self._learner.advance(steps)


def steps_to_cap(running: Running, profile: WorkProfile) -> Ints:
    """Steps that each request runs if it ends at its cap; shape (n,), at least 1."""
    tokens = np.maximum(1, running.max_tokens - running.generated_tokens)
    decodes: Ints = np.ceil(tokens / profile.step_tokens).astype(np.int64)
    decodes += profile.steps_before_first(running.prefill_left)
    return decodes
