"""Knowledge of coming ends, including the future, which only a simulator knows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, cast, get_args

import numpy as np

from router.core.errors import ConfigError
from router.core.forecast.end_signals import Signal
from router.core.forecast.forecast import Ends, Floats, Ints, Running, WorkProfile
from router.core.forecast.look_ahead import SIGNALS
from router.core.step_time import number_in

Kind = Literal["auto", "none", "cap", "survival", "oracle"]


@dataclass(frozen=True, slots=True)
class Foreseen(Running):
    """Running requests with known ends; only the simulator can make one."""

    remaining: Ints  # steps that each request will still run, including the coming one, shape (n,)
    # KV tokens held during the coming step, shape (n,); with a drift it differs from the generated
    # ones.
    held_tokens: Ints

    @property
    def tokens(self) -> Ints:
        return self.held_tokens


@dataclass(frozen=True, slots=True)
class Drift(WorkProfile):
    """Growth as in Theorem 3, of the load alone: a step yields one token, whatever the drift.

    Live, a request grows by more than a token because a step yields more, and so it ends sooner.
    """

    @property
    def step_tokens(self) -> float:
        return 1.0


class OracleSignal(Signal):
    """True ends, except for a share of the requests that seem never to end.

    ``missed`` is that share, drawn once per request.
    """

    def __init__(
        self, missed: float = 0.0, seed: int = 0, profile: WorkProfile | None = None
    ) -> None:
        super().__init__(profile)
        self.missed = missed
        self.seed = seed

    def predict(self, running: Running, horizon: int) -> Ends:
        """Needs a ``Foreseen``."""
        if not isinstance(running, Foreseen):
            raise TypeError("an oracle needs the simulator's requests")
        if self.missed == 0:
            return Ends(running.remaining)
        unseen = _uniform(running.id, self.seed) < self.missed
        return Ends(np.where(unseen, np.maximum(running.remaining, horizon + 1), running.remaining))


@dataclass(frozen=True, slots=True)
class Knowledge:
    """Knowledge of a look-ahead."""

    # An oracle, or a signal of ``serve``; simulated engines report no probabilities.
    kind: Kind = "none"
    missed: float = 0.0  # fraction of the ends that an oracle misses

    @classmethod
    def parse(cls, text: str) -> Knowledge:
        """Parse ``auto``, ``none``, ``cap``, ``survival``, ``oracle`` or ``miss:P``."""
        kinds = get_args(Kind)
        if text in kinds:
            return cls(cast(Kind, text))
        name, _, value = text.partition(":")
        missed = number_in(value) if name == "miss" else math.nan
        if not 0 <= missed <= 1:
            raise ConfigError(
                f"--lookahead: {text!r} is unknown; write {', '.join(kinds)}, or miss:P with the "
                "fraction of ends that is missed"
            )
        return cls("oracle", missed)

    def __str__(self) -> str:
        return f"miss:{self.missed:g}" if self.missed else self.kind

    def signal(self, profile: WorkProfile, seed: int) -> Signal:
        if self.kind == "oracle":
            return OracleSignal(self.missed, seed, profile)
        return SIGNALS[self.kind](profile)


def _uniform(ids: Ints, seed: int) -> Floats:
    """A number in [0, 1) for each id, the same at every call (SplitMix64)."""
    with np.errstate(over="ignore"):
        mixed = (ids.astype(np.uint64) + np.uint64(seed) * np.uint64(0x632BE59BD9B4E019)) * (
            np.uint64(0x9E3779B97F4A7C15)
        )
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    chances: Floats = (mixed >> np.uint64(11)).astype(np.float64) / float(1 << 53)
    return chances
