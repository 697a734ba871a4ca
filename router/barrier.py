"""Accounting at the barrier: imbalance, energy and tokens per step of a group.

Imbalance of a step is G max L - sum L over the live workers, idle ones as 0 (BF-IO,
arXiv 2601.17855, section 3). Ranks of a barrier report the same step number; a step is closed when
all live workers have reported it or one reports a later one. Ranks that do not step together are
sampled at the steps of the furthest busy one, each held at the load that its last step left.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from router.types import PoolState, Snapshot


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Running sums over the barrier steps of a group; averages are differences of two of them.

    Attributes:
        imbalance_tokens: sum of G max L - sum L.
        max_load_tokens: sum of max L.
        load_tokens: sum of sum L.
        worker_steps: sum of G.
        step_s: sum of step times, in the engine's seconds.
        energy_j: sum of power times step time, of workers that report power.
        output_tokens: sum of decoded tokens.
        free_slots: sum over workers of the slots in which nothing ran.
        entered: requests that had their first step.
    """

    steps: int = 0
    imbalance_tokens: int = 0
    max_load_tokens: int = 0
    load_tokens: int = 0
    worker_steps: int = 0
    step_s: float = 0.0
    energy_j: float = 0.0
    output_tokens: int = 0
    free_slots: int = 0
    entered: int = 0


@dataclass(slots=True)
class _Rank:
    """What a worker said last: its load in that step, and the load that it goes on with."""

    step: int = -1
    step_tokens: int = 0
    held_tokens: int = 0
    power_w: float = 0.0


class StepShares(msgspec.Struct, frozen=True, gc=False):
    """A worker's part in a step.

    Attributes:
        step_tokens: KV tokens resident in the step.
        held_tokens: those that are left after it.
        free_slots: slots in which nothing ran.
        entered: requests whose first step it was.
    """

    step_tokens: int
    held_tokens: int
    free_slots: int = 0
    entered: int = 0


class StepLedger:
    """Sums per pool state over the steps of one group."""

    def __init__(self) -> None:
        self.totals = {state: StepTotals() for state in PoolState}
        self._step = -1
        self._ranks: dict[str, _Rank] = {}
        self._reported: set[str] = set()
        self._step_s = 0.0
        self._output_tokens = 0
        self._free_slots = 0
        self._entered = 0

    def report(
        self, worker_id: str, shares: StepShares, snapshot: Snapshot, state: PoolState
    ) -> None:
        """A worker said how it is after a step.

        Args:
            worker_id: who.
            shares: its part in the step.
            snapshot: what it said of the step; the same step again is no further one.
            state: whether requests of the group wait now.
        """
        if snapshot.step > self._step:
            self._close(state)
            self._step = snapshot.step
            self._reported.add(worker_id)
        rank = self._ranks.get(worker_id)
        if rank is None:
            rank = self._ranks[worker_id] = _Rank()
        rank.held_tokens, rank.power_w = shares.held_tokens, snapshot.power_w or 0.0
        if rank.step == snapshot.step:
            self._step = self._step if self._reported else self._furthest()
            return
        rank.step, rank.step_tokens = snapshot.step, shares.step_tokens
        self._output_tokens += snapshot.scheduled_decode_tokens
        self._free_slots += shares.free_slots
        self._entered += shares.entered
        if self._reported:
            self._reported.add(worker_id)
            if snapshot.step == self._step:
                self._step_s = max(self._step_s, snapshot.step_s)

    def complete(self, live: Collection[str], state: PoolState) -> bool:
        """Close the step if all live workers have reported it; True if that has closed it."""
        if len(self._reported) < len(live) or not self._reported.issuperset(live):
            return False
        self._close(state)
        return True

    def leave(self, worker_id: str) -> None:
        """A worker is gone: its load no longer counts, and its next engine counts steps anew."""
        self._ranks.pop(worker_id, None)
        self._reported.discard(worker_id)
        self._step = self._furthest()

    def _furthest(self) -> int:
        """The latest step of workers that have something to run: an idle one stands still."""
        return max((rank.step for rank in self._ranks.values() if rank.held_tokens), default=-1)

    def _close(self, state: PoolState) -> None:
        if not self._reported:
            return
        loads = [
            rank.step_tokens if worker_id in self._reported else rank.held_tokens
            for worker_id, rank in self._ranks.items()
        ]
        peak, total, old = max(loads), sum(loads), self.totals[state]
        power_w = sum(rank.power_w for rank in self._ranks.values())
        self.totals[state] = StepTotals(
            steps=old.steps + 1,
            imbalance_tokens=old.imbalance_tokens + len(loads) * peak - total,
            max_load_tokens=old.max_load_tokens + peak,
            load_tokens=old.load_tokens + total,
            worker_steps=old.worker_steps + len(loads),
            step_s=old.step_s + self._step_s,
            energy_j=old.energy_j + power_w * self._step_s,
            output_tokens=old.output_tokens + self._output_tokens,
            free_slots=old.free_slots + self._free_slots,
            entered=old.entered + self._entered,
        )
        self._step = self._furthest()
        self._reported.clear()
        self._step_s = 0.0
        self._output_tokens = 0
        self._free_slots = 0
        self._entered = 0
