"""``evenstep serve``: settings from everywhere, then the server."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from router import systemd
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
    systemd.hold_hangups()  # from here on what is read may be out of date by the time it serves
    settings = given_settings(context, config)
    if print_config:
        typer.echo(to_toml(settings), nl=False)
    elif _usable(settings).processes > 1:
        from router.processes.starting import start

        start(settings, sys.argv[sys.argv.index("serve") + 1 :])
    else:
        from router.server import run

        run(settings, partial(read_settings, context, config))


with_flags(serve)


def read_settings(context: typer.Context, config: Path | None) -> ServeSettings:
    """The settings that count now.

    Raises:
        ConfigError: they cannot be used.
    """
    return _usable(given_settings(context, config))


def _usable(settings: ServeSettings) -> ServeSettings:
    if not settings.workers:
        raise ConfigError("no workers: give at least one, as in --worker http://127.0.0.1:8001")
    return settings
