"""The socket that proxies connect to, and messages to all of them."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection

import msgspec

from router.config.serve_settings import ServeSettings
from router.core.errors import ConfigError
from router.core.process_counts import ProcessCounts
from router.processes import messages as m
from router.processes.directory import Directory
from router.processes.link import DeciderParts, Link
from router.processes.remote_dispatcher import SILENT_S

log = logging.getLogger(__name__)

_BEAT_S = 1.0
# Changes within this time go out as one directory.
_GATHER_S = 0.05
# Longer than the supervisor takes to replace a proxy that hangs.
_FOLLOW_S = 90.0


class Links:
    """All proxies; implements ``Followers``; ``directory`` builds the one now valid."""

    def __init__(
        self,
        path: str,
        parts: DeciderParts,
        directory: Callable[[], Directory],
        counts: ProcessCounts,
    ) -> None:
        self._counts = counts
        self._path = path
        self._parts = parts
        self._directory = directory
        self._links: set[Link] = set()
        self._told = m.Told(1, directory())
        self._tries = 0
        self._replied = asyncio.Event()
        self._publishing: asyncio.TimerHandle | None = None

    @property
    def proxies(self) -> Collection[Link]:
        return [link for link in self._links if link.slot >= 0]

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(
            lambda: Link(self._parts, self._note).peer, self._path
        )

        def publish_soon() -> None:
            if self._publishing is None:
                self._publishing = loop.call_later(_GATHER_S, self._publish)

        self._parts.dispatcher.on_change = publish_soon
        try:
            while True:
                for link in self.proxies:
                    link.peer.silent += 1
                self._count()
                self._publish()
                self._send_all(m.Beat())
                await asyncio.sleep(_BEAT_S)
        finally:
            self._parts.dispatcher.on_change = lambda: None
            server.close()
            for link in list(self._links):
                link.peer.close()

    def _count(self) -> None:
        proxies = self.proxies
        heard = [link for link in proxies if link.peer.silent * _BEAT_S < SILENT_S]
        self._counts.proxies = len(heard)
        self._counts.proxy_restarts |= {link.slot: link.restarts for link in proxies}

    # the directory

    def _publish(self) -> None:
        self._publishing = None
        try:
            self._renew()
        except Exception:  # the next change may find better
            log.exception("changes cannot be sent to the proxies; trying again")
            self._counts.broken += 1

    def _renew(self) -> None:
        directory = self._directory()
        if directory != self._told.directory:
            self._told = m.Told(self._told.number + 1, directory)
            self._send_all(self._told)

    async def agree(self, settings: ServeSettings) -> None:
        """Have the proxies check the certificate, the only setting they can refuse."""
        if settings.certificate is None:
            return
        self._tries += 1
        asked = self.proxies
        for link in asked:
            link.peer.send(m.Try(self._tries, settings.certificate))

        def unheard() -> list[Link]:
            return [one for one in asked if one.here and one.tried.number < self._tries]

        await self._until(lambda: not unheard())
        refused = [
            f"proxy {link.slot}: {link.tried.refusal}"
            for link in asked
            if link.here and link.tried.refusal
        ]
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

        await self._until(lambda: not late())
        return [f"proxy {slot}" for slot in sorted(late())]

    async def _until(self, condition: Callable[[], bool]) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FOLLOW_S):
                while not condition():
                    self._replied.clear()
                    await self._replied.wait()

    # messages to all

    def recall(self, worker_id: str, reason: str, streams: bool) -> None:
        self._send_all(m.Recall(worker_id, reason, streams))

    def _send_all(self, message: msgspec.Struct) -> None:
        for link in list(self._links):
            link.peer.send(message)

    def _note(self, link: Link) -> None:
        self._replied.set()
        if not link.here:
            self._links.discard(link)
        elif link not in self._links:
            self._renew()
            self._links.add(link)
            link.peer.send(self._told)
        self._count()
