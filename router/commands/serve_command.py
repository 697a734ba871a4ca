"""``evenstep serve``: reads the settings from all sources and starts the server."""

from typing import Annotated

import typer

from router import systemd
from router.commands.options import flag
from router.config.flags import ConfigFile, given_settings, usable, with_flags
from router.config.setting_sources import to_toml


def serve(
    context: typer.Context,
    *,
    config: ConfigFile = None,
    print_config: Annotated[
        bool, flag("Print the settings as TOML and exit.", name="--print-config")
    ] = False,
    **_: object,
) -> None:
    """Route requests to workers so that their KV loads stay even.

    Settings come from flags, EVENSTEP_* variables, the --config file and defaults; the first wins.
    """
    systemd.hold_hangups()  # hold SIGHUP: the settings read below may change before serving starts
    settings = given_settings(context, config)
    if print_config:
        typer.echo(to_toml(settings), nl=False)
    else:
        from router.serve.router import run

        run(usable(settings), lambda: usable(given_settings(context, config)))


with_flags(serve)
