import asyncio
import errno
import socket
import ssl
from functools import partial
from typing import Literal, cast

import uvicorn
from starlette.types import ASGIApp

from router.core.errors import ConfigError
from router.http.client_protocol import HotPath, LimitedProtocol
from router.http.port import HttpLimits
from router.http.refusal import HttpCounts


def listen(host: str, port: int, flag: str, *, shared: bool = False) -> socket.socket:
    """A socket bound to an address, else ConfigError; ``port`` 0: any free one.

    ``flag`` is the option for the port, named in errors; the host's has the same form.
    ``shared``: this user's other sockets may share the address and its connections.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shared))
        listener.bind(address)
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            flag = flag.replace("port", "host")
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}; try another {flag}") from None
    return listener


def listen_together(host: str, port: int, flag: str, count: int) -> list[socket.socket]:
    """Sockets on one address that nobody else shares; the kernel spreads connections."""
    with listen(host, port, flag) as alone:
        port = alone.getsockname()[1]
    return [listen(host, port, flag, shared=True) for _ in range(count)]


def url(listener: socket.socket, tls: ssl.SSLContext | None = None) -> str:
    """URL of a listener."""
    scheme = "http" if tls is None else "https"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def server_config(
    app: ASGIApp,
    limits: HttpLimits,
    *,
    counts: HttpCounts | None = None,
    hot: HotPath | None = None,
    grace_s: int | None = None,
    tls: ssl.SSLContext | None = None,
    lifespan: Literal["auto", "off"] = "auto",
    path: str | None = None,
) -> uvicorn.Config:
    """``grace_s``: for open answers at the end; ``path``: Unix socket, else it is given sockets."""
    # uvicorn only calls it, with keyword arguments.
    protocol = partial(LimitedProtocol, limits, counts or HttpCounts(), hot)
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=cast(type[asyncio.Protocol], protocol),
        ws="none",
        lifespan=lifespan,
        uds=path,
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
