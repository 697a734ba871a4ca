"""Settings of ``evenstep serve``: flags, ``EVENSTEP_*`` variables, a TOML file, defaults.

The first source that gives a setting wins. A name that no setting has is an error in each source.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from router.engines.curve import read_key_pair
from router.errors import ConfigError
from router.policies import POLICIES
from router.types import Dispatch, WorkerSpec
from router.worker_specs import complaint, parse_workers, unknown
from router.workload import DEFAULT_CHUNK

T = TypeVar("T")
U = TypeVar("U")

PREFIX = "EVENSTEP_"
CONFIG_VARIABLE = "EVENSTEP_CONFIG"

# Variables that are no settings: of the command line, of deploy/engine, of the tests.
_OTHER_VARIABLES = {CONFIG_VARIABLE, "EVENSTEP_CACHE", "EVENSTEP_REQUIRE_ENGINE"}

# Kubernetes gives every pod such variables for a service named evenstep, EVENSTEP_PORT among them.
_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT)(_\w+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?$")
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://")


class ServeSettings(BaseSettings):
    """Everything that ``evenstep serve`` can be told; times in seconds."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
    )

    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(
        default=8000, ge=0, le=65535, description="Port to listen on, 0 for any free one."
    )
    secret_key_file: str | None = Field(
        default=None,
        description="The router's CURVE key pair, as evenstep keygen makes it; for workers with a "
        "server_key.",
    )
    workers: tuple[WorkerSpec, ...] = Field(
        default=(),
        description="A worker, may be repeated: URL, then any of ,group=NAME ,role=prefill|decode "
        ",rank=R ,slots=N ,snapshots=ENDPOINT ,server_key=KEY|FILE ,kv_bootstrap=URL "
        ",id=NAME without spaces.",
    )
    lockstep: tuple[str, ...] = Field(
        default=(),
        description="A group, may be repeated, that is down as soon as one of its workers is.",
    )
    policy: str = Field(default="bfio", description=f"Who goes where: {', '.join(POLICIES)}.")
    dispatch: Dispatch = Field(
        default=Dispatch.POOL,
        validate_default=True,
        description="A request leaves when a slot is free (pool) or on arrival (instant).",
    )
    pool_size: int = Field(default=1024, ge=1, description="Requests of a group that may wait.")
    queue_timeout_s: float = Field(default=60.0, gt=0, description="Longest wait for a slot.")
    starvation_s: float = Field(
        default=5.0, gt=0, description="A request that has waited longer goes before all others."
    )
    lookahead: Literal["auto", "none", "cap", "survival"] = Field(
        default="auto",
        description="What bfio goes by for coming ends: none, cap (max_tokens), survival (learned "
        "lengths), or auto: the engine's own probabilities, else survival.",
    )
    horizon: int | None = Field(
        default=None, ge=0, le=256, description="Steps that bfio looks ahead; unset: by the rule."
    )
    discount: float | None = Field(
        default=None, gt=0, le=1, description="Weight gamma of a step against the one before."
    )
    tie_weight: float | None = Field(
        default=None, ge=0, description="Weight mu of bfio's quadratic term, per token."
    )
    lead_tokens: float | None = Field(
        default=None,
        ge=0,
        description="How far below the others bfio leaves a worker that it can fill; unset: by "
        "the rule.",
    )
    solver_ms: float = Field(
        default=1.0,
        gt=0,
        le=1000,
        description="Time for bfio's search in a decision, shared by its tiers (deadlines).",
    )
    overcommit: int | None = Field(
        default=None,
        ge=0,
        le=64,
        description="Requests that may queue in an engine; unset: as its slot bubble asks for.",
    )
    drift: float = Field(
        default=1.0,
        ge=0,
        description="Output tokens of a request in a step, accepted drafts included.",
    )
    window: int | None = Field(
        default=None, ge=1, description="Tokens of the model's sliding window, if it has one."
    )
    window_share: float = Field(
        default=1.0, ge=0, le=1, description="Fraction of the layers that have the window."
    )
    request_tokens: float = Field(
        default=0.0, ge=0, description="Cost of running a request, in KV tokens' worth."
    )
    prefill_beta: float = Field(
        default=0.0, ge=0, description="Cost of computing a prompt token, in KV tokens' worth."
    )
    prefill_chunk: int = Field(
        default=DEFAULT_CHUNK,
        ge=1,
        description="Prompt tokens of a request that a step computes at most.",
    )
    kv_transfer: Literal["params", "content"] = Field(
        default="params",
        description="How a prompt's KV is found that a prefill worker has computed: by the "
        "kv_transfer_params that it answers (NIXL; Mooncake with kv_bootstrap), or by its content "
        "(shared storage, LMCache).",
    )
    kv_expiry_s: float = Field(
        default=30.0,
        gt=0,
        description="How long a prefill worker keeps KV that nobody fetches; NIXL's "
        "kv_lease_duration.",
    )
    seed: int = Field(default=0, ge=0, description="Seed of policies that draw at random.")
    health_interval_s: float = Field(default=1.0, gt=0, description="Time between health checks.")
    health_timeout_s: float = Field(
        default=2.0, gt=0, description="Longest wait for a health check."
    )
    health_failures: int = Field(
        default=3,
        ge=1,
        description="Failed checks in a row that put a worker out of use; "
        "one whose connection is refused does so by itself.",
    )
    snapshot_stale_s: float = Field(
        default=3.0, gt=0, description="Age at which a worker's last snapshot no longer counts."
    )
    metrics_interval_s: float = Field(
        default=1.0,
        gt=0,
        description="Time between readings of an engine's /metrics while it sends no snapshots.",
    )
    connect_timeout_s: float = Field(
        default=2.0, gt=0, description="Longest wait for a connection to a worker."
    )
    max_attempts: int = Field(
        default=5, ge=1, description="Workers that a request is tried on before its first byte."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severity that is logged: debug, info, warning, error."
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments alone; ``load_settings`` merges the sources and remembers which gave what."""
        return (init_settings,)

    @field_validator("secret_key_file")
    @classmethod
    def _usable_keys(cls, value: str | None) -> str | None:
        if value is not None:
            _checked(read_key_pair, value)
        return value

    @field_validator("workers", mode="before")
    @classmethod
    def _parse_workers(cls, value: object) -> tuple[WorkerSpec, ...]:
        entries = value.split() if isinstance(value, str) else value
        if not isinstance(entries, list | tuple):
            raise ValueError("workers should be a list")  # noqa: TRY004 - pydantic catches no other
        return _checked(parse_workers, entries)

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


def _checked(read: Callable[[T], U], value: T) -> U:
    """What is read, with errors in the form that pydantic expects."""
    try:
        return read(value)
    except ConfigError as error:
        raise ValueError(str(error)) from None


class _Environment(EnvSettingsSource):
    """Variables as they stand: workers are texts, not JSON."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        return value


@dataclass(frozen=True, slots=True)
class _Source:
    values: Mapping[str, object]
    name: Callable[[str], str]


def flag_name(setting: str) -> str:
    """The flag that gives a setting."""
    return (
        "--worker" if setting == "workers" else f"--{setting.removesuffix('_s').replace('_', '-')}"
    )


def load_settings(flags: Mapping[str, object], config: Path | None = None) -> ServeSettings:
    """Merge flags, environment, file and defaults.

    Args:
        flags: settings given on the command line, by setting name.
        config: TOML file, if any.

    Raises:
        ConfigError: unknown names or wrong values, in one line that names setting and source.
    """
    sources = (
        _Source(flags, flag_name),
        _Source(_from_environment(), lambda setting: PREFIX + setting.upper()),
        _Source({} if config is None else _from_toml(config), lambda _: str(config)),
    )
    merged = {name: v for source in reversed(sources) for name, v in source.values.items()}
    try:
        return ServeSettings(**merged)  # type: ignore[arg-type]
    except ValidationError as invalid:
        raise ConfigError(_explain(invalid.errors()[0], sources)) from None


def to_toml(settings: ServeSettings) -> str:
    """The settings as a TOML file that loads back to them."""
    plain = settings.model_dump(mode="json", exclude={"workers"})
    lines = [
        f"# {name} = (unset)" if value is None else f"{name} = {_toml_value(value)}"
        for name, value in plain.items()
    ]
    for worker in settings.workers:
        lines += ["", "[[workers]]"]
        table = asdict(worker).items()
        lines += [f"{key} = {_toml_value(value)}" for key, value in table if value is not None]
    return "\n".join(lines) + "\n"


def _explain(error: ErrorDetails, sources: Iterable[_Source]) -> str:
    setting = str(error["loc"][0])
    where = next((s.name(setting) for s in sources if setting in s.values), "the default")
    if error["type"] == "value_error":
        return f"{complaint(error)} (from {where})"
    return f"{setting} = {error['input']!r} {complaint(error)} (from {where})"


def _from_environment() -> dict[str, object]:
    links = {name for name, value in os.environ.items() if _is_service_link(name, value)}
    known = {PREFIX + setting.upper() for setting in ServeSettings.model_fields} | _OTHER_VARIABLES
    for name in os.environ:
        if name.startswith(PREFIX) and name not in known | links:
            raise ConfigError(unknown("environment variable", name, known))
    values = _Environment(ServeSettings)()
    return {name: v for name, v in values.items() if PREFIX + name.upper() not in links}


def _is_service_link(name: str, value: str) -> bool:
    if not name.startswith(PREFIX):
        return False
    address = name.endswith("_PORT") and _SERVICE_ADDRESS.match(value)
    return bool(address or _SERVICE_LINK.search(name))


def _from_toml(path: Path) -> dict[str, object]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    for name in values:
        if name not in ServeSettings.model_fields:
            wrong = unknown("setting", name, ServeSettings.model_fields)
            raise ConfigError(f"{wrong} (in {path})")
    return values


def _toml_value(value: object) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
