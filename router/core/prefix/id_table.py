"""Rows of ids: a hash table in arrays that grows by a few buckets at a time (linear hashing).

An id is a hash already, so its low bits name its bucket. A bucket has eight places, a cache line of
ids. Ids that find no place are in a dict, a few per cent at most. To grow, buckets are split in
two, in order: each id stays or moves to the same place of the new bucket. So nothing waits for a
whole table to be filled anew, and a removed id leaves no trace.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.uint64]
Rows = NDArray[np.intp]

NO_ID = 0
"""Marks an empty place; no id of a block is 0, except once in 2^64."""

_PLACES = 8
_FILL = 4  # ids for each bucket, on average: half of the places
_FIRST_BUCKETS = 64


class IdTable:
    """The row of each id.

    Args:
        most_ids: ids that it must hold. Memory is taken as it fills.
    """

    def __init__(self, most_ids: int) -> None:
        self._most_buckets = max(_FIRST_BUCKETS, most_ids // _FILL + 1)
        self._keys = np.zeros((self._most_buckets, _PLACES), np.uint64)
        self._rows = np.zeros((self._most_buckets, _PLACES), np.int32)
        self._places = self._keys.reshape(-1)
        self._rows_at = self._rows.reshape(-1)
        self._buckets = self._half = _FIRST_BUCKETS  # half: a power of two, at most the buckets
        self._crowded: OrderedDict[int, int] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def memory_bytes(self) -> int:
        """An entry of a dict with its numbers takes some 170 bytes."""
        return self._buckets * _PLACES * (8 + 4) + 170 * len(self._crowded)

    def find(self, ids: Ids) -> Rows:
        """Rows of ids, which may repeat; 0: unknown."""
        rows = np.zeros(ids.size, np.intp)
        which, places = self._found(ids)
        rows[which] = self._rows_at[places]
        if self._crowded and which.size < ids.size:
            missed = np.flatnonzero(rows == 0)
            rows[missed] = [self._crowded.get(one, 0) for one in ids[missed].tolist()]
        return rows

    def add(self, ids: Ids, rows: Rows) -> None:
        """Add ids that are distinct and unknown, with rows above 0."""
        self._count += ids.size
        self._grow(self._count)
        self._place(ids, rows)

    def _place(self, ids: Ids, rows: Rows) -> None:
        while ids.size:
            buckets = self._bucket(ids)
            free = self._keys[buckets] == NO_ID
            place = free.argmax(axis=1)
            room = free[np.arange(ids.size), place]
            if not room.all():
                self._crowded.update(zip(ids[~room].tolist(), rows[~room].tolist(), strict=True))
                ids, rows = ids[room], rows[room]
            places = (buckets * _PLACES + place)[room]
            self._places[places] = ids
            won = self._places[places] == ids  # several may have asked for one place
            self._rows_at[places[won]] = rows[won]
            ids, rows = ids[~won], rows[~won]

    def remove(self, ids: Ids) -> None:
        """Remove ids that are distinct and known."""
        self._count -= ids.size
        which, places = self._found(ids)
        self._places[places] = NO_ID
        if which.size < ids.size:
            for one in np.delete(ids, which).tolist():
                del self._crowded[one]

    def _bucket(self, ids: Ids) -> Rows:
        buckets = (ids & np.uint64(2 * self._half - 1)).astype(np.intp)
        buckets[buckets >= self._buckets] -= self._half
        return buckets

    def _found(self, ids: Ids) -> tuple[Rows, Rows]:
        """Indices of ids that have a place, and their places."""
        buckets = self._bucket(ids)
        hits = np.flatnonzero(self._keys[buckets] == ids[:, None])
        which = hits // _PLACES
        return which, buckets[which] * _PLACES + hits % _PLACES

    def _grow(self, ids: int) -> None:
        """Split buckets until there are enough for so many ids, and find places in them."""
        before = self._buckets
        wanted = min(ids // _FILL + 1, self._most_buckets)
        while self._buckets < wanted:
            start, end = self._buckets, min(wanted, 2 * self._half)
            old = slice(start - self._half, end - self._half)
            moves = self._keys[old] & np.uint64(self._half) != 0
            self._keys[start:end] = np.where(moves, self._keys[old], np.uint64(NO_ID))
            self._keys[old][moves] = NO_ID
            self._rows[start:end] = self._rows[old]
            self._buckets = end
            if end == 2 * self._half:
                self._half = end
        # The longest crowded ones first: their buckets have been split since, most likely.
        again = min(self._buckets - before, len(self._crowded))
        crowded = [self._crowded.popitem(last=False) for _ in range(again)]
        self._place(
            np.array([one for one, _ in crowded], np.uint64),
            np.array([row for _, row in crowded], np.intp),
        )
