"""``evenstep pick``: ``evenstep serve`` with a port that gateways ask."""

from functools import partial
from pathlib import Path

import typer

from router import systemd
from router.config.flags import ConfigFile, given_settings, usable, with_flags
from router.config.serve_settings import ServeSettings
from router.config.setting_sources import changed

# As other endpoint pickers of the Gateway API have it.
_PORT = 9002


def pick(context: typer.Context, *, config: ConfigFile = None, **_: object) -> None:
    """Decide for a gateway (Envoy, the Gateway API) where each request goes.

    Requests wait here until a worker has a slot; the gateway then sends them there. It asks by gRPC
    (ext_proc, port 9002 unless --grpc-port says otherwise) or over HTTP (ext_authz, on --port).
    Settings are those of evenstep serve.
    """
    systemd.hold_hangups()  # as in ``serve``
    from router.serve.router import run

    read = partial(_read, context, config)
    run(read(), read)


def _read(context: typer.Context, config: Path | None) -> ServeSettings:
    settings = given_settings(context, config)
    return usable(settings if settings.grpc_port else changed(settings, {"grpc_port": _PORT}))


with_flags(pick)
