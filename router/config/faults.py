"""Faults: retries, circuit breakers, ejection and deadlines."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic_settings import BaseSettings

from router.config.checks import DAY_S, HOUR_S, MOMENT_S, WEEK_S
from router.config.marks import TakenBy
from router.core.queue.deadlines import Deadlines
from router.core.state.breaker import BreakerSettings


class FaultSettings(BaseSettings):
    """Retries, breakers and deadlines; times in seconds."""

    retry_budget: Annotated[float, TakenBy.POOL] = Field(
        default=0.2,
        ge=0,
        le=10,
        description="Retries of answers (408, 429, 5xx, too slow) as a share of a group's "
        "requests in the last 10 s.",
    )
    retry_min_per_s: Annotated[float, TakenBy.POOL] = Field(
        default=10.0,
        ge=0,
        le=1e6,
        description="Such retries a second that are allowed at any rate, on average over 10 s.",
    )
    breaker_failures: int = Field(
        default=5, ge=1, le=1_000_000, description="Failures in a row that eject a worker."
    )
    breaker_share: float = Field(
        default=0.5,
        ge=0.001,
        le=1,
        description="Or share of its requests that fail, of 10 at least in the window.",
    )
    breaker_window_s: float = Field(
        default=30.0, ge=MOMENT_S, le=DAY_S, description="Window of that share."
    )
    breaker_open_s: float = Field(
        default=5.0,
        ge=MOMENT_S,
        le=HOUR_S,
        description="How long a worker is ejected at first; twice as long each time, up to 60.",
    )
    breaker_trials: int = Field(
        default=2,
        ge=1,
        le=1_000_000,
        description="Requests that must then succeed before it is back.",
    )
    max_ejected: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Share of a group's live workers that may be ejected, never the last; 0: none.",
    )
    slow_start_s: float = Field(
        default=10.0,
        ge=0,
        le=DAY_S,
        description="How long the slots of a worker that is back grow to all of them.",
    )
    request_timeout_s: Annotated[float | None, TakenBy.RELAY] = Field(
        default=None,
        ge=MOMENT_S,
        le=WEEK_S,
        description="Longest life of a request, waiting included; unset: any.",
    )
    first_byte_timeout_s: Annotated[float | None, TakenBy.RELAY] = Field(
        default=None,
        ge=MOMENT_S,
        le=WEEK_S,
        description="Longest wait for an answer's first byte (the last one's, if it is not "
        "streamed) from a worker, before another is asked; unset: any.",
    )
    stream_idle_timeout_s: Annotated[float | None, TakenBy.RELAY] = Field(
        default=300.0,
        ge=MOMENT_S,
        le=WEEK_S,
        description="Longest silence of a worker in the midst of a stream.",
    )

    @property
    def breakers(self) -> BreakerSettings:
        return BreakerSettings(
            failures=self.breaker_failures,
            share=self.breaker_share,
            window_s=self.breaker_window_s,
            open_s=self.breaker_open_s,
            trials=self.breaker_trials,
            slow_start_s=self.slow_start_s,
            max_ejected=self.max_ejected,
        )

    @property
    def deadlines(self) -> Deadlines:
        return Deadlines(
            self.request_timeout_s, self.first_byte_timeout_s, self.stream_idle_timeout_s
        )
