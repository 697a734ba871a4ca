"""What each policy would have done with the recorded requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from loadgen.diagnose.analysis.findings import Figures
from router.core.types import Dispatch

# What is simulated may win by chance; the product's own policy is named if it is as good.
_AS_GOOD = 0.005

Mode = Literal["full", "arrivals"]


@dataclass(frozen=True, slots=True)
class Prospect:
    """A policy on the recorded requests.

    Attributes:
        policy, dispatch: who goes where, and when.
        current: it is the one that was in force.
        simulated: its figures.
        predicted: what was measured, times simulated(this) / simulated(current); where nobody
            knows what was in force, as simulated.
        energy_j_per_token: by the model P(u) of the paper.
    """

    policy: str
    dispatch: Dispatch
    current: bool
    simulated: Figures
    predicted: Figures
    energy_j_per_token: float

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.policy}, {self.dispatch.value}"


@dataclass(frozen=True, slots=True)
class Prospects:
    """All policies, each in the better of its forms of dispatch, the one in force in its own.

    Attributes:
        mode: whether the cluster was kept as full as it was, or requests came at their times.
        requests: how many were played in a circle.
        steps: simulated with each policy, after a warm-up.
        all: the most tokens per second first.
    """

    mode: Mode
    requests: int
    steps: int
    all: tuple[Prospect, ...]

    @property
    def current(self) -> Prospect | None:
        """The one in force, if it is known."""
        return next((each for each in self.all if each.current), None)

    def of(self, policy: str) -> Prospect | None:
        """A policy's: in the form that was in force, else in its better one."""
        found = [each for each in self.all if each.policy == policy]
        return min(found, key=lambda each: not each.current, default=None)

    @property
    def best(self) -> Prospect:
        """The one to switch to; bfio, unless another is surely better."""
        first, own = self.all[0], self.of("bfio")
        if own is None:
            return first
        tokens_s = own.simulated.throughput_tok_s
        return own if tokens_s >= (1 - _AS_GOOD) * first.simulated.throughput_tok_s else first
