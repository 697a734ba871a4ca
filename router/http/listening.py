import asyncio
import errno
import socket
import ssl
from functools import partial
from typing import Literal, cast

import uvicorn
from starlette.types import ASGIApp

from router.core.errors import ConfigError
from router.core.worker_specs import authority
from router.http.client_protocol import HotPath, LimitedProtocol
from router.http.port import HttpLimits
from router.http.refusal import HttpCounts


def listen(host: str, port: int, flag: str) -> socket.socket:
    """A socket bound to an address, else ConfigError; ``port`` 0: any free one.

    ``flag`` is the option for the port, named in errors; the host's has the same form.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            flag = flag.replace("port", "host")
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}; try another {flag}") from None
    return listener


def url(listener: socket.socket, tls: ssl.SSLContext | None = None) -> str:
    """URL of a listener."""
    scheme = "http" if tls is None else "https"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{authority(host, port)}"


def server_config(
    app: ASGIApp,
    limits: HttpLimits,
    *,
    counts: HttpCounts | None = None,
    hot: HotPath | None = None,
    grace_s: int | None = None,
    tls: ssl.SSLContext | None = None,
    lifespan: Literal["auto", "off"] = "auto",
) -> uvicorn.Config:
    """``grace_s``: for open answers at the end."""
    # uvicorn only calls it, with keyword arguments.
    protocol = partial(LimitedProtocol, limits, counts or HttpCounts(), hot)
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=cast(type[asyncio.Protocol], protocol),
        ws="none",
        lifespan=lifespan,
        # X-Forwarded-… of clients is not trusted.
        proxy_headers=False,
        access_log=False,
        server_header=False,
        date_header=False,
        log_config=None,
        timeout_graceful_shutdown=grace_s,
    )
    config.load()
    config.ssl = tls
    return config
