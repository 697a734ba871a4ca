"""Configuration of one simulation."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from loadgen.model.power_model import PowerModel
from loadgen.simulator.decode.length_sources import LengthSource
from loadgen.simulator.decode.oracle import Knowledge
from loadgen.simulator.decode.prefill_workers import PrefillConfig
from loadgen.traces.arrivals import Arrivals
from router.config.balancing_settings import BalancingSettings
from router.core.errors import ConfigError
from router.core.forecast.forecast import WorkProfile
from router.core.forecast.look_ahead import WINDOW_STEPS, WINDOWS_SEEN
from router.core.policies.policy_table import POLICIES
from router.core.step_time import PAPER_STEP_TIME, StepTime
from router.core.types import Dispatch

# The defaults of ``evenstep serve``; simulations share them.
SERVE: Mapping[str, Any] = {
    name: each.default for name, each in BalancingSettings.model_fields.items()
}
_KEPT_WAITING = 128
_MANY = 1_000_000_000
# Least and greatest values. A value beyond is a mistake, and would overflow or fill the memory.
_RANGES: dict[str, tuple[int, int]] = {
    "workers": (1, 1_000_000),
    "slots": (1, 1_000_000),
    "pool": (1, 1_000_000),
    "steps": (1, _MANY),
    "warmup": (0, _MANY),
    "seed": (0, 2**64 - 1),
    "deadline_steps": (0, _MANY),
    "dispatch_delay": (0, _MANY),
    "overcommit": (0, _MANY),
    "kv_tokens": (0, 10**15),
    "horizon": (0, 500),
    "tie_weight": (0, 1_000_000),
    "lead_tokens": (0, 10**12),
}
_MOST_AT_ONCE = 1_000_000
_MOST_SECONDS = 1_000_000
_MOST_REQUEST_TOKENS = 10**12
_LEAST_WEIGHT = 1e-290  # of the last step looked at: the solver divides by it
_RULE_HORIZON = math.ceil(WINDOWS_SEEN * WINDOW_STEPS[1])
_MOST_SIZE_ERROR = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """One simulation of barrier-synchronized decode.

    Fields that ``serve`` has too have its defaults.
    """

    policy: str
    lengths: LengthSource
    workers: int = 16
    slots: int = 72  # B, requests that a worker runs at once
    # Requests kept waiting, with full arrivals; else number of candidates that a policy sees, the
    # oldest of an unbounded queue.
    pool: int = _KEPT_WAITING
    steps: int = 4500
    warmup: int = 500
    seed: int = 0  # seed of lengths, arrivals, random policies and missed ends
    arrivals: Arrivals = field(default_factory=Arrivals)
    dispatch: Dispatch = SERVE["dispatch"]
    dispatch_delay: int = 0  # steps from a decision to the engine
    # Requests that may queue in each engine before a slot is free; None: set from the measured slot
    # bubble.
    overcommit: int | None = SERVE["overcommit"]
    # Patience of a waiting request, in simulated seconds.
    starvation_s: float = SERVE["starvation_s"]
    deadline_steps: int | None = None  # patience in steps, in place of ``starvation_s``; 0: endless
    # H, gamma, mu and the lead; None: by the rule.
    horizon: int | None = SERVE["horizon"]
    discount: float | None = SERVE["discount"]
    tie_weight: float | None = SERVE["tie_weight"]
    lead_tokens: float | None = None
    knowledge: Knowledge = field(default_factory=lambda: Knowledge(SERVE["lookahead"]))
    step_time: StepTime = PAPER_STEP_TIME
    power: PowerModel = field(default_factory=PowerModel)
    # Cost of requests; ``step_time`` adds its t_r and its t_p.
    profile: WorkProfile = field(default_factory=WorkProfile)
    # Cost that the policy assumes; None: it learns the cost from the steps.
    known_profile: WorkProfile | None = None
    kv_tokens: int = 0  # KV memory of a worker, for the usage in views; 0: no usage in views
    # Prefill workers for these; None: prompts are free, or the workers compute them.
    prefill: PrefillConfig | None = None
    # Sigma of a lognormal factor of mean 1 on the prompt sizes that policies see; 0: exact.
    size_error: float = 0.0

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if value is None:
                continue
            if not value >= least:
                raise ConfigError(f"{_flag(name)} must be at least {least}, got {value}")
            _check_most(_flag(name), value, most)
        self._check_costs()
        if self.warmup >= self.steps:
            raise ConfigError(
                f"--warmup {self.warmup} leaves none of the {self.steps} --steps to measure"
            )
        if self.discount is not None:
            self._check_discount(self.discount)
        self._check_dispatch()
        if not 0 < self.starvation_s <= _MOST_SECONDS:
            raise ConfigError(
                f"--starvation-s must be above 0 and at most {_MOST_SECONDS:,}, got "
                f"{self.starvation_s:g}; for no deadline give --deadline-steps 0"
            )
        if not 0 <= self.size_error <= _MOST_SIZE_ERROR:
            raise ConfigError(
                f"--size-error must be from 0 to {_MOST_SIZE_ERROR:g}, got {self.size_error:g}"
            )

    @property
    def patience(self) -> float:
        """In steps where they are given, else in seconds."""
        if self.deadline_steps is None:
            return self.starvation_s
        return self.deadline_steps or math.inf

    @property
    def true_profile(self) -> WorkProfile:
        """Cost in KV tokens' worth, including ``step_time``'s of requests and prompts."""
        time, profile = self.step_time, self.profile
        if time.per_request_s > 0:
            profile = replace(profile, request_tokens=time.per_request_s / time.per_token_s)
        if time.per_prompt_token_s > 0:
            profile = replace(profile, prefill_beta=time.per_prompt_token_s / time.per_token_s)
        return profile

    def described(self) -> dict[str, object]:
        """Everything that a result depends on; None for parameters that the rule chooses."""
        known = self.known_profile
        return {
            "policy": self.policy,
            "lengths": self.lengths.name,
            "arrivals": str(self.arrivals),
            "dispatch": self.dispatch.value,
            "lookahead": str(self.knowledge),
            **{name: getattr(self, name) for name in _RANGES},
            "discount": self.discount,
            "step_time": asdict(self.step_time),
            "power": asdict(self.power),
            "profile": asdict(self.true_profile),
            "known_profile": "learned" if known is None else asdict(known),
            **({"prefill": asdict(self.prefill)} if self.prefill else {}),
            **({} if self.deadline_steps is not None else {"starvation_s": self.starvation_s}),
            **({"size_error": self.size_error} if self.size_error else {}),
        }

    def _check_costs(self) -> None:
        _check_most("--workers times --slots", self.workers * self.slots, _MOST_AT_ONCE)
        time = self.step_time
        _check_most("--step-time: any of its seconds", max(asdict(time).values()), _MOST_SECONDS)
        for name, seconds in (("t_r", time.per_request_s), ("t_p", time.per_prompt_token_s)):
            if seconds > 0 and time.per_token_s == 0:
                raise ConfigError(f"--step-time: {name} needs a t_l above 0")
            if seconds > 0:
                ratio = seconds / time.per_token_s
                _check_most(f"--step-time: {name} / t_l", ratio, _MOST_REQUEST_TOKENS)
        if time.per_prompt_token_s and self.profile.prefill_beta:
            raise ConfigError("--prefill-cost and a t_p in --step-time: give one of them")
        if self.prefill is None:
            return
        if self.true_profile.prefill_beta:
            raise ConfigError(
                "--prefill-cost and t_p are of workers that compute their own prompts: leave them "
                "out where --prefill-workers do"
            )
        parts = (self.prefill.time, self.prefill.transfer)
        _check_most(
            "--prefill-step-time and --kv-transfer-time: any of their seconds",
            max(max(asdict(part).values()) for part in parts),
            _MOST_SECONDS,
        )

    def _check_discount(self, discount: float) -> None:
        if not 0 < discount <= 1:
            raise ConfigError(f"--discount must be above 0 and at most 1, got {discount:g}")
        horizon = _RULE_HORIZON if self.horizon is None else self.horizon
        if discount**horizon < _LEAST_WEIGHT:
            raise ConfigError(
                f"--discount {discount:g} to the power of --horizon {horizon} must be at least "
                f"{_LEAST_WEIGHT:g}: give more of the one or less of the other"
            )

    def _check_dispatch(self) -> None:
        row = POLICIES.get(self.policy)
        if row is None:
            raise ConfigError(f"--policy: {self.policy!r} is unknown; known: {', '.join(POLICIES)}")
        if self.dispatch not in row.dispatch:
            raise ConfigError(f"--policy {self.policy} cannot do --dispatch {self.dispatch.value}")
        if self.dispatch is Dispatch.INSTANT and (self.overcommit or self.deadline_steps):
            raise ConfigError(
                "--dispatch instant leaves nobody in the pool: without --overcommit and "
                "--deadline-steps"
            )


def usual_pool(arrivals: Arrivals) -> int:
    """The load with full arrivals, else ``serve``'s pool size."""
    seen: int = SERVE["pool_size"]
    return _KEPT_WAITING if arrivals.kind == "full" else seen


def _flag(name: str) -> str:
    """The option that sets a field."""
    return "--lead" if name == "lead_tokens" else f"--{name.replace('_', '-')}"


def _check_most(what: str, value: float, most: int) -> None:
    if value > most:
        raise ConfigError(f"{what} must be at most {most:,}, got {value}")
