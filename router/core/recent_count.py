from __future__ import annotations

_SLICES = 10


class Recent:
    """Count over a sliding window, which moves by a tenth of its length.

    An event counts for nine to ten tenths of the window. Times are in seconds, of a monotonic
    clock.

    Args:
        window_s: length of the window.
    """

    def __init__(self, window_s: float) -> None:
        self._slice_s = window_s / _SLICES
        self._counts = [0] * _SLICES
        self._newest = 0

    def add(self, now_s: float) -> None:
        self._forget(now_s)
        self._counts[self._newest % _SLICES] += 1

    def count(self, now_s: float) -> int:
        self._forget(now_s)
        return sum(self._counts)

    def clear(self) -> None:
        self._counts = [0] * _SLICES

    def _forget(self, now_s: float) -> None:
        newest = int(now_s / self._slice_s)
        if newest <= self._newest:
            return
        for number in range(max(self._newest, newest - _SLICES) + 1, newest + 1):
            self._counts[number % _SLICES] = 0
        self._newest = newest
