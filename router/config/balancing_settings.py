from typing import Annotated, Literal

from pydantic import ValidationInfo, field_validator

from router.config.setting import MOMENT_S, WEEK_S, SettingGroup, live, read_by
from router.config.worker_notation import unknown
from router.core.policies.policy_table import POLICIES
from router.core.step_time import StepTime
from router.core.targets import Targets
from router.core.types import Dispatch

# Settings of earlier versions, and what has taken their place.
_LEARNED = "the router learns it from the engines' steps"
REPLACED = {
    "prefill_beta": f"{_LEARNED}; --step-time C,t_l,t_r,t_p fixes the cost of a step",
    "request_tokens": f"{_LEARNED}; --step-time C,t_l,t_r,t_p fixes the cost of a step",
    "prefill_chunk": _LEARNED,
    "drift": "the router learns from the engines' steps how many tokens a request gains in each",
    "window": "engines report the windows of their KV groups in their snapshots",
    "window_share": "engines report the windows of their KV groups in their snapshots",
    "lead_tokens": "it follows from the mean output length by the rule of docs/policies.md",
}


def _step_time(text: str) -> StepTime | None:
    return None if text == "auto" else StepTime.parse(text)


class BalancingSettings(SettingGroup):
    """Balancing: the policy, its pool and its look-ahead."""

    policy: str = live(
        "bfio", f"Rule that chooses a worker for each request: {', '.join(POLICIES)}.", metavar="P"
    )
    dispatch: Dispatch = live(
        Dispatch.POOL,
        "When a request is sent to a worker: as soon as a slot is free (pool), or on arrival "
        "(instant).",
        metavar="pool|instant",
    )
    pool_size: int = live(1024, "Requests of a group that may wait.", between=(1, 1_000_000))
    queue_timeout_s: float = live(60.0, "Longest wait for a slot.", between=(MOMENT_S, WEEK_S))
    starvation_s: float = live(
        5.0,
        "Wait after which a request goes before all others of its priority; in a long pool, twice "
        "the wait that order of arrival would give. Where prompts are planned, only one that fits "
        "nowhere does.",
        between=(MOMENT_S, WEEK_S),
    )
    lookahead: Literal["auto", "none", "cap", "survival"] = live(
        "auto",
        "How bfio predicts the ends of requests: none, cap (max_tokens), survival (learned "
        "lengths), or auto: survival, and the engine's own probabilities where these foretell "
        "more.",
        metavar="SIGNAL",
    )
    horizon: int | None = live(
        None,
        "Steps that bfio looks ahead; unset: by the rule of docs/policies.md.",
        metavar="H",
        between=(0, 256),
    )
    discount: float | None = live(
        None,
        "Weight gamma of a step against the one before; unset: by the rule of docs/policies.md.",
        metavar="GAMMA",
        between=(1e-6, 1),
    )
    tie_weight: float | None = live(
        None,
        "Weight mu of bfio's quadratic term, per token; unset: by the rule of docs/policies.md.",
        metavar="MU",
        between=(0, 1e6),
    )
    solver_ms: float = live(
        1.0, "Time for all searches of bfio in one decision.", between=(0.01, 1000)
    )
    overcommit: int | None = live(
        None,
        "Requests that may queue in an engine; "
        "unset: as the measured gap between two requests of a slot requires.",
        metavar="N",
        between=(0, 64),
    )
    step_time: Annotated[str, read_by(_step_time)] = live(
        "auto",
        "Cost of a group's step in seconds: fixed, per KV token, per request, per computed prompt "
        "token; auto: as its steps teach it.",
        metavar="auto|C,t_l[,t_r[,t_p]]",
        advanced=True,
    )
    prompt_budget: str = live(
        "auto",
        "Prompt tokens of a step, alike on all ranks of a group, for engines with the plug-in; "
        "auto: by the learned cost of a step and the targets; off: the engines' own bound.",
        metavar="auto|off|N",
    )
    target_ttft_s: float | None = live(
        None, "For --prompt-budget auto: mean time to the first token.", between=(MOMENT_S, WEEK_S)
    )
    target_tpot_s: float | None = live(
        None,
        "For --prompt-budget auto: time of each further token; in the mean with a target for the "
        "first one, else in nearly all steps.",
        between=(1e-5, WEEK_S),
    )
    seed: int = live(0, "Seed of policies that draw at random.", between=(0, 2**64 - 1))

    @property
    def fixed_step_time(self) -> StepTime | None:
        return _step_time(self.step_time)

    @property
    def prompt_rule(self) -> int | Targets | None:
        if self.prompt_budget == "auto":
            return Targets(self.target_ttft_s, self.target_tpot_s)
        return None if self.prompt_budget == "off" else int(self.prompt_budget)

    @field_validator("prompt_budget", mode="before")
    @classmethod
    def _readable_budget(cls, value: object) -> object:
        text = str(value)
        if text in ("auto", "off"):
            return text
        if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= 1 << 30):
            raise ValueError(f"prompt_budget takes auto, off, or tokens above 0, got {value}")
        return text

    @field_validator("target_ttft_s", "target_tpot_s")
    @classmethod
    def _used_target(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("prompt_budget", "auto") != "auto":
            raise ValueError("--target-ttft and --target-tpot need --prompt-budget auto")
        return value

    @field_validator("policy")
    @classmethod
    def _known_policy(cls, value: str) -> str:
        if value not in POLICIES:
            raise ValueError(unknown("policy", value, POLICIES))
        return value

    @field_validator("dispatch")
    @classmethod
    def _possible_dispatch(cls, value: Dispatch, info: ValidationInfo) -> Dispatch:
        policy = info.data.get("policy")
        if policy is not None and value not in POLICIES[policy].dispatch:
            able = " or ".join(sorted(form.value for form in POLICIES[policy].dispatch))
            raise ValueError(f"policy {policy} can dispatch by {able} only, not by {value.value}")
        return value
