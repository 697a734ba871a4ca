"""The server of the admin port, beside another one of the same event loop or by itself."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Iterator

import uvicorn
from starlette.types import ASGIApp

from router.admin.streams import Streams
from router.http.limits import HttpLimits
from router.listening import server_config

_GRACE_S = 2


class AdminServer(uvicorn.Server):
    """Serves until it is told to end, or by a signal if it alone is to handle them.

    Args:
        app: see ``create_admin``.
        streams: ended before their connections are waited for.
        tls: for HTTPS.
        signals: SIGINT and SIGTERM end it.
    """

    def __init__(
        self,
        app: ASGIApp,
        streams: Streams,
        *,
        tls: ssl.SSLContext | None = None,
        signals: bool = False,
    ) -> None:
        limits = HttpLimits()
        super().__init__(server_config(app, limits, grace_s=_GRACE_S, tls=tls, lifespan="off"))
        self._streams = streams
        self._signals = signals

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """See uvicorn; the main server's handlers stay."""
        with super().capture_signals() if self._signals else contextlib.nullcontext():
            yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        self._streams.close()
        await super().shutdown(sockets)


@contextlib.asynccontextmanager
async def serving(
    app: ASGIApp,
    streams: Streams,
    listener: socket.socket | None,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[None]:
    """Serves beside another server, which handles the signals, until the block ends.

    Args:
        app: see ``create_admin``.
        streams: see ``AdminServer``.
        listener: where it listens; None: nowhere.
        tls: see ``AdminServer``.
    """
    if listener is None:
        yield
        return
    server = AdminServer(app, streams, tls=tls)
    listener.listen()  # who comes before the server is there waits
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await task
