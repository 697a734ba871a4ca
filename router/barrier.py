"""Accounting at the barrier: imbalance, energy and tokens per step of a group.

Imbalance of a step is G max L - sum L over the live workers, idle ones as 0 (BF-IO,
arXiv 2601.17855, section 3). Ranks of a barrier report the same step number; a step is closed when
all live workers have reported it or one reports a later one. Ranks that do not step together are
sampled at the steps of the furthest one, each held at its last load.
"""

from __future__ import annotations

from collections.abc import Collection

from router.types import PoolState, Snapshot, StepTotals


class StepLedger:
    """Sums per pool state over the steps of one group."""

    def __init__(self) -> None:
        self.totals = {state: StepTotals() for state in PoolState}
        self._step = -1
        self._loads: dict[str, int] = {}
        self._power_w: dict[str, float] = {}
        self._reported: set[str] = set()
        self._step_s = 0.0
        self._output_tokens = 0

    def report(
        self, worker_id: str, load_tokens: int, snapshot: Snapshot, state: PoolState
    ) -> None:
        """A worker ended a step with this load.

        Args:
            worker_id: who.
            load_tokens: resident KV tokens in that step.
            snapshot: what it said of the step.
            state: whether requests of the group wait now.
        """
        if snapshot.step > self._step:
            self._close(state)
            self._step = snapshot.step
        self._loads[worker_id] = load_tokens
        self._power_w[worker_id] = snapshot.power_w or 0.0
        self._step_s = max(self._step_s, snapshot.step_s)
        self._output_tokens += snapshot.scheduled_decode_tokens
        self._reported.add(worker_id)

    def complete(self, live: Collection[str], state: PoolState) -> bool:
        """Close the step if all live workers have reported it; True if it is closed."""
        if self._reported.issuperset(live):
            self._close(state)
        return not self._reported

    def leave(self, worker_id: str) -> None:
        """A worker is gone: its load no longer counts, and its next engine counts steps anew."""
        self._loads.pop(worker_id, None)
        self._power_w.pop(worker_id, None)
        self._reported.discard(worker_id)
        if not self._loads:
            self._step = -1

    def _close(self, state: PoolState) -> None:
        if not self._reported:
            return
        peak, total, old = max(self._loads.values()), sum(self._loads.values()), self.totals[state]
        workers = len(self._loads)
        self.totals[state] = StepTotals(
            steps=old.steps + 1,
            imbalance_tokens=old.imbalance_tokens + workers * peak - total,
            max_load_tokens=old.max_load_tokens + peak,
            load_tokens=old.load_tokens + total,
            worker_steps=old.worker_steps + workers,
            step_s=old.step_s + self._step_s,
            energy_j=old.energy_j + sum(self._power_w.values()) * self._step_s,
            output_tokens=old.output_tokens + self._output_tokens,
        )
        self._reported.clear()
        self._step_s = 0.0
        self._output_tokens = 0
