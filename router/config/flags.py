"""Settings of ``evenstep serve`` as command-line flags."""

import inspect
from collections.abc import Callable, Iterable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from router.config.balancing_settings import REPLACED
from router.config.serve_settings import GROUPS, SETTINGS, ServeSettings, title_of
from router.config.setting import marks_of, metavar_of
from router.config.setting_sources import CONFIG_VARIABLE, flag_name, load_settings, replaced
from router.core.errors import ConfigError
from router.http.port import DataPlane

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", envvar=CONFIG_VARIABLE, help="TOML file with settings."
    ),
]


ADVANCED = "Advanced"


def with_flags(command: Callable[..., None], settings: Iterable[str] = SETTINGS) -> None:
    """Replace a command's ``**_`` by flags, advanced ones last; old settings' are errors."""
    settings = sorted(settings, key=lambda name: marks_of(SETTINGS[name])["advanced"])
    signature = inspect.signature(command, eval_str=True)
    *own, _ = signature.parameters.values()
    old = [
        _parameter(name, str, typer.Option(flag_name(name), hidden=True))
        for name in (REPLACED if len(settings) == len(SETTINGS) else ())
    ]
    parameters = [*own, *map(_flag, settings), *old]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]


def given_settings(context: typer.Context, config: Path | None) -> ServeSettings:
    """The settings from a command's flags and all other sources; raises as ``load_settings``."""
    for name in REPLACED:
        if context.params.get(name) is not None:
            raise ConfigError(replaced(name, flag_name(name)))
    given = {name: value for name in SETTINGS if (value := context.params.get(name)) or value == ""}
    return load_settings(given, config)


def _flag(setting: str) -> inspect.Parameter:
    field = SETTINGS[setting]
    default = field.default.value if isinstance(field.default, Enum) else field.default
    suffix = "" if default in (None, ()) else f" [default: {default}]"
    text = f"{field.description}{suffix}"
    marks = marks_of(field)
    group = next(group for group in GROUPS if setting in group.model_fields)
    option = typer.Option(
        flag_name(setting),
        metavar=metavar_of(setting, field),
        help=text,
        rich_help_panel=ADVANCED if marks["advanced"] else title_of(group)[0],
    )
    # All are text, so that one validator words all errors.
    return _parameter(setting, list[str] if default == () else str, option)


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def usable(settings: ServeSettings) -> ServeSettings:
    """The settings if a router can start with them; else ConfigError."""
    if not settings.workers and not settings.discover:
        raise ConfigError("no workers: give at least one, as in --worker http://127.0.0.1:8001")
    if settings.grpc_port is not None and settings.data_plane is not DataPlane.SPLICE:
        raise ConfigError("--grpc-port needs --data-plane splice")
    return settings
