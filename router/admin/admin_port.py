"""The operators' port: its application, and its server beside another one or alone.

Each ``add_…`` function adds routes to the application, given their dependencies. ``evenstep serve``
and ``evenstep observe`` share them.
"""

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from router.access.key_files import KeySource
from router.admin.admin_guard import LocalOnly
from router.admin.login import KeyedOnly
from router.admin.status_page import Streams
from router.api.front import add_error_handlers
from router.api.openapi import add_description
from router.http.listening import server_config
from router.http.port import HttpLimits

AddRoutes = Callable[[FastAPI], None]

_GRACE_S = 2


def create_admin(routes: Iterable[AddRoutes], keys: KeySource | None = None) -> ASGIApp:
    """The application of the admin port; without ``keys`` it serves this machine only.

    ``routes`` add routes to it, as ``functools.partial(add_metrics, render=metrics.render)``.
    """
    app = FastAPI(title="Evenstep admin", docs_url=None, redoc_url=None, redirect_slashes=False)
    for add in routes:
        add(app)
    add_error_handlers(app)
    add_description(app)
    return LocalOnly(app) if keys is None else KeyedOnly(app, keys, time.monotonic)


class AdminServer(uvicorn.Server):
    """Serves until stopped."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Keep the main server's handlers."""
        yield


@contextlib.asynccontextmanager
async def serving(
    app: ASGIApp,
    streams: Streams,
    listener: socket.socket | None,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[None]:
    """Serve a ``listener``, if there is one, in the block; another server handles the signals."""
    if listener is None:
        yield
        return
    config = server_config(app, HttpLimits(), grace_s=_GRACE_S, tls=tls, lifespan="off")
    server = AdminServer(config)
    listener.listen()  # early clients wait in the queue
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        streams.close()  # the server waits for their connections
        server.should_exit = True
        await task
