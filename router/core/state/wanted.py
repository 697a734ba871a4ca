"""How soon the requests at a group's workers want their tokens."""

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from itertools import islice

from router.core.targets import Targets

# Part of the requests whose targets are too tight to count: no single client slows all others down.
_FEW = 0.1


class Wanted:
    """TPOT targets of the requests that run; truthy while there are any."""

    def __init__(self) -> None:
        self._requests: Counter[float] = Counter()  # by target, seconds
        self._order: list[float] = []  # the targets, the tightest first

    def __bool__(self) -> bool:
        return bool(self._requests)

    def add(self, targets: Targets | None) -> None:
        if targets is not None and (tpot_s := targets.tpot_s) is not None:
            if tpot_s not in self._requests:
                insort(self._order, tpot_s)
            self._requests[tpot_s] += 1

    def remove(self, targets: Targets | None) -> None:
        if targets is not None and (tpot_s := targets.tpot_s) is not None:
            self._requests[tpot_s] -= 1
            if not self._requests[tpot_s]:
                del self._requests[tpot_s], self._order[bisect_left(self._order, tpot_s)]

    def tpot_s(self, least_s: float) -> float | None:
        """The tightest target that counts; None: none does.

        Those of ``least_s`` and less do not, since no budget keeps them; of the others, the
        tightest of up to a tenth of the requests do not.
        """
        first = bisect_right(self._order, least_s)
        tighter = sum(map(self._requests.__getitem__, self._order[:first]))
        few = _FEW * (self._requests.total() - tighter)
        for seconds in islice(self._order, first, None):
            few -= self._requests[seconds]
            if few < 0:
                return seconds
        return None
