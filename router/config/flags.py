"""Settings of ``evenstep serve`` as command-line flags."""

import inspect
from collections.abc import Callable, Iterable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from router.config.balancing_settings import REPLACED
from router.config.serve_settings import GROUPS, SETTINGS, ServeSettings, title_of
from router.config.setting import marks_of
from router.config.setting_sources import CONFIG_VARIABLE, flag_name, load_settings, replaced
from router.core.errors import ConfigError

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", envvar=CONFIG_VARIABLE, help="TOML file with settings."
    ),
]


ADVANCED = "Advanced"


def with_flags(command: Callable[..., None], settings: Iterable[str] = SETTINGS) -> None:
    """Replace a command's ``**_`` by a flag for each of these settings, the advanced ones last."""
    settings = sorted(settings, key=lambda name: marks_of(SETTINGS[name])["advanced"])
    signature = inspect.signature(command, eval_str=True)
    *own, _ = signature.parameters.values()
    old = REPLACED if len(settings) == len(SETTINGS) else ()
    parameters = [*own, *map(_flag, settings), *map(_old_flag, old)]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]


def given_settings(context: typer.Context, config: Path | None) -> ServeSettings:
    """Return the settings from a command's flags and all other sources.

    Raises:
        ConfigError: see ``load_settings``.
    """
    for name in REPLACED:
        if context.params.get(name) is not None:
            raise ConfigError(replaced(name, flag_name(name)))
    given = {name: value for name in SETTINGS if (value := context.params.get(name)) or value == ""}
    return load_settings(given, config)


def _flag(setting: str) -> inspect.Parameter:
    """Return a setting's flag; all are text, so that one validator words all errors."""
    field = SETTINGS[setting]
    default = field.default.value if isinstance(field.default, Enum) else field.default
    suffix = "" if default in (None, ()) else f" [default: {default}]"
    text = f"{field.description}{suffix}"
    marks = marks_of(field)
    group = next(group for group in GROUPS if setting in group.model_fields)
    option = typer.Option(
        flag_name(setting),
        metavar=marks["metavar"],
        help=text,
        rich_help_panel=ADVANCED if marks["advanced"] else title_of(group)[0],
    )
    kind: Any = list[str] if default == () else str
    return inspect.Parameter(
        setting,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


def _old_flag(setting: str) -> inspect.Parameter:
    """Return a hidden flag whose use is an error that says what has replaced it."""
    annotation = Annotated[str | None, typer.Option(flag_name(setting), hidden=True)]
    return inspect.Parameter(
        setting, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
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
