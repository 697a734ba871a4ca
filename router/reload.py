"""New settings for a router that runs: read again, or some by hand; all of them or none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass

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
        check: called with them before; raises an ``EvenstepError`` if they cannot be taken.
    """

    settings: frozenset[str]
    take: Take
    check: Take = lambda _: None


class Reload:
    """Reads the settings again and hands them to the parts; called at SIGHUP.

    What is different from what was read last is taken, and what was changed by hand besides stays.

    Args:
        settings: as they were read at the start.
        read: reads them anew; raises ConfigError.
        parts: in the order in which they take them.

    Attributes:
        settings: those in force.
    """

    def __init__(
        self, settings: ServeSettings, read: Callable[[], ServeSettings], parts: Iterable[Part]
    ) -> None:
        self.settings = settings
        self._begun_with = self._last_read = settings
        self._read = read
        self._parts = (*parts, Part(frozenset({"log_level", "log_format"}), _log_anew))

    def __call__(self) -> None:
        """Once; what is wrong is logged, and the old settings stay."""
        systemd.notify("RELOADING=1")
        try:
            self._apply(self._read())
        except EvenstepError as error:
            log.error("the settings stay as they are: %s", error)  # noqa: TRY400 - says it all
        except Exception:
            log.exception("reading the settings again failed; they stay as they are")
        systemd.notify("READY=1")

    @property
    def names(self) -> Set[str]:
        """Settings that can be changed without a new start."""
        return {name for part in self._parts for name in part.settings}

    def change(self, values: Mapping[str, object]) -> None:
        """Have some settings be others until they are changed again, where they are read too.

        Raises:
            EvenstepError: one is wrong, or cannot be changed now; nothing is.
        """
        for name in values:
            if name not in self.names:
                able = ", ".join(sorted(self.names))
                raise ConfigError(f"{name} takes another start to change; these do not: {able}")
        self._take(changed(self.settings, values))
        log.info("settings changed: %s", ", ".join(sorted(values)))

    def _take(self, settings: ServeSettings) -> None:
        for part in self._parts:
            part.check(settings)
        for part in self._parts:
            part.take(settings)
        self.settings = settings

    def _apply(self, new: ServeSettings) -> None:
        old = self._last_read
        values = {i: getattr(new, i) for i in type(new).model_fields}
        news = {name: value for name, value in values.items() if getattr(old, name) != value}
        self._take(changed(self.settings, news))
        self._last_read = new
        taken = news.keys() & self.names
        log.info("settings read again; changed: %s", ", ".join(sorted(taken)) or "none")
        rest = {i for i in news.keys() - taken if news[i] != getattr(self._begun_with, i)}
        if rest:
            log.warning("these take effect at the next start: %s", ", ".join(sorted(rest)))


def _log_anew(settings: ServeSettings) -> None:
    start_logging(settings.log_level, settings.log_format)
