"""Results that each policy would have had with the recorded requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

import numpy as np

from loadgen.diagnose.analysis.findings import Figures
from router.core.forecast.forecast import Floats
from router.core.types import Dispatch

if TYPE_CHECKING:
    from loadgen.simulator.decode.decode_results import StepRecords
    from loadgen.simulator.serving.serving_results import ServingRecords

# A simulated lead may be chance; the product's own policy is advised if it is as good.
_AS_GOOD = 0.005

Mode = Literal["full", "arrivals"]


@dataclass(frozen=True, slots=True)
class Caching:
    """What a policy gets from prefix caches, as simulated: share of the tokens, mean TTFT."""

    cached_share: float
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Prospect:
    """A policy on the recorded requests."""

    policy: str
    dispatch: Dispatch
    current: bool
    simulated: Figures
    # Measured figures times simulated(this) / simulated(current); ``simulated`` if the policy in
    # force is unknown.
    predicted: Figures
    energy_j_per_token: float  # energy by the paper's power model P(u)
    caching: Caching | None = None  # if prefix caches are simulated

    @classmethod
    def of(
        cls,
        policy: str,
        dispatch: Dispatch,
        records: StepRecords | ServingRecords,
        waited_s: Floats,
        watts: Floats,
    ) -> Self:
        """Averages over S simulated steps of G workers, predicted as they are.

        Shape (S, G): times that workers waited for the slowest, watts.
        """
        seconds, loads, tokens = records.seconds, records.loads, records.tokens
        busy_s, workers = float(seconds.sum()), loads.shape[1]
        figures = Figures(
            imbalance_tokens=float((workers * loads.max(axis=1) - loads.sum(axis=1)).mean()),
            idle_share=float(waited_s.sum()) / (workers * busy_s),
            throughput_tok_s=float(tokens.sum()) / busy_s,
            step_s=float(np.mean(seconds)),
        )
        energy_j = float(watts.sum(axis=1) @ seconds)
        per_token_j = energy_j / max(1.0, float(tokens.sum()))
        return cls(policy, dispatch, False, figures, figures, per_token_j)

    @property
    def name(self) -> str:
        return f"{self.policy}, {self.dispatch.value}"


@dataclass(frozen=True, slots=True)
class Prospects:
    """All policies, each in its better form of dispatch; the one in force in its own form."""

    # ``full`` keeps the number of requests in the system constant; ``arrivals`` replays arrival
    # times.
    mode: Mode
    requests: int
    steps: int  # steps simulated with each policy, after a warm-up
    all: tuple[Prospect, ...]  # policies by falling throughput

    @property
    def current(self) -> Prospect | None:
        """None: unknown."""
        return next((each for each in self.all if each.current), None)

    def of(self, policy: str) -> Prospect | None:
        """In the form in force, else in its better form."""
        found = [each for each in self.all if each.policy == policy]
        return min(found, key=lambda each: not each.current, default=None)

    @property
    def best(self) -> Prospect:
        """The policy to advise: bfio unless another is clearly better."""
        first, own = self.all[0], self.of("bfio")
        if own is None:
            return first
        tokens_s = own.simulated.throughput_tok_s
        return own if tokens_s >= (1 - _AS_GOOD) * first.simulated.throughput_tok_s else first
