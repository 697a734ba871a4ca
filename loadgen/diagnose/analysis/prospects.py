"""Results that each policy would have had with the recorded requests."""

from dataclasses import dataclass
from typing import Literal

from loadgen.diagnose.analysis.findings import Figures
from router.core.types import Dispatch

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
