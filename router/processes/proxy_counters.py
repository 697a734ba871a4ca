"""A proxy's counters, reported to the deciding process at intervals."""

from __future__ import annotations

from collections import Counter, defaultdict

from router.access.key_ring import Key
from router.core.stats import TokenStats
from router.http.refusal import HttpCounts
from router.processes.messages import GroupTally, Tally


class Tallies:
    """Counters that are reported as differences since the last report.

    Attributes:
        tokens: token times of streams, by group.
        unreturned: failures passed on because the retry budget was spent, by group.
        broken: connections to the deciding process that an error ended.
    """

    def __init__(self, http: HttpCounts) -> None:
        self._http = http
        self._told_connections = 0
        self._told_refused: Counter[int] = Counter()
        self.tokens: defaultdict[str, TokenStats] = defaultdict(TokenStats)
        self.unreturned: Counter[str] = Counter()
        self.unauthorized = self.broken = 0

    def enter(self, key: Key, now_s: float) -> None:
        """Do nothing: the deciding process counts the keys' requests."""

    def leave(self, key: Key) -> None:
        """Do nothing; see ``enter``."""

    def anew(self) -> None:
        """Reset after a reconnect: the new deciding process starts from zero connections."""
        self._told_connections = 0

    def take(self) -> Tally | None:
        """Return the next report; None if there is nothing to report."""
        names = self.tokens.keys() | self.unreturned.keys()
        groups = {name: tally for name in names if (tally := self._group(name)) is not None}
        refused = Counter(self._http.refused) - self._told_refused
        connections, unauthorized, broken = (
            self._http.connections,
            self.unauthorized,
            self.broken,
        )
        news = groups or refused or unauthorized or broken
        if not news and connections == self._told_connections:
            return None
        self._told_connections, self.unauthorized, self.broken = connections, 0, 0
        self._told_refused += refused
        return Tally(groups, connections, dict(refused), unauthorized, broken)

    def _group(self, name: str) -> GroupTally | None:
        stats, unreturned = self.tokens[name], self.unreturned.pop(name, 0)
        (itl, itl_s), (tpot, tpot_s) = stats.itl_s.take(), stats.tpot_s.take()
        news = unreturned or any(itl) or any(tpot)
        return GroupTally(itl, itl_s, tpot, tpot_s, unreturned) if news else None
