"""Logs which groups are in lockstep, and what speaks against it."""

import logging

from router.core.state.group import Group
from router.core.state.lockstep import doubt, source

log = logging.getLogger(__name__)


class LockstepLog:
    """Logs each change, and each doubt once."""

    def __init__(self) -> None:
        self._known: dict[str, bool] = {}
        self._doubts: set[tuple[str, str]] = set()

    def look(self, group: Group) -> None:
        known, now = self._known.get(group.name, False), group.lockstep
        if known != now:
            self._known[group.name] = now
            what = "in lockstep: all its workers are up or none" if now else "no longer in lockstep"
            log.info("group %s: %s (by %s)", group.name, what, source(group))
        doubted = group.name, doubt(group)
        if doubted[1] and doubted not in self._doubts:
            self._doubts.add(doubted)
            log.warning("group %s: %s", *doubted)
