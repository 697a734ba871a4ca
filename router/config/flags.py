"""Settings of ``evenstep serve`` as command-line flags."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer

from router.config.settings import ServeSettings
from router.config.sources import CONFIG_VARIABLE, flag_name, load_settings
from router.core.errors import ConfigError
from router.core.types import Dispatch

# Placeholders of the values in --help, in its order.
METAVARS = MappingProxyType(
    {
        "workers": "SPEC",
        "secret_key_file": "FILE",
        "lockstep": "GROUP",
        "model_alias": "NAME=MODEL",
        "worker_headers": "true|false",
        "host": "H",
        "port": "N",
        "processes": "N",
        "admin_port": "N",
        "admin_host": "H",
        "admin_key_file": "FILE",
        "api_key_file": "FILE",
        "worker_api_key_file": "FILE",
        "record": "FILE",
        "policy": "P",
        "dispatch": "pool|instant",
        "pool_size": "N",
        "queue_timeout_s": "S",
        "starvation_s": "S",
        "lookahead": "SIGNAL",
        "horizon": "H",
        "discount": "GAMMA",
        "tie_weight": "MU",
        "lead_tokens": "TOKENS",
        "solver_ms": "MS",
        "overcommit": "N",
        "drift": "TOKENS",
        "window": "TOKENS",
        "window_share": "F",
        "request_tokens": "TOKENS",
        "prefill_beta": "TOKENS",
        "prefill_chunk": "TOKENS",
        "kv_transfer": "params|content",
        "kv_expiry_s": "S",
        "power_levels": "W,W,W",
        "seed": "N",
        "health_interval_s": "S",
        "health_timeout_s": "S",
        "health_failures": "N",
        "snapshot_stale_s": "S",
        "metrics_interval_s": "S",
        "connect_timeout_s": "S",
        "max_attempts": "N",
        "retry_budget": "SHARE",
        "retry_min_per_s": "N",
        "breaker_failures": "N",
        "breaker_share": "SHARE",
        "breaker_window_s": "S",
        "breaker_open_s": "S",
        "breaker_trials": "N",
        "max_ejected": "SHARE",
        "slow_start_s": "S",
        "request_timeout_s": "S",
        "first_byte_timeout_s": "S",
        "stream_idle_timeout_s": "S",
        "drain_delay_s": "S",
        "grace_s": "S",
        "tls_cert": "FILE",
        "tls_key": "FILE",
        "max_connections": "N",
        "max_uri_bytes": "N",
        "max_header_bytes": "N",
        "max_headers": "N",
        "max_body_bytes": "N",
        "max_bodies_bytes": "N",
        "max_slots": "N",
        "max_messages": "N",
        "header_timeout_s": "S",
        "body_timeout_s": "S",
        "keep_alive_timeout_s": "S",
        "write_timeout_s": "S",
        "data_plane": "splice|asgi",
        "log_level": "LEVEL",
        "log_format": "text|json",
    }
)

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", envvar=CONFIG_VARIABLE, help="TOML file with settings."
    ),
]


def with_flags(command: Callable[..., None], settings: Iterable[str] = METAVARS) -> None:
    """Replace a command's ``**_`` by one flag for each of these settings."""
    signature = inspect.signature(command, eval_str=True)
    *own, _ = signature.parameters.values()
    parameters = [*own, *map(_flag, settings)]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]


def given_settings(context: typer.Context, config: Path | None) -> ServeSettings:
    """Return the settings from a command's flags and all other sources.

    Raises:
        ConfigError: see ``settings.sources.load_settings``.
    """
    given = {
        name: value
        for name in ServeSettings.model_fields
        if (value := context.params.get(name)) or value == ""
    }
    return load_settings(given, config)


def _flag(setting: str) -> inspect.Parameter:
    """Return a setting's flag; all are text, so that one validator words all errors."""
    field = ServeSettings.model_fields[setting]
    default = field.default.value if isinstance(field.default, Dispatch) else field.default
    suffix = "" if default == () else f" [default: {default}]"
    text = f"{field.description}{suffix}"
    option = typer.Option(flag_name(setting), metavar=METAVARS[setting], help=text)
    kind: Any = list[str] if default == () else str
    return inspect.Parameter(
        setting,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


def read_settings(context: typer.Context, config: Path | None) -> ServeSettings:
    """Read the settings and check that a router can start with them.

    Raises:
        ConfigError: they are unusable.
    """
    return usable(given_settings(context, config))


def usable(settings: ServeSettings) -> ServeSettings:
    """Return the settings if a router can start with them.

    Raises:
        ConfigError: it cannot.
    """
    if not settings.workers:
        raise ConfigError("no workers: give at least one, as in --worker http://127.0.0.1:8001")
    return settings
