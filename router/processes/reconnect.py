import asyncio
import contextlib
import logging

from router.processes import messages as m
from router.processes.peer import Peer
from router.processes.proxy_counters import Tallies
from router.processes.remote_dispatcher import TICK_S, RemoteDispatcher

log = logging.getLogger(__name__)

# Back off if the deciding process accepts connections but closes each at once.
_AGAIN_S, _SELDOM_S = 0.05, 1.0


class Dial:
    """Keeps a proxy connected to the deciding process."""

    def __init__(self, path: str, dispatcher: RemoteDispatcher, tallies: Tallies) -> None:
        self._path = path
        self._dispatcher = dispatcher
        self._tallies = tallies
        self._lost = asyncio.Event()

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._tick())
                tasks.create_task(self._connect())
        finally:
            self._dispatcher.tick()
            self._dispatcher.close()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self._dispatcher.tick()
            except Exception:  # the next one may do better
                log.exception("counts cannot be sent to the deciding process; trying again")
                self._tallies.broken += 1

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
        dispatcher = self._dispatcher

        def connected() -> None:
            dispatcher.connected(peer)

        def lost() -> None:
            dispatcher.lost()
            self._lost.set()

        peer: Peer[m.FromDecider] = Peer(
            m.from_decider, dispatcher.receive, connected, lost, self._tallies
        )
        return peer
