from dataclasses import fields
from typing import Annotated, Literal

from pydantic import ValidationInfo, field_validator

from router.config.setting import (
    DAY_S,
    HOUR_S,
    MOMENT_S,
    SettingGroup,
    Words,
    advanced,
    checked,
    live,
    read_by,
    setting,
)
from router.config.worker_notation import parse_workers, unknown
from router.core.energy.joules import PowerLevels
from router.core.types import WorkerSpec
from router.engines.curve_keys import KeyPair, read_key_pair

_LEVELS = len(fields(PowerLevels))
_MOST_WATTS = 1_000_000


class EngineSettings(SettingGroup):
    """Engines: the workers, and how the router watches them."""

    secret_key_file: Annotated[str | None, read_by(read_key_pair)] = setting(
        None,
        "File with the router's CURVE key pair, made by evenstep keygen; for workers with a "
        "server_key.",
        metavar="FILE",
    )
    workers: tuple[WorkerSpec, ...] = live(
        (),
        "A worker, may be repeated: URL, then any of ,group=NAME ,role=prefill|decode "
        ",rank=R ,slots=N ,snapshots=ENDPOINT ,server_key=KEY|FILE ,kv_events=ENDPOINT "
        ",kv_replay=ENDPOINT ,kv_bootstrap=URL ,power=ENDPOINT ,service_rate=R ,id=NAME "
        "without spaces.",
        metavar="SPEC",
    )
    lockstep: Words = live(
        (),
        "Group whose workers go down together, as data-parallel ranks do, or with =no never do; "
        "may be repeated. Unset: as its engines tell.",
        metavar="GROUP[=no]",
    )
    kv_transfer: Literal["params", "content"] = setting(
        "params",
        "How a decode worker finds the KV of a prompt that a prefill worker has computed: by the "
        "kv_transfer_params of the prefill worker's answer (NIXL; Mooncake with kv_bootstrap), or "
        "by its content (shared storage, LMCache).",
        metavar="params|content",
    )
    kv_expiry_s: float = advanced(
        30.0,
        "How long a prefill worker keeps KV that no worker fetches; NIXL's kv_lease_duration.",
        between=(MOMENT_S, DAY_S),
    )
    power_levels: tuple[float, float, float] | None = setting(
        None,
        "Calibrated power of a worker's GPUs in watts: at rest, waiting in a step, "
        "computing; unset: a step's energy is not divided.",
        metavar="W,W,W",
    )
    health_interval_s: float = live(1.0, "Time between health checks.", between=(0.01, HOUR_S))
    health_timeout_s: float = setting(
        2.0, "Longest wait for a health check.", between=(MOMENT_S, HOUR_S)
    )
    health_failures: int = live(
        3,
        "Failed checks in a row after which a worker is down; a single refused connection is "
        "enough.",
        between=(1, 1000),
    )
    snapshot_stale_s: float = live(
        3.0, "Age at which a worker's last snapshot no longer counts.", between=(MOMENT_S, HOUR_S)
    )
    metrics_interval_s: float = live(
        1.0,
        "Time between readings of an engine's /metrics while it sends no snapshots.",
        between=(0.01, HOUR_S),
        advanced=True,
    )
    connect_timeout_s: float = setting(
        2.0, "Longest wait for a connection to a worker.", between=(MOMENT_S, HOUR_S)
    )
    max_attempts: int = live(
        5,
        "Attempts of a request, at one worker or several, before its first byte.",
        between=(1, 100),
    )

    @property
    def keys(self) -> KeyPair | None:
        return None if self.secret_key_file is None else read_key_pair(self.secret_key_file)

    @property
    def levels(self) -> PowerLevels | None:
        return None if self.power_levels is None else PowerLevels(*self.power_levels)

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

    @field_validator("lockstep")
    @classmethod
    def _known_groups(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        groups = {worker.group for worker in info.data.get("workers", ())}
        words = [word.partition("=") for word in value]
        for name, is_, answer in words:
            if is_ and answer != "no":
                raise ValueError(f"takes GROUP or GROUP=no, got {name}={answer}")
            if groups and name not in groups:
                raise ValueError(unknown("lockstep group", name, groups))
            if sum(name == other for other, *_ in words) > 1:
                raise ValueError(f"group {name!r} is given twice")
        return value
