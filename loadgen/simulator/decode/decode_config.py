"""Configuration of one simulation."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

from loadgen.model.power_model import PowerModel
from loadgen.run.options import DispatchFlag, SlotsFlag, WorkersFlag, check_policy
from loadgen.simulator.decode.length_sources import LengthSource
from loadgen.simulator.decode.oracle import Knowledge
from loadgen.simulator.decode.prefill_workers import PrefillConfig
from loadgen.traces.arrivals import Arrivals
from router.commands.options import flag
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
KEPT_WAITING = 128
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
_CHOSEN = ("horizon", "discount", "tie_weight", "lead_tokens")  # by the rule, unless they are set


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSettings:
    """Settings that the command line and the simulation share; those of ``serve`` as there."""

    policy: Annotated[
        str,
        flag(
            f"One or more of {', '.join(POLICIES)}; the others are compared with the first.",
            "P[,P...]",
        ),
    ] = SERVE["policy"]
    workers: WorkersFlag = 16
    slots: SlotsFlag = 72
    steps: Annotated[int, flag("Steps simulated.", "N")] = 4500
    warmup: Annotated[int, flag("Steps before the averages begin.", "N")] = 500
    seed: Annotated[int, flag("Of lengths, arrivals and random choices.", "S")] = SERVE["seed"]
    dispatch: DispatchFlag = SERVE["dispatch"]
    dispatch_delay: Annotated[int, flag("Steps from a decision to the engine.", "STEPS")] = 0
    overcommit: Annotated[
        int | None,
        flag(
            "Requests queued in an engine before a slot is free [as its slot bubble asks for].", "N"
        ),
    ] = SERVE["overcommit"]
    starvation_s: Annotated[
        float, flag("Simulated seconds after which a request goes first.", "S")
    ] = SERVE["starvation_s"]
    deadline_steps: Annotated[
        int | None, flag("The deadline in steps, in place of --starvation-s; 0: none.", "W")
    ] = None
    horizon: Annotated[int | None, flag("Steps looked ahead [by the rule].", "H")] = SERVE[
        "horizon"
    ]
    discount: Annotated[
        float | None, flag("Weight of a step against the one before [rule].", "g")
    ] = SERVE["discount"]
    tie_weight: Annotated[
        float | None, flag("Weight of the quadratic term, 1/tokens [rule].", "mu")
    ] = SERVE["tie_weight"]
    kv_tokens: Annotated[
        int, flag("KV memory of a worker, for the usage shown; 0: not shown.", "N")
    ] = 0
    size_error: Annotated[
        float, flag("Policies see prompts with a lognormal error of this sigma.", "SIGMA")
    ] = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(DecodeSettings):
    """One simulation of barrier-synchronized decode, of one policy."""

    lengths: LengthSource
    # Requests kept waiting, with full arrivals; else number of candidates that a policy sees, the
    # oldest of an unbounded queue.
    pool: int = KEPT_WAITING
    arrivals: Arrivals = field(default_factory=Arrivals)
    lead_tokens: float | None = None  # None: by the rule
    knowledge: Knowledge = field(default_factory=lambda: Knowledge(SERVE["lookahead"]))
    step_time: StepTime = PAPER_STEP_TIME
    power: PowerModel = field(default_factory=PowerModel)
    # Cost of requests; ``step_time`` adds its t_r and its t_p.
    profile: WorkProfile = field(default_factory=WorkProfile)
    # Cost that the policy assumes; None: it learns the cost from the steps.
    known_profile: WorkProfile | None = None
    # Prefill workers for these; None: prompts are free, or the workers compute them.
    prefill: PrefillConfig | None = None

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if value is None:
                continue
            if not value >= least:
                raise ConfigError(f"{_option(name)} must be at least {least}, got {value}")
            _check_most(_option(name), value, most)
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
            **{name: getattr(self, name) for name in _RANGES if name not in _CHOSEN},
            "step_time": asdict(self.step_time),
            "power": asdict(self.power),
            "profile": asdict(self.true_profile),
            "known_profile": "learned" if known is None else asdict(known),
            **({"prefill": asdict(self.prefill)} if self.prefill else {}),
            **({} if self.deadline_steps is not None else {"starvation_s": self.starvation_s}),
            **({"size_error": self.size_error} if self.size_error else {}),
            **{name: getattr(self, name) for name in _CHOSEN},
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
        check_policy(self.policy, self.dispatch)
        if self.dispatch is Dispatch.INSTANT and (self.overcommit or self.deadline_steps):
            raise ConfigError(
                "--dispatch instant leaves nobody in the pool: without --overcommit and "
                "--deadline-steps"
            )


def _option(name: str) -> str:
    """The option that sets a field."""
    return "--lead" if name == "lead_tokens" else f"--{name.replace('_', '-')}"


def _check_most(what: str, value: float, most: int) -> None:
    if value > most:
        raise ConfigError(f"{what} must be at most {most:,}, got {value}")
