"""What a proxy counts by itself, and tells now and then."""

from __future__ import annotations

from collections import Counter, defaultdict

from router.access.keys import Key
from router.http.counts import HttpCounts
from router.processes.messages import GroupTally, Tally
from router.stats import TokenStats


class Tallies:
    """Counts that are told as what has come since the last time.

    Args:
        http: of the clients' port.

    Attributes:
        tokens: of streams, by group.
        unreturned: failures that were passed on since the budget was spent, by group.
        unauthorized: requests without a key that counts.
        broken: connections to the deciding process that an error has ended.
    """

    def __init__(self, http: HttpCounts) -> None:
        self._http = http
        self._told_connections = 0
        self._told_refused: Counter[int] = Counter()
        self.tokens: defaultdict[str, TokenStats] = defaultdict(TokenStats)
        self.unreturned: Counter[str] = Counter()
        self.unauthorized = self.broken = 0

    def enter(self, key: Key, now_s: float) -> None:
        """A request of a key: it is counted by the deciding process, which is told its name."""

    def leave(self, key: Key) -> None:
        """The same at its end."""

    def anew(self) -> None:
        """Who is told is another one, who knows of no connections yet."""
        self._told_connections = 0

    def take(self) -> Tally | None:
        """What is to be told now, None if nothing is."""
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
