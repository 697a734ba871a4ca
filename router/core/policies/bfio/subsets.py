"""Subsets of a pool by their sum: single candidates by bisection, subsets by bitsets."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

from router.core.forecast.forecast import Bools

MAX_BITS = 1 << 15


class Shelf:
    """Remaining candidates by size, the older first among equals.

    A candidate is an index of the sizes, which are oldest first.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._size_of = sizes
        self._left = sorted(range(len(sizes)), key=sizes.__getitem__)
        self._sizes = [sizes[candidate] for candidate in self._left]
        self._column = np.array(sizes, dtype=np.int64)
        self._taken = np.zeros(len(sizes), dtype=np.bool_)

    def __len__(self) -> int:
        return len(self._left)

    def total(self, candidates: Sequence[int]) -> int:
        return sum(self._size_of[candidate] for candidate in candidates)

    def take(self, candidates: Sequence[int]) -> None:
        for candidate in candidates:
            at = bisect_left(self._sizes, self._size_of[candidate])
            while self._left[at] != candidate:
                at += 1
            del self._left[at], self._sizes[at]
            self._taken[candidate] = True

    def nearest(self, limit: float) -> list[int]:
        """The oldest of the largest candidates up to the limit, and of the smallest above it."""
        at = bisect_right(self._sizes, limit)
        found = self._left[at : at + 1]
        if at > 0:
            found.insert(0, self._left[bisect_left(self._sizes, self._sizes[at - 1])])
        return found

    def nearest_of(self, fits: Bools, limit: float) -> list[int]:
        """The same of those that fit. Equal sizes may not fit alike."""
        among = np.flatnonzero(fits & ~self._taken)
        sizes = self._column[among]
        below = sizes <= limit
        ends = ((among[below], sizes[below].argmax), (among[~below], sizes[~below].argmin))
        return [int(some[oldest()]) for some, oldest in ends if some.size]

    def subset(self, count: int, limit: float) -> list[int]:
        """The subset of ``count`` with the largest sum up to the limit, else the smallest above it.

        Long sums are compared in units of 1 / ``MAX_BITS`` of the range.
        """
        if count == 1:
            return self.nearest(limit)[:1]
        if sum(self._sizes[-count:]) <= limit:
            return self._left[-count:]
        if sum(self._sizes[:count]) > limit:
            return self._left[:count]
        oldest_first = sorted(self._left)
        # Subsets differ by one exchange at a time, so a sum lies within one size of the limit.
        unit = 1 + int(limit + self._sizes[-1]) // MAX_BITS
        scaled = [self._size_of[candidate] // unit for candidate in oldest_first]
        return [oldest_first[at] for at in _subset_sum(scaled, count, int(limit // unit))]


def _subset_sum(sizes: Sequence[int], count: int, limit: int) -> list[int]:
    """Positions of ``count`` sizes with the largest sum up to the limit.

    The least sum must not exceed the limit. Bit s of ``reach[j]`` means that j of the sizes so far
    have the sum s. The search ends once the limit is reached.
    """
    mask = (1 << (limit + 1)) - 1
    reach = [1] + [0] * count
    history = []
    for size in sizes:
        history.append(reach)
        grown = [(fewer << size) & mask for fewer in reach[:-1]]
        reach = [1, *(old | new for old, new in zip(reach[1:], grown, strict=True))]
        if reach[count] >> limit:
            break
    return _trace_back(sizes, history, count, reach[count].bit_length() - 1)


def _trace_back(
    sizes: Sequence[int], history: Sequence[Sequence[int]], count: int, total: int
) -> list[int]:
    """Positions of sizes that make up a sum; the earlier ones where there is a choice."""
    positions: list[int] = []
    for at in reversed(range(len(history))):
        if not history[at][count] >> total & 1:
            positions.append(at)
            total -= sizes[at]
            count -= 1
    return positions[::-1]
