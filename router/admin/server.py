"""The server of the admin port, beside another server on the same event loop or alone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Iterator

import uvicorn
from starlette.types import ASGIApp

from router.admin.streams import Streams
from router.http.listening import server_config
from router.http.port import HttpLimits

_GRACE_S = 2


class AdminServer(uvicorn.Server):
    """Serves until stopped, or until a signal if ``signals`` is set.

    Args:
        streams: open answers, closed before the server waits for their connections.
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
        """Keep the main server's handlers."""
        with super().capture_signals() if self._signals else contextlib.nullcontext():
            yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._streams.close()
        await super().shutdown(sockets)


@contextlib.asynccontextmanager
async def serving(
    app: ASGIApp,
    streams: Streams,
    listener: socket.socket | None,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[None]:
    """Serve beside another server, which handles the signals, until the block ends.

    Without a ``listener`` nothing is served.
    """
    if listener is None:
        yield
        return
    server = AdminServer(app, streams, tls=tls)
    listener.listen()  # early clients wait in the queue
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await task
