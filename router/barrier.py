"""Accounting at the barrier: imbalance, energy and tokens per step of a group.

Imbalance of a step is G max L - sum L over the live workers, idle ones as 0 (BF-IO,
arXiv 2601.17855, section 3). Ranks of a barrier report the same step number; a step is closed when
all live workers have reported it or one reports a later one. Ranks that do not step together are
sampled at the steps of the furthest busy one, each held at the load that its last step left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, dataclass
from operator import add, sub
from types import MappingProxyType

import msgspec

from router.energy.group import GroupEnergy
from router.energy.joules import PowerLevels
from router.step_watch import ClosedStep, Said, StepWatch
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
        waiting_s: time that workers waited for the fullest: as engines have timed it, else
            modelled: t_l (max L - L_g).
        timed_s: sum over workers of the step time where one of both was known; the idle share is
            the one over the other.
        measured_s: of that, where engines have timed it.
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
    waiting_s: float = 0.0
    timed_s: float = 0.0
    measured_s: float = 0.0

    def __add__(self, other: StepTotals) -> StepTotals:
        return StepTotals(*map(add, astuple(self), astuple(other)))

    def __sub__(self, other: StepTotals) -> StepTotals:
        return StepTotals(*map(sub, astuple(self), astuple(other)))


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
        running: requests that took part in it.
        asked: KV tokens of the requests whose energy is asked about.
    """

    step_tokens: int
    held_tokens: int
    free_slots: int = 0
    entered: int = 0
    running: int = 0
    asked: Mapping[str, int] = {}


class StepLedger:
    """Sums per pool state over the steps of one group.

    Args:
        levels: calibrated power of a worker's GPUs.

    Attributes:
        totals: by whether requests waited at the end of the step.
        energy: what the workers' joules were spent on.
    """

    def __init__(self, levels: PowerLevels | None = None) -> None:
        self.totals = {state: StepTotals() for state in PoolState}
        self.energy = GroupEnergy(levels)
        self._step = -1
        self._ranks: dict[str, _Rank] = {}
        self._reported: set[str] = set()
        self._step_s = 0.0
        self._output_tokens = 0
        self._free_slots = 0
        self._entered = 0
        self._waits: dict[str, float] = {}
        self._watch: StepWatch | None = None

    def watch(
        self,
        on_step: Callable[[ClosedStep], None] | None,
        said: Mapping[str, Said] = MappingProxyType({}),
    ) -> None:
        """Have each step told as it closes, from now on; None: no more.

        Args:
            on_step: takes it.
            said: by worker, what those have said that have reported a step before.
        """
        self._watch = None if on_step is None else StepWatch(on_step, said)

    def report(
        self, worker_id: str, shares: StepShares, snapshot: Snapshot, state: PoolState
    ) -> None:
        """A worker said how it is after a step.

        Args:
            worker_id: who.
            shares: its part in the step.
            snapshot: what it said of the step; the same step again is no further one, nor is what
                an engine at rest says first.
            state: whether requests of the group wait now.
        """
        rank = self._ranks.get(worker_id) or _Rank()
        resting = rank.step < 0 and not (snapshot.step_s or shares.running)
        stepped = rank.step != snapshot.step and not resting
        if stepped and snapshot.step > self._step:
            self._close(state)
            self._step = snapshot.step
            self._reported.add(worker_id)
        self._ranks[worker_id] = rank
        if self.energy.metered or not (snapshot.power_w is None and snapshot.energy_j is None):
            idle = not rank.held_tokens
            self.energy.report(worker_id, snapshot, shares.asked, idle=idle, stepped=stepped)
        rank.held_tokens, rank.power_w = shares.held_tokens, snapshot.power_w or 0.0
        if self._watch is not None:
            self._watch.report(worker_id, shares.running, snapshot, stepped=stepped)
        if not stepped:
            self._step = self._step if self._reported else self._furthest()
            return
        rank.step, rank.step_tokens = snapshot.step, shares.step_tokens
        if snapshot.waited_s is not None:
            self._waits[worker_id] = min(snapshot.waited_s, snapshot.step_s)
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
        self._waits.pop(worker_id, None)
        self.energy.leave(worker_id)
        if self._watch is not None:
            self._watch.leave(worker_id)
        self._step = self._furthest()

    def forget_worker(self, worker_id: str) -> None:
        """A worker is gone for good; what it has added to the sums stays."""
        self.leave(worker_id)
        self.energy.forget_worker(worker_id)

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
        together = all(
            rank.step == self._step or not rank.held_tokens for rank in self._ranks.values()
        )
        per_token_s = self._close_energy(peak, together=together)
        imbalance = len(loads) * peak - total
        waited_s, timed = self._waited(loads, peak, per_token_s)
        power_w = sum(rank.power_w for rank in self._ranks.values())
        self.totals[state] = StepTotals(
            steps=old.steps + 1,
            imbalance_tokens=old.imbalance_tokens + imbalance,
            max_load_tokens=old.max_load_tokens + peak,
            load_tokens=old.load_tokens + total,
            worker_steps=old.worker_steps + len(loads),
            step_s=old.step_s + self._step_s,
            energy_j=old.energy_j + power_w * self._step_s,
            output_tokens=old.output_tokens + self._output_tokens,
            free_slots=old.free_slots + self._free_slots,
            entered=old.entered + self._entered,
            waiting_s=old.waiting_s + waited_s,
            timed_s=old.timed_s + timed * self._step_s,
            measured_s=old.measured_s + len(self._waits) * self._step_s,
        )
        if self._watch is not None:
            waiting_s = None if per_token_s is None else per_token_s * imbalance
            by_worker = dict(zip(self._ranks, loads, strict=True))
            every = sum(self._waits.values()) if len(self._waits) == len(loads) else None
            step = ClosedStep(self._step, self._step_s, {}, together, waiting_s, 0, every)
            self._watch.close(step, by_worker)
        self._step = self._furthest()
        self._reported.clear()
        self._step_s = 0.0
        self._output_tokens = 0
        self._free_slots = 0
        self._entered = 0
        self._waits.clear()

    def _waited(
        self, loads: Sequence[int], peak: int, per_token_s: float | None
    ) -> tuple[float, int]:
        """Time that workers waited in the step, and of how many of them that is known."""
        waited_s, known = sum(self._waits.values()), len(self._waits)
        if per_token_s is None:
            return waited_s, known
        untimed = [load for i, load in zip(self._ranks, loads, strict=True) if i not in self._waits]
        gaps = len(untimed) * peak - sum(untimed)
        return waited_s + per_token_s * gaps, known + len(untimed)

    def _close_energy(self, peak: int, *, together: bool) -> float | None:
        """See ``GroupEnergy.close``."""
        metered = self._reported if self.energy.metered else ()
        loads = {worker_id: self._ranks[worker_id].step_tokens for worker_id in metered}
        return self.energy.close(loads, peak, self._step_s, together=together)
