"""The socket that proxies connect to, and the messages to all of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

import msgspec

from router.config.serve_settings import ServeSettings
from router.core.errors import ConfigError
from router.core.process_counts import ProcessCounts
from router.processes import messages as m
from router.processes.directory import Directory
from router.processes.link import Books, Link
from router.processes.peer import Peer
from router.processes.remote_dispatcher import SILENT_S

log = logging.getLogger(__name__)

_LOOK_S = 0.05
_LOOKS_PER_BEAT = 20
# Longer than the supervisor takes to replace a proxy that hangs.
_FOLLOW_S = 90.0


class Links:
    """All proxies; implements ``Followers``."""

    def __init__(
        self, path: str, books: Books, directory: Callable[[], Directory], counts: ProcessCounts
    ) -> None:
        self._counts = counts
        self._path = path
        self._books = books
        self._directory = directory
        self._links: set[Link] = set()
        self._told = m.Told(1, directory())
        self._tries = 0

    @property
    def proxies(self) -> Collection[Link]:
        """Proxies that have sent ``Hello``."""
        return [link for link in self._links if link.slot >= 0]

    async def run(self) -> None:
        """Accept proxies and send them changes until cancelled."""
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(self._join, self._path)
        try:
            looks = 0
            while True:
                await asyncio.sleep(_LOOK_S)
                looks += 1
                try:
                    self._look()
                    if looks % _LOOKS_PER_BEAT == 0:
                        self._tell(m.Beat())
                except Exception:  # the next look may find better
                    log.exception("changes cannot be sent to the proxies; trying again")
                    self._counts.broken += 1
        finally:
            server.close()
            for link in list(self._links):
                link.peer.close()

    def _look(self) -> None:
        proxies = self.proxies
        for link in proxies:
            link.peer.silent += 1
        heard = [link for link in proxies if link.peer.silent * _LOOK_S < SILENT_S]
        self._counts.proxies = len(heard)
        self._counts.proxy_restarts |= {link.slot: link.restarts for link in proxies}
        self._renew()

    def _renew(self) -> None:
        directory = self._directory()
        if directory != self._told.directory:
            self._told = m.Told(self._told.number + 1, directory)
            self._tell(self._told)

    async def agree(self, settings: ServeSettings) -> None:
        """Have the proxies check the certificate, the only setting that they can refuse."""
        if settings.certificate is None:
            return
        self._tries += 1
        asked = self.proxies
        for link in asked:
            link.peer.send(m.Try(self._tries, settings.certificate))

        def unheard() -> list[Link]:
            return [one for one in asked if one in self._links and one.tried.number < self._tries]

        await _until(lambda: not unheard())
        tried = [link for link in asked if link in self._links]
        refused = [f"proxy {one.slot}: {one.tried.refusal}" for one in tried if one.tried.refusal]
        refused += [f"proxy {link.slot} does not answer" for link in unheard()]
        if refused:
            raise ConfigError("; ".join(refused))

    async def follow(self) -> list[str]:
        """Wait for all proxies to apply the directory, including one that is restarting."""
        self._renew()
        number = self._told.number

        def late() -> set[int]:
            return set(range(self._counts.wanted)) - {
                link.slot for link in self.proxies if link.follows >= number
            }

        await _until(lambda: not late())
        return [f"proxy {slot}" for slot in sorted(late())]

    def recall(self, worker_id: str, reason: str, streams: bool) -> None:
        self._tell(m.Recall(worker_id, reason, streams))

    def _tell(self, message: msgspec.Struct) -> None:
        for link in list(self._links):
            link.peer.send(message)

    def _join(self) -> Peer[m.FromProxy]:
        return Link(self._books, self._welcome, self._links.discard).peer

    def _welcome(self, link: Link) -> None:
        self._renew()
        self._links.add(link)
        link.peer.send(self._told)


async def _until(condition: Callable[[], bool]) -> None:
    end_s = asyncio.get_running_loop().time() + _FOLLOW_S
    while not condition() and asyncio.get_running_loop().time() < end_s:  # noqa: ASYNC110 - proxies tell links
        await asyncio.sleep(_LOOK_S / 5)
