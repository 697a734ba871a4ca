"""A proxy's connection to the deciding process, reconnected whenever it breaks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from router.processes import messages as m
from router.processes.directory import Directory, Pair
from router.processes.peer import Peer
from router.processes.proxy_counters import Tallies
from router.processes.remote_dispatcher import TICK_S, RemotePort

log = logging.getLogger(__name__)

# Back off if the deciding process accepts connections but closes each at once.
_AGAIN_S, _SELDOM_S = 0.05, 1.0


@dataclass(frozen=True, slots=True)
class Hearing:
    """Handlers of the messages that the deciding process sends to all proxies.

    Attributes:
        recall: called with ``worker_id``, ``reason`` and ``streams``, see ``Recall``.
        refusal: returns why a certificate and its key are unusable; empty if they are usable.
    """

    learn: Callable[[Directory], None]
    recall: Callable[[str, str, bool], None]
    refusal: Callable[[Pair], str]


class Dial:
    """Keeps a port connected."""

    def __init__(self, path: str, port: RemotePort, hearing: Hearing, tallies: Tallies) -> None:
        self._path = path
        self._port = port
        self._hearing = hearing
        self._tallies = tallies
        self._lost = asyncio.Event()

    async def run(self) -> None:
        """Run until cancelled, then send the port's last counts."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._tick())
                tasks.create_task(self._connect())
        finally:
            self._port.tick()
            self._port.close()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self._port.tick()
            except Exception:  # the next one may do better
                log.exception("counts cannot be sent to the deciding process; trying again")
                self._count()

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        delay_s = _AGAIN_S
        while True:
            with contextlib.suppress(OSError):
                await loop.create_unix_connection(self._make_peer, self._path)
                made_s = loop.time()
                await self._lost.wait()
                log.warning("the connection to the deciding process is lost; connecting again")
                self._lost.clear()
                brief = loop.time() - made_s < _SELDOM_S
                delay_s = min(2 * delay_s, _SELDOM_S) if brief else _AGAIN_S
            await asyncio.sleep(delay_s)

    def _make_peer(self) -> Peer[m.FromDecider]:
        def made() -> None:
            self._port.connected(peer)

        def receive(message: m.FromDecider) -> None:
            self._receive(message, peer)

        peer = Peer(m.from_decider, receive, made, self._end, self._count)
        return peer

    def _end(self) -> None:
        self._port.lost()
        self._lost.set()

    def _count(self) -> None:
        self._tallies.broken += 1

    def _receive(self, message: m.FromDecider, peer: Peer[m.FromDecider]) -> None:
        hearing = self._hearing
        match message:
            case m.Told():
                hearing.learn(message.directory)
                peer.send(m.Followed(message.number))
            case m.Try():
                peer.send(m.Tried(message.number, hearing.refusal(message.pair)))
            case m.Recall():
                hearing.recall(message.worker_id, message.reason, message.streams)
            case m.Given() | m.Denied():
                self._port.take(message)
