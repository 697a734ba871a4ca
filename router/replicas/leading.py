"""Whether this replica decides: one of several does, who holds a lock."""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from ipaddress import ip_address
from typing import Protocol
from urllib.parse import urlsplit

from router.core.clock import Clock
from router.core.errors import EvenstepError, NotLeadingError
from router.core.tenure import Tenure
from router.core.worker_specs import authority

log = logging.getLogger(__name__)

# What the last leader has sent may be on its way to the engines.
_UNDER_WAY_S = 0.1
# Engines tell of themselves at once when asked, or are not well.
_LONGEST_S = 1.0
_LOOK_S = 0.005


def running_clock() -> float:
    """Seconds, counted also while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def replica_name() -> str:
    """Of this process, and no other."""
    return f"{socket.gethostname()}_{os.urandom(4).hex()}"


def reachable(url: str) -> str:
    """URL for other replicas: a listener on all addresses is found by this machine's."""
    given = urlsplit(url)
    if given.hostname not in ("0.0.0.0", "::"):  # noqa: S104 - compared, not listened on
        return url
    host = socket.gethostname()
    with contextlib.suppress(OSError):
        address = str(socket.getaddrinfo(host, None)[0][4][0])
        host = host if ip_address(address).is_loopback else address
    return f"{given.scheme}://{authority(host, given.port or 0)}"


class Lock(Protocol):
    """A lock that one replica holds until it releases it, or has not renewed it for ``lease_s``.

    Attributes:
        period_s: time between two attempts.
    """

    @property
    def lease_s(self) -> float: ...

    @property
    def period_s(self) -> float: ...

    async def attempt(self, name: str) -> str:
        """Take or renew it, if it is free or held; the holder's name; OSError: it is unknown."""

    async def look(self) -> str:
        """The holder's name; may be one that has gone."""

    async def release(self, name: str) -> None:
        """Have another one take it at once; only ``look`` follows."""

    async def aclose(self) -> None: ...


class Picture(Protocol):
    """What the replica knows of its workers."""

    def told_since(self, since_s: float) -> bool:
        """Whether all live workers have; ``since_s`` is monotonic."""

    @property
    def all_shown(self) -> bool:
        """Whether the workers have told of all that was sent to them."""

    def lead(self) -> None:
        """Decide from now on."""


class Leading:
    """Follows the lock; without one, this replica decides alone.

    Attributes:
        name: this replica's, with ``@`` and the URL at which others reach it.
        leader: that of the replica that decides, as far as known; else empty.
        takeovers: how often this replica began to.
        failures: attempts that the lock did not answer.
    """

    _picture: Picture
    _ask: Callable[[], None]

    def __init__(
        self, lock: Lock | None = None, name: str = "", clock: Clock = running_clock, url: str = ""
    ) -> None:
        self.name = f"{name}@{url}" if url else name
        self.leader = ""
        self.takeovers = self.failures = 0
        self._lock = lock
        self._clock = clock
        self._tenure = Tenure(0.0 if lock is None else lock.lease_s)
        self._ending, self._change = asyncio.Event(), asyncio.Event()
        self._settled = False
        self._settling: asyncio.Task[None] | None = None

    def know(self, picture: Picture, ask: Callable[[], None]) -> None:
        """``ask`` has the workers tell of themselves."""
        self._picture, self._ask = picture, ask

    @property
    def alone(self) -> bool:
        return self._lock is None

    @property
    def serves(self) -> bool:
        """Whether requests may wait here."""
        return self._lock is None or self._tenure.holds(self._clock())

    @property
    def decides(self) -> bool:
        """Whether they may go to workers, at this very moment."""
        return self._lock is None or (self._settled and self._tenure.holds(self._clock()))

    @property
    def standing(self) -> str:
        """Who decides, in words."""
        if self.serves:
            return "this replica decides" if self.decides else "this replica is taking over"
        other = self.leader != self.name and self.leader
        return f"another replica decides: {shown(other)}" if other else "no replica decides now"

    @property
    def follows(self) -> bool:
        """Whether another replica is known to decide."""
        return not self.serves and self.leader not in ("", self.name)

    @property
    def patience_s(self) -> float:
        """For how long another leader may be waited for."""
        return 1.0 + 1.2 * self._tenure.lease_s

    @property
    def refusal(self) -> NotLeadingError | None:
        """Why no request may wait here."""
        return None if self.serves else NotLeadingError(f"{self.standing}; retry")

    def check(self) -> None:
        """Raise NotLeadingError if what was decided may no longer be sent."""
        if not self.decides:
            raise NotLeadingError(f"{self.standing}; retry")

    async def change(self, longest_s: float) -> None:
        """Until another replica decides."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._change.wait(), longest_s)

    def release(self) -> None:
        """Decide no more, and let another replica do so; ``run`` sees to it."""
        self._tenure.end()
        self._ending.set()

    async def run(self) -> None:
        if (lock := self._lock) is None:
            return
        try:
            await self._follow(lock)
            while True:  # what still comes here is for the next leader
                with contextlib.suppress(OSError, EvenstepError):
                    async with asyncio.timeout(_LONGEST_S):
                        self._know(await lock.look())
                await asyncio.sleep(lock.period_s)
        finally:
            await lock.aclose()

    async def _follow(self, lock: Lock) -> None:
        try:
            while not self._ending.is_set():
                await self._attempt(lock)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), lock.period_s)
            # Else the next leader could not know of it.
            await _until(lambda: self._picture.all_shown)
        finally:
            self._stop()
            with contextlib.suppress(OSError, EvenstepError):
                async with asyncio.timeout(_LONGEST_S):
                    await lock.release(self.name)

    async def _attempt(self, lock: Lock) -> None:
        asked_s = self._clock()
        try:
            async with asyncio.timeout(0.3 * lock.lease_s):
                self._know(await lock.attempt(self.name))
        except (OSError, EvenstepError) as error:
            self.failures += 1
            level = logging.WARNING if self.serves else logging.DEBUG
            log.log(level, "the replicas' lock cannot be renewed: %s", error or "no answer")
            if not self.serves:
                self._know("")
        else:
            if self.leader != self.name or self._ending.is_set():
                self._tenure.end()
            elif not self._tenure.renew(asked_s, self._clock()):
                self._stop()
                log.info("this replica takes over: %s", shown(self.name))
                self._settling = asyncio.create_task(self._settle())
        if self._settling is not None and not self.serves:
            other = shown(self.leader) or "unknown"
            log.warning("this replica decides no more; leader: %s", other)
            self._stop()

    def _know(self, leader: str) -> None:
        if leader != self.leader:
            self.leader = leader
            self._change.set()
            self._change = asyncio.Event()

    async def _settle(self) -> None:
        """Decide once all workers have told what the last leader has sent."""
        await asyncio.sleep(_UNDER_WAY_S)
        since_s = time.monotonic()
        self._ask()
        await _until(lambda: self._picture.told_since(since_s))
        self._settled = True
        self.takeovers += 1
        log.info("this replica decides: %s", shown(self.name))
        self._picture.lead()

    def _stop(self) -> None:
        self._settled = False
        if self._settling is not None:
            self._settling.cancel()
            self._settling = None


def shown(leader: str) -> str:
    """Its name without its URL, which is no business of clients."""
    return leader.partition("@")[0]


async def _until(condition: Callable[[], bool]) -> None:
    """Wait for it, ``_LONGEST_S`` at most."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LONGEST_S):
            while not condition():  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(_LOOK_S)
