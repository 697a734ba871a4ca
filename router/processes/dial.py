"""How a proxy reaches the deciding process, again and again if need be."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from router.processes import messages as m
from router.processes.connection import Connection
from router.processes.directory import Directory
from router.processes.port import RemotePort

log = logging.getLogger(__name__)

_TICK_S = 0.25
_AGAIN_S = 0.05


class Dial:
    """Keeps a port connected.

    Args:
        path: of the Unix socket.
        port: what is connected.
        learn: called with what the deciding process tells all proxies.
        recall: called with ``worker_id``, ``reason`` and ``streams``, see ``Recall``.
    """

    def __init__(
        self,
        path: str,
        port: RemotePort,
        learn: Callable[[Directory], None],
        recall: Callable[[str, str, bool], None],
    ) -> None:
        self._path = path
        self._port = port
        self._learn = learn
        self._recall = recall
        self._lost = asyncio.Event()

    async def run(self) -> None:
        """Until it is cancelled; what the port has to tell is told then."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._tick())
                tasks.create_task(self._connect())
        finally:
            self._port.tick()
            self._port.close()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._port.tick()

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(OSError):
                await loop.create_unix_connection(self._connection, self._path)
                await self._lost.wait()
                log.warning("the deciding process is gone")
                self._lost.clear()
            await asyncio.sleep(_AGAIN_S)

    def _connection(self) -> Connection[m.FromDecider]:
        def made() -> None:
            self._port.connected(connection)

        def lost() -> None:
            self._port.lost()
            self._lost.set()

        connection = Connection(m.from_decider, self._take, made, lost)
        return connection

    def _take(self, message: m.FromDecider) -> None:
        match message:
            case m.Told():
                self._learn(message.directory)
            case m.Recall():
                self._recall(message.worker_id, message.reason, message.streams)
            case _:
                self._port.take(message)
