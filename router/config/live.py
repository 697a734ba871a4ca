"""Changes of settings at run time, by reload or by hand: all of them or none."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass

from router import systemd
from router.config.serve_settings import SETTINGS, ServeSettings
from router.config.setting import marks_of
from router.config.setting_sources import changed
from router.core.errors import ConfigError, EvenstepError
from router.logs import start_logging

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the router that accepts settings at run time."""

    # Called with all settings once every part has accepted them.
    take: Callable[[ServeSettings], None]
    # Called first, and reads the files that it needs; an ``EvenstepError`` rejects.
    check: Callable[[ServeSettings], object] = lambda _: None
    # Settings marked ``IF_GIVEN`` that were given at the start, for this part.
    given: frozenset[str] = frozenset()


_ALWAYS_LIVE = frozenset(n for n, field in SETTINGS.items() if marks_of(field)["live"] is True)


class Reload:
    """Reads the settings again and applies them to the parts; called at SIGHUP.

    Only settings that differ from the last read are applied; other changes by hand stay.
    ``prepare`` is called with new settings off the event loop, for slow preparation.
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
        self._parts = (
            *parts,
            Part(lambda settings: start_logging(settings.log_level, settings.log_format)),
        )
        # Settings that can change at run time.
        self.names: Set[str] = _ALWAYS_LIVE.union(*(part.given for part in self._parts))

    async def __call__(self) -> None:
        """Reload once; an error is logged, and the old settings stay."""
        async with self._one:
            systemd.notify("RELOADING=1")
            try:
                await self._apply(self._read())
            except EvenstepError as error:
                log.error("the settings stay as they are: %s", error)  # noqa: TRY400 - says it all
            except Exception:
                log.exception("reading the settings again failed; they stay as they are")
            systemd.notify("READY=1")

    async def change(self, values: Mapping[str, object]) -> None:
        """Until they change again, here or at their source; an EvenstepError changes nothing."""
        async with self._one:
            settings = changed(self.settings, values)
            for name in values:
                if name not in self.names:
                    able = ", ".join(sorted(self.names))
                    raise ConfigError(f"{name} takes another start to change; these do not: {able}")
            await self._take(settings)
            log.info("settings changed: %s", ", ".join(sorted(values)))

    async def _take(self, settings: ServeSettings) -> None:
        await asyncio.to_thread(self._prepare, settings)
        for part in self._parts:
            part.check(settings)
        for part in self._parts:
            part.take(settings)
        self.settings = settings

    async def _apply(self, new: ServeSettings) -> None:
        old = self._last_read
        news = {i: getattr(new, i) for i in SETTINGS if getattr(new, i) != getattr(old, i)}
        await self._take(changed(self.settings, news))
        self._last_read = new
        taken = news.keys() & self.names
        log.info("settings read again; changed: %s", ", ".join(sorted(taken)) or "none")
        rest = {i for i in news.keys() - taken if news[i] != getattr(self._begun_with, i)}
        if rest:
            log.warning("these take effect at the next start: %s", ", ".join(sorted(rest)))
