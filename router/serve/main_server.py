"""The main port's server: it ends without losing requests, and reloads settings.

From the first SIGTERM or SIGINT on, answers carry ``Connection: close`` and ``/health`` reports
the drain. After the drain delay new requests are rejected (``front``). Open answers go on for the
grace period, then are cancelled. A second signal ends that period, a third the process.
"""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator

import uvicorn

from router import systemd
from router.http.port import Lifecycle

log = logging.getLogger(__name__)

_ENDING = (signal.SIGTERM, signal.SIGINT)
_LOOK_S = 0.02
# A terminal and the parent process may both send one signal.
_SAME_S = 0.2
# For the end of an answer that is cut short.
_LAST_WORD_S = 2.0
# A client may already have sent the next request.
_LINGER_S = 0.5


class MainServer(uvicorn.Server):
    """Serves until a signal ends it.

    ``reload`` is called at SIGHUP, one call at a time; None: SIGHUP is not handled. ``inherited``:
    another process keeps the socket open.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        lifecycle: Lifecycle,
        reload: Callable[[], Awaitable[None]] | None = None,
        *,
        inherited: bool = False,
    ) -> None:
        super().__init__(config)
        self._lifecycle = lifecycle
        self._reload = reload
        self._inherited = inherited
        self._asked = asyncio.Event()
        self._hurried = asyncio.Event()
        self._asked_s = 0.0
        self._late: list[asyncio.Task[object]] = []

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are not raised again: such an end is a success."""
        loop = asyncio.get_running_loop()
        for number in _ENDING:
            loop.add_signal_handler(number, self.end)
        yield

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        beating = asyncio.create_task(systemd.beat())
        try:
            await super().serve(sockets)
        finally:
            beating.cancel()

    async def main_loop(self) -> None:
        """Returns when no new requests are to be accepted."""
        await self.on_tick(0)
        hangup = asyncio.Event()
        if self._reload is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hangup.set)
            systemd.take_hangups()
        reloading = asyncio.create_task(self._reloads(hangup))
        systemd.notify("READY=1")  # from now on SIGHUP is heard
        await self._asked.wait()
        reloading.cancel()
        systemd.notify("STOPPING=1")
        delay_s = self._lifecycle.drain_delay_s
        self._lifecycle.drain()
        # All answers that have not begun share this list.
        self.server_state.default_headers.append((b"connection", b"close"))
        log.info("ending: new requests are taken for another %g s", delay_s)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._hurried.wait(), delay_s)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        state, grace_s = self.server_state, self._lifecycle.grace_s
        self._lifecycle.closed = True
        self._close_listeners(sockets or [])
        log.info("ending: %d open answers may go on for %g s", len(state.tasks), grace_s)
        await self._until(lambda: not state.tasks, grace_s)
        if state.tasks:
            log.warning("ending: %d answers are cut short", len(state.tasks))
            await self._cut_short()
        late = self._late
        await self._until(
            lambda: not state.connections and all(each.done() for each in late), _LINGER_S
        )
        for connection in list(state.connections):
            connection.transport.close()
        await self._until(lambda: not state.connections, _LAST_WORD_S, hurried=False)
        self._abort()
        await self.lifespan.shutdown()

    async def _reloads(self, hangup: asyncio.Event) -> None:
        """Reload at each SIGHUP, also one held since the start (``hold_hangups``)."""
        while self._reload is not None:
            await hangup.wait()
            hangup.clear()
            await self._reload()

    def end(self) -> None:
        """Begin to; again: at once."""
        now_s = asyncio.get_running_loop().time()
        if not self._asked.is_set():
            self._asked.set()
            self._asked_s = now_s
        if now_s < self._asked_s + _SAME_S:
            return
        log.warning("ending at once")
        self._hurried.set()
        for number in _ENDING:
            asyncio.get_running_loop().remove_signal_handler(number)

    def _close_listeners(self, sockets: Iterable[socket.socket]) -> None:
        """Connections in the kernel's queue are still served."""
        loop = asyncio.get_running_loop()

        def protocol() -> asyncio.Protocol:
            return self.config.http_protocol_class(  # type: ignore[call-arg]
                config=self.config, server_state=self.server_state, app_state=self.lifespan.state
            )

        # Closing the socket would reset connections that the kernel has accepted.
        for listener in () if self._inherited else sockets:
            with contextlib.suppress(BlockingIOError):
                while True:
                    connection, _ = listener.accept()
                    connection.setblocking(False)
                    taken = loop.connect_accepted_socket(protocol, connection, ssl=self.config.ssl)
                    self._late.append(loop.create_task(taken))
        for server in self.servers:
            server.close()

    async def _cut_short(self) -> None:
        for task in self.server_state.tasks:
            task.cancel("the router ends")
        await self._until(lambda: not self.server_state.tasks, _LAST_WORD_S, hurried=False)
        if self.server_state.tasks:
            self._abort()
            await self._until(lambda: not self.server_state.tasks, _LAST_WORD_S, hurried=False)

    def _abort(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def _until(
        self, condition: Callable[[], bool], longest_s: float, *, hurried: bool = True
    ) -> None:
        """It polls: uvicorn's sets send no event. With ``hurried`` a second signal ends it."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + longest_s
        while not condition() and loop.time() < end_s:
            if hurried and self._hurried.is_set():
                return
            await asyncio.sleep(_LOOK_S)
