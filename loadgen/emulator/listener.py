"""One listening port whose connections can be cut, refused and answered with garbage.

It drives uvicorn's HTTP protocol directly: faults need the listening socket and the transports, and
``uvicorn.Server`` hides both.
"""

import asyncio
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from loadgen.emulator.faults import GARBAGE, Wire
from router.core.errors import ConfigError

WIRE = "evenstep.wire"

EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - only if the user says so
"""Hosts that mean all of a machine's addresses, each with the one that reaches it from itself."""

_BACKLOG = 2048
_CLOSE_TIMEOUT_S = 0.5


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol on a ``Wire``; the application finds the wire in its scope."""

    def __init__(self, config: uvicorn.Config, state: ServerState, garbage: Callable[[], bool]):
        super().__init__(config, state, {})
        self._garbage = garbage

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(Wire(transport))

    def data_received(self, data: bytes) -> None:
        if self._garbage():
            self.transport.write(GARBAGE)
            self.transport.close()
        else:
            super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {WIRE: {"wire": self.transport}}


class Listener:
    """Serves an ASGI application, without lifespan events, on one port.

    Port 0 picks a free one at the first ``open`` and keeps it. ``garbage`` is called at every read;
    True answers with bytes that are not HTTP.
    """

    def __init__(
        self, app: ASGIApp, host: str, port: int, garbage: Callable[[], bool] = lambda: False
    ) -> None:
        self.host = host
        self.port = port
        self._state = ServerState()
        self._config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            date_header=False,
        )
        self._config.load()
        self._state.default_headers = self._config.encoded_headers
        self._garbage = garbage
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """Valid after ``open``."""
        return self.url_at(EVERY_ADDRESS.get(self.host, self.host))

    def url_at(self, host: str) -> str:
        """Base URL with another name or address of this machine."""
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    async def open(self) -> None:
        """Accept connections; no-op when already open."""
        if self._server is not None:
            return
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                lambda: _Protocol(self._config, self._state, self._garbage),
                self.host,
                self.port,
                backlog=_BACKLOG,
            )
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {self.host}:{self.port} ({error.strerror}): choose another port"
            ) from error
        self.port = self._server.sockets[0].getsockname()[1]

    def refuse(self) -> None:
        """Existing connections stay open."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def reset(self) -> None:
        for connection in list(self._state.connections):
            wire = connection.transport
            assert isinstance(wire, Wire)
            wire.reset()

    def cut(self) -> None:
        self.refuse()
        for connection in list(self._state.connections):
            connection.transport.abort()

    async def closed(self) -> None:
        """Wait until the requests of cut connections have ended."""
        if self._state.tasks:
            await asyncio.wait(list(self._state.tasks), timeout=_CLOSE_TIMEOUT_S)
