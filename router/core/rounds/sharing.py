"""Groups that serve the same requests: which of those that wait each may choose from.

Requests are allotted to groups (``barriers``), unless more wait than there are free slots, or very
many: then each group chooses from all in its own rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence, Set
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from router.core.queue.pool import Pool
from router.core.rounds.barriers import Allot, Barrier, allot
from router.core.types import Request

if TYPE_CHECKING:
    from router.core.rounds.decider import RoundDecider, Workers

T = TypeVar("T")

# So many waiting requests are allotted at most.
MOST_ALLOTTED = 128


class Kept(Generic[T]):
    """Something that is made anew only after a change."""

    def __init__(self) -> None:
        self._made: tuple[Hashable, T] | None = None

    def of(self, seen: Hashable, make: Callable[[], T]) -> T:
        """``seen``: what it follows from; None: that changes without notice."""
        if self._made is None or seen is None or self._made[0] != seen:
            self._made = seen, make()
        return self._made[1]


class Sharing:
    """Groups that serve the same requests, and have one pool.

    What is allotted holds until a group needs another share; what comes meanwhile is allotted
    beside it. So the work of a round does not grow with the square of the groups.
    """

    def __init__(self, deciders: Sequence[RoundDecider[Any]], allot: Allot = allot) -> None:
        self.deciders = deciders
        self._allot = allot
        self.forget()

    def forget(self) -> None:
        """Allot anew: groups have come, gone or changed their health."""
        self._shares: dict[str, set[str]] = {}  # ids of waiting requests, by group
        self._barriers: dict[str, Barrier] = {}  # with these requests
        self._newest = 0  # of the pool, at the last allotment
        self._came: list[Request] = []  # since then
        self._used: dict[str, int | None] = {}  # versions of groups, at their last rounds
        self._had_many: set[str] = set()  # groups that chose from more than ``MOST_ALLOTTED`` then

    def came(self, request: Request) -> None:
        """A request has entered the pool."""
        if len(self.deciders) > 1:
            self._came.append(request)

    def crowded(self, pool: Pool) -> bool:
        return len(pool) > sum([each.capacity for each in self.deciders])

    def choosers(self, pool: Pool) -> Set[str]:
        """Names of the groups whose rounds may assign something."""
        groups = [each.group for each in self.deciders if each.capacity]
        able = {each.name for each in groups}
        if self._from_all(pool, crowded=self.crowded(pool)):
            return able - {each.name for each in groups if self.looked_through(each, pool)}
        self._follow(pool)
        reached = set[str]().union(*(self._shares[name] for name in able))
        if any(request.id not in reached for request in pool):
            # Its group has filled, one has room again, or others left before they were sent.
            self.forget()
            self._follow(pool)
        return {name for name in able if any(each in pool for each in self._shares[name])}

    def looked_through(self, group: Workers, pool: Pool) -> bool:
        """Nothing has changed since its round, and so many waited that one more is no matter."""
        known = self._used.get(group.name)
        many = len(pool) > MOST_ALLOTTED and group.name in self._had_many
        return many and known is not None and known == group.version

    def take(self, group: Workers, pool: Pool, *, crowded: bool) -> Set[str] | None:
        """Ids of the waiting requests that its round chooses from; None: it does so from all."""
        name = group.name
        self._had_many.discard(name)
        if self._from_all(pool, crowded=crowded):
            self._shares = {}
            self._came.clear()
            self.settle(group)
            if len(pool) > MOST_ALLOTTED:
                self._had_many.add(name)
            return None
        if name in self._used and (self._used[name] is None or self._used[name] != group.version):
            self.forget()
        self._follow(pool)
        share = self._shares[name] = {each for each in self._shares[name] if each in pool}
        self.settle(group)
        return share

    def settle(self, group: Workers) -> None:
        """What it was sent of its share is no reason for another one."""
        self._used[group.name] = group.version

    def _from_all(self, pool: Pool, *, crowded: bool) -> bool:
        return crowded or len(self.deciders) == 1 or len(pool) > MOST_ALLOTTED

    def _follow(self, pool: Pool) -> None:
        came, known = self._came, self._newest + len(self._came)
        if not self._shares or known != pool.newest:
            self.forget()
            self._barriers = {each.group.name: each.barrier for each in self.deciders}
            self._shares = {name: set() for name in self._barriers}
            came = list(pool)
        for name, ids in self._allot(came, self._barriers).items() if came else ():
            self._shares[name] |= ids
        self._came, self._newest = [], pool.newest
