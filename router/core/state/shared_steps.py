"""Numbers the steps of a group as its ranks count them together, past restarts of some or of all.

vLLM counts, alike on all ranks of a group, how often all have been idle (the wave) and the steps
since. A rank that joins or comes back takes part in the count; it starts anew only with the whole
group. If all go on in place after a fault, the steps of a wave are counted anew.
"""

from typing import NamedTuple

from router.core.types import Snapshot

# A rank may be late by a wave.
_WAVES_KEPT = 2


class _Told(NamedTuple):
    """A rank's last count, at its own ``step``; ``life``: how often all have begun anew."""

    epoch: str
    step: int
    life: int
    at: tuple[int, int]
    number: int


class SharedSteps:
    """The numbers of one group's steps, which only grow."""

    def __init__(self) -> None:
        self._bases: dict[int, int] = {}  # number before the first step, by wave
        self._highest = 0
        self._life = 0
        self._told: dict[str, _Told] = {}

    def number(self, worker_id: str, snapshot: Snapshot, furthest: int) -> int:
        """Number of a snapshot's step; ``furthest``: the group's last step, otherwise counted."""
        at = snapshot.wave, snapshot.wave_step
        before = self._told.get(worker_id)
        if before is not None and before[:2] == (snapshot.epoch, snapshot.step):
            return before.number  # it rests, perhaps for many waves
        if before is not None and before.life == self._life and at <= before.at:
            self._life += 1
            self._bases.clear()
        if snapshot.wave not in self._bases:
            self._bases[snapshot.wave] = max(self._highest, furthest)
            if len(self._bases) > _WAVES_KEPT:
                del self._bases[min(self._bases, key=lambda wave: self._bases[wave])]
        number = self._bases[snapshot.wave] + snapshot.wave_step
        self._highest = max(self._highest, number)
        self._told[worker_id] = _Told(snapshot.epoch, snapshot.step, self._life, at, number)
        return number

    def forget(self, worker_id: str) -> None:
        """The worker is no longer the group's."""
        self._told.pop(worker_id, None)
