"""An engine's running requests as its messages list them.

Each has a place, a number by which a ``growth`` message tells its tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import repeat

from router.core.types import FREE_PLACE

Row = tuple[str, int, int, int, int, float | None]
"""The fields of ``RunningRequest``, in its order: one is made per running request and step."""

PlacedRow = tuple[str, int, int, int, int, float | None, int]
"""The same with its place."""

# Requests that gained no token and are listed.
_FEW = 8


class Places:
    """Each running request has the lowest place that was free when it began.

    A place that a request leaves is free from the next ``settle`` on: a message may list both the
    one that leaves and others that begin.
    """

    def __init__(self) -> None:
        self._of: dict[str, int] = {}
        self._ids: list[str] = []
        self._free: list[int] = []
        self._left: list[int] = []

    def __getitem__(self, id_: str) -> int:
        return self._of[id_]

    def settle(self) -> None:
        """Begin a message."""
        for place in self._left:
            self._ids[place] = ""
            heappush(self._free, place)
        self._left.clear()

    def take(self, id_: str) -> int:
        """The request's place; it keeps one that it has."""
        place = self._of.get(id_)
        if place is None:
            if self._free:
                place = heappop(self._free)
                self._ids[place] = id_
            else:
                place = len(self._ids)
                self._ids.append(id_)
            self._of[id_] = place
        return place

    def leave(self, id_: str) -> None:
        """Give a place back; without one, no effect."""
        place = self._of.pop(id_, None)
        if place is not None:
            self._left.append(place)

    def growths(self, gained: Mapping[str, int], listed: set[str]) -> bytes:
        """What a message tells of all that have places, before any is taken or left.

        It is needed where a request gained several tokens, or many gained none. A few that gained
        none are listed instead, since older routers read no growths. Empty if all that are not
        listed gained one.

        Args:
            gained: tokens by request; others gained none.
            listed: requests that the message lists; those that it must list, too, are added.
        """
        try:
            told = bytearray(map(gained.get, self._ids, repeat(0)))
            fits = FREE_PLACE not in told
        except ValueError:
            fits = False
        if not fits:
            odd = {id_ for id_, tokens in gained.items() if not 0 <= tokens < FREE_PLACE}
            listed |= self._of.keys() & odd
            told = bytearray(0 if i in odd else gained.get(i, 0) for i in self._ids)
        for id_ in listed:
            if id_ in self._of:
                told[self._of[id_]] = 1
        for place in self._free:
            told[place] = FREE_PLACE
        none = told.count(0)
        if none <= _FEW and none + told.count(1) == len(self._of):
            if none:
                listed.update(id_ for id_, place in self._of.items() if not told[place])
            return b""
        return bytes(told)


class ReportedRows:
    """The rows of the last report, and what a message says of the next one."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = {row[0]: row for row in rows}
        self._places = Places()
        for id_ in self._rows:
            self._places.take(id_)

    @property
    def idle(self) -> bool:
        return not self._rows

    def placed(self) -> list[PlacedRow]:
        return [(*row, self._places.take(id_)) for id_, row in self._rows.items()]

    def change(
        self, rows: Iterable[Row], finished: Sequence[str], preempted: Sequence[str]
    ) -> tuple[list[PlacedRow], tuple[str, ...], bytes]:
        """Take in a report; the arguments are those of ``StepReport``.

        Returns the rows to list, ids that ended (reported, or no longer running), and the growths.
        """
        before, now = self._rows, {row[0]: row for row in rows}
        self._rows = {id_: row for id_, row in now.items() if id_ not in finished}
        gone = {*finished, *preempted}
        ended = (*finished, *(i for i in before if i not in self._rows and i not in gone))
        self._places.settle()
        gained = dict.fromkeys(before.keys() - now.keys(), 1)
        listed = set()
        for id_, row in now.items():
            old = before.get(id_)
            if old is not None and row[3:] == old[3:] and row[1] == old[1]:
                gained[id_] = row[2] - old[2]
            else:
                listed.add(id_)
        growths = self._places.growths(gained, listed)
        placed = [(*row, self._places.take(id_)) for id_, row in now.items() if id_ in listed]
        for id_ in (*ended, *preempted):
            self._places.leave(id_)
        return placed, ended, growths
