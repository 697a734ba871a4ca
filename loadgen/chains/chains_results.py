"""Results of simulations of chains: means over repeats, with their 95 % intervals."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from loadgen.chains.chain_simulation import simulate_chains
from loadgen.chains.chains_config import ChainsOptions, Composed, composed
from loadgen.chains.routing import simulate_routing
from loadgen.chains.work import Served, Work
from loadgen.report.intervals import Estimate, estimate, paired
from router.commands.json_output import finite
from router.core.placement.bounds import ResponseBounds, chain_bounds
from router.core.types import Dispatch

Report = dict[str, object]
_NUMBERS = ("load", "target_load", "requests", "warmup", "repeats", "seed")
_CHOICES = ("tune_by", "arrivals", "service", "dispatch")


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """Result of one policy."""

    policy: str
    dispatch: Dispatch
    response: tuple[float, ...]  # mean response time of each repeat, in seconds
    # response_p99_s, waiting_s, service_s: means over repeats; waiting and service are means.
    response_p99_s: float
    waiting_s: float
    service_s: float

    @property
    def mean(self) -> Estimate:
        return estimate(self.response)

    def report(self) -> Report:
        return {
            "response_mean_s": self.mean.mean,
            "response_mean_ci_s": self.mean.half_width,
            "response_p99_s": self.response_p99_s,
            "waiting_mean_s": self.waiting_s,
            "service_mean_s": self.service_s,
        }


@dataclass(frozen=True, slots=True)
class ChainsResult:
    """All policies on the same requests."""

    options: ChainsOptions
    composed: Composed
    rate: float  # arrival rate, requests per second
    policies: tuple[PolicyResult, ...]
    # Bounds on the mean response time of jffc, for Poisson arrivals and exponential work (Theorem
    # 3.7); None if each request chooses its own path.
    bounds: ResponseBounds | None

    @property
    def stable(self) -> bool:
        """Without chains, the rate of those of GCA counts."""
        return self.rate < self.composed.total_rate

    def against_first(self, policy: PolicyResult) -> Estimate:
        """Relative difference of the mean response time from the first policy's, paired."""
        return paired(policy.response, self.policies[0].response)

    def report(self) -> Report:
        """JSON-able form, with the first policy's figures at the top."""
        bounds = asdict(self.bounds) if self.bounds else dict.fromkeys(("lower_s", "upper_s"))
        options = self.options
        return {
            **self.policies[0].report(),
            **{name: finite(value) for name, value in bounds.items()},
            "stable": self.stable,
            "rate": self.rate,
            "total_rate": self.composed.total_rate,
            "reserved_slots": self.composed.reserved_slots,
            "chains": [self.composed.placement.named(chain) for chain in self.composed.chains],
            "policies": [
                {"policy": each.policy, "dispatch": each.dispatch.value}
                | each.report()
                | {"against_first": asdict(self.against_first(each))}
                for each in self.policies
            ],
            "parameters": {
                "scenario": asdict(options.deployment),
                "placement": options.placement.value,
                "allocation": options.allocated.value,
                "planned_rate": options.planned_rate,
                **{name: getattr(options, name) for name in _NUMBERS},
                **{name: getattr(options, name).value for name in _CHOICES},
            },
        }


def compare(options: ChainsOptions) -> ChainsResult:
    """Simulate every policy on the same requests; errors of ``composed``."""
    ready = composed(options)
    rate = options.planned_rate if options.load is None else options.load * ready.total_rate
    works = options.works(rate)
    policies = tuple(_policy(options, ready, policy, works) for policy in options.policies)
    bounds = chain_bounds(ready.chains, rate) if ready.chains else None
    return ChainsResult(options, ready, rate, policies, bounds)


def _policy(
    options: ChainsOptions, ready: Composed, policy: str, works: Sequence[Work]
) -> PolicyResult:
    dispatch = options.dispatch_of(policy)
    served = [
        (
            simulate_chains(ready.chains, policy, work, dispatch, options.seed + repeat)
            if ready.chains
            else simulate_routing(ready.placement, work)
        ).after(options.warmup)
        for repeat, work in enumerate(works)
    ]

    def over(figure: Callable[[Served], float]) -> tuple[float, ...]:
        return tuple(float(figure(each)) for each in served)

    return PolicyResult(
        policy=policy,
        dispatch=dispatch,
        response=over(lambda each: each.response_s.mean()),
        response_p99_s=float(np.mean(over(lambda each: np.percentile(each.response_s, 99)))),
        waiting_s=float(np.mean(over(lambda each: each.waiting_s.mean()))),
        service_s=float(np.mean(over(lambda each: each.service_s.mean()))),
    )
