"""Balancing: the policy, its pool and its look-ahead."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings

from router.config.checks import MOMENT_S, WEEK_S
from router.config.marks import TakenBy
from router.config.worker_specs import unknown
from router.core.forecast.step_cost import DEFAULT_CHUNK
from router.core.policies.table import POLICIES
from router.core.types import Dispatch


class BalancingSettings(BaseSettings):
    """Policy, pool and look-ahead; times in seconds."""

    policy: Annotated[str, TakenBy.POLICY] = Field(
        default="bfio", description=f"Who goes where: {', '.join(POLICIES)}."
    )
    dispatch: Annotated[Dispatch, TakenBy.POOL] = Field(
        default=Dispatch.POOL,
        validate_default=True,
        description="A request leaves when a slot is free (pool) or on arrival (instant).",
    )
    pool_size: Annotated[int, TakenBy.POOL] = Field(
        default=1024, ge=1, le=1_000_000, description="Requests of a group that may wait."
    )
    queue_timeout_s: Annotated[float, TakenBy.POOL] = Field(
        default=60.0, ge=MOMENT_S, le=WEEK_S, description="Longest wait for a slot."
    )
    starvation_s: Annotated[float, TakenBy.POOL] = Field(
        default=5.0,
        ge=MOMENT_S,
        le=WEEK_S,
        description="A request that has waited longer goes before all others of its priority.",
    )
    lookahead: Annotated[Literal["auto", "none", "cap", "survival"], TakenBy.POLICY] = Field(
        default="auto",
        description="What bfio goes by for coming ends: none, cap (max_tokens), survival (learned "
        "lengths), or auto: the engine's own probabilities, else survival.",
    )
    horizon: Annotated[int | None, TakenBy.POLICY] = Field(
        default=None, ge=0, le=256, description="Steps that bfio looks ahead; unset: by the rule."
    )
    discount: Annotated[float | None, TakenBy.POLICY] = Field(
        default=None,
        ge=1e-6,
        le=1,
        description="Weight gamma of a step against the one before.",
    )
    tie_weight: Annotated[float | None, TakenBy.POLICY] = Field(
        default=None, ge=0, le=1e6, description="Weight mu of bfio's quadratic term, per token."
    )
    lead_tokens: Annotated[float | None, TakenBy.POLICY] = Field(
        default=None,
        ge=0,
        le=1e9,
        description="How far below the others bfio leaves a worker that it can fill; unset: by "
        "the rule.",
    )
    solver_ms: Annotated[float, TakenBy.POLICY] = Field(
        default=1.0,
        ge=0.01,
        le=1000,
        description="Time for all of bfio's searches in one decision.",
    )
    overcommit: Annotated[int | None, TakenBy.POOL] = Field(
        default=None,
        ge=0,
        le=64,
        description="Requests that may queue in an engine; unset: as its slot bubble asks for.",
    )
    drift: Annotated[float, TakenBy.POLICY] = Field(
        default=1.0,
        ge=0,
        le=1000,
        description="Output tokens of a request in a step, accepted drafts included.",
    )
    window: Annotated[int | None, TakenBy.POLICY] = Field(
        default=None,
        ge=1,
        le=1_000_000_000,
        description="Tokens of the model's sliding window, if it has one.",
    )
    window_share: Annotated[float, TakenBy.POLICY] = Field(
        default=1.0, ge=0, le=1, description="Fraction of the layers that have the window."
    )
    request_tokens: Annotated[float, TakenBy.POLICY] = Field(
        default=0.0, ge=0, le=1e9, description="Cost of running a request, in KV tokens' worth."
    )
    prefill_beta: Annotated[float, TakenBy.POLICY] = Field(
        default=0.0,
        ge=0,
        le=1e9,
        description="Cost of computing a prompt token, in KV tokens' worth.",
    )
    prefill_chunk: int = Field(
        default=DEFAULT_CHUNK,
        ge=1,
        le=1_000_000_000,
        description="Prompt tokens of a request that a step computes at most.",
    )
    seed: Annotated[int, TakenBy.POLICY] = Field(
        default=0, ge=0, le=2**64 - 1, description="Seed of policies that draw at random."
    )

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
