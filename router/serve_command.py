"""``evenstep serve``: settings from everywhere, then the server."""

from __future__ import annotations

from typing import Annotated

import typer

from router.errors import ConfigError
from router.settings.flags import ConfigFile, given_settings, with_flags
from router.settings.serve import ServeSettings
from router.settings.sources import to_toml

PrintConfig = Annotated[
    bool, typer.Option("--print-config", help="Print the settings as TOML and exit.")
]


def serve(
    context: typer.Context,
    *,
    config: ConfigFile = None,
    print_config: PrintConfig = False,
    **_: object,
) -> None:
    """Route requests to workers so that their KV loads stay even.

    Settings come from flags, EVENSTEP_* variables, the --config file and defaults; the first wins.
    """
    settings = given_settings(context, config)
    if print_config:
        typer.echo(to_toml(settings), nl=False)
    else:
        from router.server import run

        run(_usable(settings), lambda: _usable(given_settings(context, config)))


with_flags(serve)


def _usable(settings: ServeSettings) -> ServeSettings:
    if not settings.workers:
        raise ConfigError("no workers: give at least one, as in --worker http://127.0.0.1:8001")
    return settings
