"""``evenstep serve``: settings from everywhere, then the server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from router.config import CONFIG_VARIABLE, ServeSettings, flag_name, load_settings, to_toml
from router.errors import ConfigError
from router.types import Dispatch


def _flag(setting: str, metavar: str) -> Any:
    field = ServeSettings.model_fields[setting]
    default = field.default.value if isinstance(field.default, Dispatch) else field.default
    suffix = "" if default == () else f" [default: {default}]"
    name = flag_name(setting)
    return typer.Option(name, metavar=metavar, help=f"{field.description}{suffix}")


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", envvar=CONFIG_VARIABLE, help="TOML file with settings."
    ),
]
PrintConfig = Annotated[
    bool, typer.Option("--print-config", help="Print the settings as TOML and exit.")
]


# Every flag is text here, so that one validator words the errors of all sources.
def serve(
    context: typer.Context,
    workers: Annotated[list[str] | None, _flag("workers", "SPEC")] = None,
    secret_key_file: Annotated[str | None, _flag("secret_key_file", "FILE")] = None,
    lockstep: Annotated[list[str] | None, _flag("lockstep", "GROUP")] = None,
    config: ConfigFile = None,
    host: Annotated[str | None, _flag("host", "H")] = None,
    port: Annotated[str | None, _flag("port", "N")] = None,
    policy: Annotated[str | None, _flag("policy", "P")] = None,
    dispatch: Annotated[str | None, _flag("dispatch", "pool|instant")] = None,
    pool_size: Annotated[str | None, _flag("pool_size", "N")] = None,
    queue_timeout_s: Annotated[str | None, _flag("queue_timeout_s", "S")] = None,
    starvation_s: Annotated[str | None, _flag("starvation_s", "S")] = None,
    lookahead: Annotated[str | None, _flag("lookahead", "SIGNAL")] = None,
    horizon: Annotated[str | None, _flag("horizon", "H")] = None,
    discount: Annotated[str | None, _flag("discount", "GAMMA")] = None,
    tie_weight: Annotated[str | None, _flag("tie_weight", "MU")] = None,
    lead_tokens: Annotated[str | None, _flag("lead_tokens", "TOKENS")] = None,
    solver_ms: Annotated[str | None, _flag("solver_ms", "MS")] = None,
    overcommit: Annotated[str | None, _flag("overcommit", "N")] = None,
    drift: Annotated[str | None, _flag("drift", "TOKENS")] = None,
    window: Annotated[str | None, _flag("window", "TOKENS")] = None,
    window_share: Annotated[str | None, _flag("window_share", "F")] = None,
    request_tokens: Annotated[str | None, _flag("request_tokens", "TOKENS")] = None,
    prefill_beta: Annotated[str | None, _flag("prefill_beta", "TOKENS")] = None,
    prefill_chunk: Annotated[str | None, _flag("prefill_chunk", "TOKENS")] = None,
    kv_transfer: Annotated[str | None, _flag("kv_transfer", "params|content")] = None,
    kv_expiry_s: Annotated[str | None, _flag("kv_expiry_s", "S")] = None,
    seed: Annotated[str | None, _flag("seed", "N")] = None,
    health_interval_s: Annotated[str | None, _flag("health_interval_s", "S")] = None,
    health_timeout_s: Annotated[str | None, _flag("health_timeout_s", "S")] = None,
    health_failures: Annotated[str | None, _flag("health_failures", "N")] = None,
    snapshot_stale_s: Annotated[str | None, _flag("snapshot_stale_s", "S")] = None,
    metrics_interval_s: Annotated[str | None, _flag("metrics_interval_s", "S")] = None,
    connect_timeout_s: Annotated[str | None, _flag("connect_timeout_s", "S")] = None,
    max_attempts: Annotated[str | None, _flag("max_attempts", "N")] = None,
    log_level: Annotated[str | None, _flag("log_level", "LEVEL")] = None,
    print_config: PrintConfig = False,
) -> None:
    """Route requests to workers so that their KV loads stay even.

    Settings come from flags, EVENSTEP_* variables, the --config file and defaults; the first wins.
    """
    flags = {name: context.params[name] for name in ServeSettings.model_fields}
    given = {name: value for name, value in flags.items() if value or value == ""}
    settings = load_settings(given, config)
    if print_config:
        typer.echo(to_toml(settings), nl=False)
    else:
        _run(settings)


def _run(settings: ServeSettings) -> None:
    if not settings.workers:
        raise ConfigError("no workers: give at least one, as in --worker http://127.0.0.1:8001")
    from router.server import run

    run(settings)
