"""New settings for a router that runs: read again, or some by hand; all of them or none."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Protocol

from router import systemd
from router.errors import ConfigError, EvenstepError
from router.logs import start_logging
from router.settings.serve import ServeSettings
from router.settings.sources import changed

log = logging.getLogger(__name__)

Take = Callable[[ServeSettings], None]


@dataclass(frozen=True, slots=True)
class Part:
    """What takes settings while it runs.

    Attributes:
        settings: their names.
        take: called with all settings, once no part has refused them.
        check: called with them before, and reads what it needs of files; raises an
            ``EvenstepError`` if they cannot be taken.
    """

    settings: frozenset[str]
    take: Take
    check: Take = lambda _: None


class Followers(Protocol):
    """Other processes that go by what this one has taken."""

    async def agree(self, settings: ServeSettings) -> None:
        """Ask all of them whether they could take this.

        Raises:
            EvenstepError: one could not, and why.
        """
        ...

    async def follow(self) -> list[str]:
        """Wait until all go by what was taken; those that do not, and have been waited for."""
        ...


class Reload:
    """Reads the settings again and hands them to the parts; called at SIGHUP.

    What is different from what was read last is taken, and what was changed by hand besides stays.

    Args:
        settings: as they were read at the start.
        read: reads them anew; raises ConfigError.
        parts: in the order in which they take them.
        prepare: called with new settings, off the event loop, for what takes long.

    Attributes:
        settings: those in force.
        followers: see ``Followers``; None: this is the only process.
    """

    def __init__(
        self,
        settings: ServeSettings,
        read: Callable[[], ServeSettings],
        parts: Iterable[Part],
        prepare: Callable[[ServeSettings], object] = lambda _: None,
    ) -> None:
        self.settings = settings
        self._begun_with = self._last_read = settings
        self._read = read
        self._prepare = prepare
        self._one = asyncio.Lock()
        self.followers: Followers | None = None
        self._parts = (*parts, Part(frozenset({"log_level", "log_format"}), _log_anew))

    async def __call__(self) -> None:
        """Once; what is wrong is logged, and the old settings stay, in all processes."""
        async with self._one:
            systemd.notify("RELOADING=1")
            try:
                await self._apply(self._read())
            except EvenstepError as error:
                log.error("the settings stay as they are: %s", error)  # noqa: TRY400 - says it all
            except Exception:
                log.exception("reading the settings again failed; they stay as they are")
            systemd.notify("READY=1")

    @property
    def names(self) -> Set[str]:
        """Settings that can be changed without a new start."""
        return {name for part in self._parts for name in part.settings}

    async def change(self, values: Mapping[str, object]) -> None:
        """Have some settings be others until they are changed again, where they are read too.

        Raises:
            EvenstepError: one is wrong, or cannot be changed now; nothing is.
        """
        async with self._one:
            settings = changed(self.settings, values)
            for name in values:
                if name not in self.names:
                    able = ", ".join(sorted(self.names))
                    raise ConfigError(f"{name} takes another start to change; these do not: {able}")
            await self._take(settings)
            await self._follow(f"settings changed: {', '.join(sorted(values))}")

    async def _take(self, settings: ServeSettings) -> None:
        await asyncio.to_thread(self._prepare, settings)
        for part in self._parts:
            part.check(settings)
        if self.followers is not None:
            await self.followers.agree(settings)
            for part in self._parts:  # workers may have come or gone meanwhile
                part.check(settings)
        for part in self._parts:
            part.take(settings)
        self.settings = settings

    async def _follow(self, done: str) -> None:
        """Log what is done when all processes go by it, or which ones do not."""
        late = [] if self.followers is None else await self.followers.follow()
        if late:
            log.error("%s; not yet in %s: no answer from there", done, ", ".join(late))
        else:
            log.info("%s", done)

    async def _apply(self, new: ServeSettings) -> None:
        old = self._last_read
        values = {i: getattr(new, i) for i in type(new).model_fields}
        news = {name: value for name, value in values.items() if getattr(old, name) != value}
        await self._take(changed(self.settings, news))
        self._last_read = new
        taken = news.keys() & self.names
        await self._follow(f"settings read again; changed: {', '.join(sorted(taken)) or 'none'}")
        rest = {i for i in news.keys() - taken if news[i] != getattr(self._begun_with, i)}
        if rest:
            log.warning("these take effect at the next start: %s", ", ".join(sorted(rest)))


def _log_anew(settings: ServeSettings) -> None:
    start_logging(settings.log_level, settings.log_format)
