"""How soon the requests at a group's workers want their tokens."""

from collections import Counter

from router.core.targets import Targets

# Part of the requests whose targets are too tight to count: no single client slows all others down.
_FEW = 0.1


class Wanted:
    """TPOT targets of the requests that run; truthy while there are any."""

    def __init__(self) -> None:
        self._requests: Counter[float] = Counter()  # by target, seconds

    def __bool__(self) -> bool:
        return bool(self._requests)

    def add(self, targets: Targets | None) -> None:
        if targets is not None and targets.tpot_s is not None:
            self._requests[targets.tpot_s] += 1

    def remove(self, targets: Targets | None) -> None:
        if targets is not None and targets.tpot_s is not None:
            self._requests[targets.tpot_s] -= 1
            if not self._requests[targets.tpot_s]:
                del self._requests[targets.tpot_s]

    def tpot_s(self, least_s: float) -> float | None:
        """The tightest target that counts; None: none does.

        Those of ``least_s`` and less do not, since no budget keeps them; of the others, the
        tightest of up to a tenth of the requests do not.
        """
        counted = {seconds: n for seconds, n in self._requests.items() if seconds > least_s}
        few = _FEW * sum(counted.values())
        for seconds in sorted(counted):
            few -= counted[seconds]
            if few < 0:
                return seconds
        return None
