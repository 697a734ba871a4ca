"""Engines: the workers, and how the router watches them."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings

from router.config.checks import DAY_S, HOUR_S, MOMENT_S, checked
from router.config.marks import TakenBy
from router.config.worker_specs import parse_workers, unknown
from router.core.energy.joules import PowerLevels
from router.core.types import WorkerSpec
from router.engines.curve import KeyPair, read_key_pair

_LEVELS = len(fields(PowerLevels))
_MOST_WATTS = 1_000_000


class EngineSettings(BaseSettings):
    """Workers and their monitoring; times in seconds."""

    secret_key_file: str | None = Field(
        default=None,
        description="The router's CURVE key pair, as evenstep keygen makes it; for workers with a "
        "server_key.",
    )
    workers: Annotated[tuple[WorkerSpec, ...], TakenBy.WORKERS] = Field(
        default=(),
        description="A worker, may be repeated: URL, then any of ,group=NAME ,role=prefill|decode "
        ",rank=R ,slots=N ,snapshots=ENDPOINT ,server_key=KEY|FILE ,kv_bootstrap=URL "
        ",power=ENDPOINT ,service_rate=R ,id=NAME without spaces.",
    )
    lockstep: Annotated[tuple[str, ...], TakenBy.WORKERS] = Field(
        default=(),
        description="A group, may be repeated, that is down as soon as one of its workers is.",
    )
    kv_transfer: Literal["params", "content"] = Field(
        default="params",
        description="How a prompt's KV is found that a prefill worker has computed: by the "
        "kv_transfer_params that it answers (NIXL; Mooncake with kv_bootstrap), or by its content "
        "(shared storage, LMCache).",
    )
    kv_expiry_s: float = Field(
        default=30.0,
        ge=MOMENT_S,
        le=DAY_S,
        description="How long a prefill worker keeps KV that nobody fetches; NIXL's "
        "kv_lease_duration.",
    )
    power_levels: tuple[float, float, float] | None = Field(
        default=None,
        description="Calibrated power of a worker's GPUs in watts: at rest, waiting in a step, "
        "computing; unset: a step's energy is not divided.",
    )
    health_interval_s: Annotated[float, TakenBy.WATCHING] = Field(
        default=1.0, ge=0.01, le=HOUR_S, description="Time between health checks."
    )
    health_timeout_s: float = Field(
        default=2.0, ge=MOMENT_S, le=HOUR_S, description="Longest wait for a health check."
    )
    health_failures: Annotated[int, TakenBy.WATCHING] = Field(
        default=3,
        ge=1,
        le=1000,
        description="Failed checks in a row that put a worker out of use; "
        "one whose connection is refused does so by itself.",
    )
    snapshot_stale_s: Annotated[float, TakenBy.POOL] = Field(
        default=3.0,
        ge=MOMENT_S,
        le=HOUR_S,
        description="Age at which a worker's last snapshot no longer counts.",
    )
    metrics_interval_s: Annotated[float, TakenBy.WATCHING] = Field(
        default=1.0,
        ge=0.01,
        le=HOUR_S,
        description="Time between readings of an engine's /metrics while it sends no snapshots.",
    )
    connect_timeout_s: float = Field(
        default=2.0,
        ge=MOMENT_S,
        le=HOUR_S,
        description="Longest wait for a connection to a worker.",
    )
    max_attempts: Annotated[int, TakenBy.RELAY] = Field(
        default=5,
        ge=1,
        le=100,
        description="Attempts of a request, at one worker or several, before its first byte.",
    )

    @property
    def keys(self) -> KeyPair | None:
        return None if self.secret_key_file is None else read_key_pair(self.secret_key_file)

    @property
    def levels(self) -> PowerLevels | None:
        return None if self.power_levels is None else PowerLevels(*self.power_levels)

    @field_validator("secret_key_file")
    @classmethod
    def _usable_keys(cls, value: str | None) -> str | None:
        if value is not None:
            checked(read_key_pair, value)
        return value

    @field_validator("workers", mode="before")
    @classmethod
    def _parse_workers(cls, value: object) -> tuple[WorkerSpec, ...]:
        entries = value.split() if isinstance(value, str) else value
        if not isinstance(entries, list | tuple):
            raise ValueError("workers should be a list")  # noqa: TRY004 - pydantic catches no other
        return checked(parse_workers, entries)

    @field_validator("workers")
    @classmethod
    def _keys_for_keys(
        cls, value: tuple[WorkerSpec, ...], info: ValidationInfo
    ) -> tuple[WorkerSpec, ...]:
        if "secret_key_file" in info.data and info.data["secret_key_file"] is None:
            for worker in value:
                if worker.server_key is not None:
                    raise ValueError(
                        f"worker {worker.id} has a server_key, which needs --secret-key-file: the "
                        "router's own key pair, made with: evenstep keygen FILE"
                    )
        return value

    @field_validator("power_levels", mode="before")
    @classmethod
    def _parse_power_levels(cls, value: object) -> object:
        watts = value.split(",") if isinstance(value, str) else value
        if isinstance(watts, list | tuple) and len(watts) != _LEVELS:
            raise ValueError(f"power_levels takes {_LEVELS} numbers, as in 100,250,400")
        return watts

    @field_validator("power_levels")
    @classmethod
    def _usable_levels(
        cls, value: tuple[float, float, float] | None
    ) -> tuple[float, float, float] | None:
        if value is not None:
            checked(lambda levels: PowerLevels(*levels), value)
            if max(value) > _MOST_WATTS:
                raise ValueError(
                    f"power_levels are watts of one worker, {_MOST_WATTS:,} at most, "
                    f"got {max(value):g}"
                )
        return value

    @field_validator("lockstep", mode="before")
    @classmethod
    def _split_groups(cls, value: object) -> object:
        return tuple(value.split()) if isinstance(value, str) else value

    @field_validator("lockstep")
    @classmethod
    def _known_groups(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        groups = {worker.group for worker in info.data.get("workers", ())}
        for name in value:
            if groups and name not in groups:
                raise ValueError(unknown("lockstep group", name, groups))
        return value
