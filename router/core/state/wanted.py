"""How soon the requests at a group's workers want their tokens, together."""

from collections import Counter

from router.core.targets import Targets

# Part of the requests whose targets are too tight to count: no single client slows all others down.
_FEW = 0.1


class Wanted:
    """Targets of the requests that run; truthy while one wants a time of each token (TPOT)."""

    def __init__(self) -> None:
        self._requests: Counter[Targets] = Counter()

    def __bool__(self) -> bool:
        return any(targets.tpot_s is not None for targets in self._requests)

    def add(self, targets: Targets | None) -> None:
        if targets is not None:
            self._requests[targets] += 1

    def remove(self, targets: Targets | None) -> None:
        if targets is not None:
            self._requests -= Counter((targets,))

    def together(self, least_tpot_s: float) -> Targets:
        """The tightest targets but for a tenth of the requests that have one.

        TPOT targets of ``least_tpot_s`` and less do not count: no budget keeps them.
        """
        ttfts: Counter[float] = Counter()
        tpots: Counter[float] = Counter()
        for targets, requests in self._requests.items():
            if targets.ttft_s is not None:
                ttfts[targets.ttft_s] += requests
            if targets.tpot_s is not None and targets.tpot_s > least_tpot_s:
                tpots[targets.tpot_s] += requests
        return Targets(_tight(ttfts), _tight(tpots))


def _tight(wanted: Counter[float]) -> float | None:
    few = _FEW * wanted.total()
    for seconds in sorted(wanted):
        few -= wanted[seconds]
        if few < 0:
            return seconds
    return None
