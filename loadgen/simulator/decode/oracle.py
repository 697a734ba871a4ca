"""What is known of coming ends, the future included: that is possible in a simulator only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from router.core.errors import ConfigError
from router.core.forecast.forecast import Ends, Running, Signal
from router.core.forecast.look_ahead import SIGNALS
from router.core.forecast.step_cost import Floats, Ints, WorkProfile

Kind = Literal["auto", "none", "cap", "survival", "oracle"]


@dataclass(frozen=True, slots=True)
class Foreseen(Running):
    """Running requests whose ends are known; only the simulator can make one.

    Attributes:
        remaining: shape (n,), steps that each request will still run, the coming one included.
        held_tokens: shape (n,), KV tokens held during the coming step: with a drift, others than
            those generated.
    """

    remaining: Ints
    held_tokens: Ints

    @property
    def tokens(self) -> Ints:
        """KV tokens held during the coming step."""
        return self.held_tokens


@dataclass(frozen=True, slots=True)
class Drift(WorkProfile):
    """Growth as Theorem 3 has it, of the load alone: a step yields one token, however large it is.

    Live, a request grows by more than a token because a step yields more, and ends the sooner.
    """

    @property
    def step_tokens(self) -> float:
        """Always one."""
        return 1.0


@dataclass(frozen=True, slots=True)
class OracleSignal:
    """Ends as they will be, but for some that are never seen coming.

    Attributes:
        missed: fraction of the requests that seem never to end; drawn once per request.
        seed: of that draw.
    """

    missed: float = 0.0
    seed: int = 0

    def predict(self, running: Running, horizon: int) -> Ends:
        """See ``Signal.predict``; needs a ``Foreseen``."""
        if not isinstance(running, Foreseen):
            raise TypeError("an oracle needs the simulator's requests")
        if self.missed == 0:
            return Ends(running.remaining)
        unseen = _uniform(running.id, self.seed) < self.missed
        return Ends(np.where(unseen, np.maximum(running.remaining, horizon + 1), running.remaining))


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What a look-ahead is told.

    Attributes:
        kind: an oracle, or what ``serve`` has; simulated engines report no probabilities.
        missed: fraction of the ends that an oracle does not see.
    """

    kind: Kind = "none"
    missed: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Knowledge:
        """Read ``auto``, ``none``, ``cap``, ``survival``, ``oracle`` or ``miss:P``.

        Raises:
            ConfigError: none of these.
        """
        kinds: tuple[Kind, ...] = ("auto", "none", "cap", "survival", "oracle")
        for kind in kinds:
            if text == kind:
                return cls(kind)
        name, _, value = text.partition(":")
        try:
            missed = float(value) if name == "miss" else math.nan
        except ValueError:
            missed = math.nan
        if not 0 <= missed <= 1:
            raise ConfigError(
                f"--lookahead: {text!r} is unknown; write {', '.join(kinds)}, or miss:P with the "
                "fraction of ends that is missed"
            )
        return cls("oracle", missed)

    def __str__(self) -> str:
        """As it is written on the command line."""
        return f"miss:{self.missed:g}" if self.missed else self.kind

    def signal(self, profile: WorkProfile, seed: int) -> Signal:
        """A new signal of this kind."""
        if self.kind == "oracle":
            return OracleSignal(self.missed, seed)
        return SIGNALS[self.kind](profile)


def _uniform(ids: Ints, seed: int) -> Floats:
    """A number in [0, 1) for each id, the same whenever it is asked for (SplitMix64)."""
    with np.errstate(over="ignore"):
        mixed = (ids.astype(np.uint64) + np.uint64(seed) * np.uint64(0x632BE59BD9B4E019)) * (
            np.uint64(0x9E3779B97F4A7C15)
        )
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    chances: Floats = (mixed >> np.uint64(11)).astype(np.float64) / float(1 << 53)
    return chances
