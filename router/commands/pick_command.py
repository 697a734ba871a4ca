"""``evenstep pick``: ``evenstep serve`` with a port that gateways ask."""

from functools import partial
from pathlib import Path

import typer

from router import systemd
from router.config.flags import ConfigFile, read_settings, with_flags
from router.config.serve_settings import ServeSettings
from router.config.setting_sources import changed
from router.core.errors import ConfigError
from router.http.port import DataPlane

# As other endpoint pickers of the Gateway API have it.
_PORT = 9002


def pick(context: typer.Context, *, config: ConfigFile = None, **_: object) -> None:
    """Decide for a gateway (Envoy, the Gateway API) where each request goes.

    Requests wait here until a worker has a slot; the gateway then sends them there. It asks by gRPC
    (ext_proc, port 9002 unless --grpc-port says otherwise) or over HTTP (ext_authz, on --port).
    Settings are those of evenstep serve.
    """
    systemd.hold_hangups()  # as in ``serve``
    try:
        import grpc_health.v1  # noqa: F401 - whether it is there
        from envoy.service.ext_proc.v3 import external_processor_pb2  # noqa: F401
    except ImportError:
        raise ConfigError("evenstep pick needs more: pip install 'evenstep[gateway]'") from None
    from router.serve.router import run

    read = partial(_read, context, config)
    run(read(), read)


def _read(context: typer.Context, config: Path | None) -> ServeSettings:
    settings = read_settings(context, config)
    if settings.data_plane is not DataPlane.SPLICE:
        raise ConfigError("evenstep pick needs --data-plane splice")
    return settings if settings.grpc_port else changed(settings, {"grpc_port": _PORT})


with_flags(pick)
