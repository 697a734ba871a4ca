"""Where proxies reach the deciding process, and what it tells all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from router.processes import messages as m
from router.processes.connection import Connection
from router.processes.counts import ProcessCounts
from router.processes.directory import Directory
from router.processes.link import Books, Link

_LOOK_S = 0.05


class Links:
    """All proxies.

    Args:
        path: of the Unix socket that they connect to.
        books: where their requests are kept.
        directory: what they are to go by now.
        counts: how many there are.
    """

    def __init__(
        self, path: str, books: Books, directory: Callable[[], Directory], counts: ProcessCounts
    ) -> None:
        self._counts = counts
        self._path = path
        self._books = books
        self._directory = directory
        self._links: set[Link] = set()
        self._told: m.Told | None = None

    @property
    def proxies(self) -> Collection[Link]:
        """Those that have said who they are."""
        return [link for link in self._links if link.slot >= 0]

    async def run(self) -> None:
        """Let proxies come, and tell them what changes, until it is cancelled."""
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(self._join, self._path)
        try:
            while True:
                await asyncio.sleep(_LOOK_S)
                self._look()
        finally:
            server.close()
            for link in list(self._links):
                link.connection.close()

    def _look(self) -> None:
        """Tell all if something has changed."""
        proxies = self.proxies
        self._counts.proxies = len(proxies)
        self._counts.proxy_restarts |= {link.slot: link.restarts for link in proxies}
        told = m.Told(self._directory())
        if told != self._told:
            self._told = told
            self._tell(told)

    def recall(self, worker_id: str, reason: str, streams: bool) -> None:
        """See ``Attempts``: also those of the proxies."""
        self._tell(m.Recall(worker_id, reason, streams))

    def _tell(self, message: m.Message) -> None:
        for link in self._links:
            link.connection.say(message)

    def _join(self) -> Connection[m.FromProxy]:
        return Link(self._books, self._welcome, self._links.discard).connection

    def _welcome(self, link: Link) -> None:
        self._links.add(link)
        link.connection.say(self._told or m.Told(self._directory()))
