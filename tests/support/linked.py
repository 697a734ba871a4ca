"""A proxy's port and a dispatcher in one event loop, over a real Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import msgspec

from router.access.key_limits import KeyLimits
from router.access.key_ring import Key, KeyRing
from router.core.process_counts import ProcessCounts
from router.core.queue.retry import Deadlines
from router.core.request_watcher import Served
from router.core.types import Outcome, Request
from router.http.port import EndingSettings, HttpLimits
from router.http.refusal import HttpCounts
from router.processes.directory import Access, Directory, GroupCard, Patience, Serving
from router.processes.link import DeciderParts
from router.processes.proxy_counters import Tallies
from router.processes.proxy_links import Links
from router.processes.reconnect import Dial
from router.processes.remote_dispatcher import Hearing, RemoteDispatcher
from router.proxy.context import RelaySettings
from tests.support.dispatching import Rig
from tests.support.scripted import until


class Diary:
    """What a port says of its requests' stages."""

    def __init__(self) -> None:
        self.lines: list[tuple[object, ...]] = []

    def dispatched(self, request: Request) -> None:
        self.lines.append(("dispatched", request.id))

    def first_byte(self, request: Request, time_s: float) -> None:
        self.lines.append(("first byte", request.id))

    def ended(self, request: Request, served: Served | None, outcome: Outcome) -> None:
        self.lines.append(("ended", request.id, served, outcome))


def directory(rig: Rig, **patience: Any) -> Directory:
    """What proxies before this dispatcher go by."""
    group = rig.cluster.groups["default"]
    card = GroupCard(4.0, prefills=None, askable=frozenset(group.askable))
    known = {"relay": RELAY, "retry_budget": 0.0, "retry_min_per_s": 0.2}
    return msgspec.structs.replace(
        NO_DIRECTORY,
        groups={"default": card},
        models={"tiny": "default"},
        aliases={"small": "tiny"},
        known=("tiny", "small"),
        patience=Patience(**{**known, **patience}),
    )


RELAY = RelaySettings(3, Deadlines(), worker_headers=False)
NO_DIRECTORY = Directory(
    groups={},
    models={},
    aliases={},
    known=(),
    ranked=frozenset(),
    patience=Patience(RELAY, 0.0, 0.2),
    access=Access(None, hidden=False),
    serving=Serving(HttpLimits(), None, EndingSettings(0.0, 1.0), "info", "text", None, 2.0),
)


class KnownKeys:
    """Keys of clients."""

    def __init__(self, keys: Iterable[Key]) -> None:
        self.ring = KeyRing(keys)


class Decider:
    """A deciding process as far as proxies know it: a dispatcher that can be had anew.

    Args:
        path: of its socket.
        slots: see ``Rig``.
        keys: of clients.
        proxies: how many there are to be.
    """

    def __init__(
        self,
        path: str,
        slots: dict[str, int],
        keys: Iterable[Key] = (),
        proxies: int = 1,
        **settings: Any,
    ):
        self.rig = Rig(slots, **settings)
        self.limits, self.http = KeyLimits(), HttpCounts()
        self.counts = ProcessCounts(wanted=proxies)
        self.troubles: list[tuple[str, str]] = []
        parts = DeciderParts(
            dispatcher=self.rig.dispatcher,
            keys=KnownKeys(keys),
            limits=self.limits,
            trouble=lambda *told: self.troubles.append(told),
            http=self.http,
            processes=self.counts,
            clock=lambda: self.rig.now_s,
        )
        self.links = Links(path, parts, lambda: directory(self.rig), self.counts)

    @contextlib.asynccontextmanager
    async def up(self) -> AsyncIterator[Decider]:
        """Until the block ends; its end looks to proxies as that of its process."""
        running = asyncio.create_task(self.links.run())
        try:
            yield self
        finally:
            running.cancel()
            await asyncio.wait((running,))


class Proxy:
    """A proxy as far as the deciding process knows it."""

    def __init__(self, path: str, slot: int = 0) -> None:
        self.now_s = 100.0
        self.http, self.diary = HttpCounts(), Diary()
        self.tallies = Tallies(self.http)
        self.port = RemoteDispatcher(
            lambda: self.now_s, self.tallies, self.diary, (slot, 0), NO_DIRECTORY
        )
        self.recalled: list[tuple[str, str, bool]] = []
        self.refusal = ""
        self.port.hearing = Hearing(
            self.port.learn, lambda *told: self.recalled.append(told), lambda _: self.refusal
        )
        self._dial = Dial(path, self.port, self.tallies)

    @contextlib.asynccontextmanager
    async def up(self) -> AsyncIterator[Proxy]:
        """Until the block ends."""
        running = asyncio.create_task(self._dial.run())
        try:
            await until(lambda: self.port.here and self.port.directory is not NO_DIRECTORY)
            yield self
        finally:
            running.cancel()
            await asyncio.wait((running,))


def socket_path(folder: Path) -> str:
    """Short enough for a Unix socket's address."""
    return str(folder / "s")
