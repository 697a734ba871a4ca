"""What servers have in common: a socket to listen on or a clear word, a configuration."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from functools import partial
from typing import Literal, cast

import uvicorn
from starlette.types import ASGIApp

from router.errors import ConfigError
from router.http.counts import HttpCounts
from router.http.limits import HttpLimits
from router.http.protocol import HotPath, LimitedProtocol


def listen(host: str, port: int, flag: str, *, shared: bool = False) -> socket.socket:
    """A socket bound to an address.

    Args:
        host: name or address.
        port: 0 for any free one.
        flag: what gives another port; that for another host is called alike.
        shared: others of this user's may be bound to it as well, and each gets connections.

    Raises:
        ConfigError: the address cannot be listened on.
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
    """As many sockets bound to one address; the kernel divides new connections among them.

    Raises:
        ConfigError: see ``listen``; also if there is one of somebody else's already.
    """
    with listen(host, port, flag) as alone:
        port = alone.getsockname()[1]
    return [listen(host, port, flag, shared=True) for _ in range(count)]


def url(listener: socket.socket, tls: ssl.SSLContext | None = None) -> str:
    """Where it is reached."""
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
    """How an application is served.

    Args:
        app: the application.
        limits: what its clients may send, and how long they may take.
        counts: told of its connections.
        hot: takes requests over before the application has them.
        grace_s: how long open answers may go on once it is to end; None: its server sees to that.
        tls: for HTTPS.
        lifespan: whether the application starts and stops what runs beside it.
        path: of a Unix socket to listen on; None: the server is given sockets.
    """
    # uvicorn only calls it, and gives all the rest by name.
    protocol = partial(LimitedProtocol, limits, counts or HttpCounts(), hot)
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=cast(type[asyncio.Protocol], protocol),
        ws="none",
        lifespan=lifespan,
        uds=path,
        # What a client says of who it is and whence (X-Forwarded-…) counts for nothing here.
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
