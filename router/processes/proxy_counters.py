from collections import Counter, defaultdict

from router.access.key_ring import Key
from router.core.stats import TokenStats
from router.core.targets import Verdict
from router.http.refusal import HttpCounts
from router.processes.messages import GroupTally, Tally


class Tallies:
    """Counters, reported as differences since the last report.

    ``unreturned``: failures for which no retry was left, by group. ``broken``: connections to the
    deciding process that an error ended.
    """

    def __init__(self, http: HttpCounts) -> None:
        self._http = http
        self._told_connections = 0
        self._told_refused: Counter[int] = Counter()
        self.tokens: defaultdict[str, TokenStats] = defaultdict(TokenStats)
        self.unreturned: Counter[str] = Counter()
        self.verdicts: defaultdict[str, Counter[Verdict]] = defaultdict(Counter)
        self.unauthorized = self.broken = 0

    def enter(self, key: Key, now_s: float) -> None:
        """Do nothing: the deciding process counts."""

    def leave(self, key: Key) -> None:
        """Do nothing, too."""

    def anew(self) -> None:
        """A new deciding process knows no connections."""
        self._told_connections = 0

    def take(self) -> Tally | None:
        groups: dict[str, GroupTally] = {}
        verdicts = {name: dict(counts) for name, counts in self.verdicts.items()}
        self.verdicts.clear()
        for name in self.tokens.keys() | self.unreturned.keys() | verdicts.keys():
            stats, unreturned = self.tokens[name], self.unreturned.pop(name, 0)
            (itl, itl_s), (tpot, tpot_s) = stats.itl_s.take(), stats.tpot_s.take()
            judged = verdicts.get(name, {})
            if unreturned or judged or any(itl) or any(tpot):
                groups[name] = GroupTally(itl, itl_s, tpot, tpot_s, unreturned, judged)
        refused = Counter(self._http.refused) - self._told_refused
        connections = self._http.connections
        unauthorized, broken = self.unauthorized, self.broken
        news = groups or refused or unauthorized or broken
        if not news and connections == self._told_connections:
            return None
        self._told_connections, self.unauthorized, self.broken = connections, 0, 0
        self._told_refused += refused
        return Tally(groups, connections, dict(refused), unauthorized, broken)
