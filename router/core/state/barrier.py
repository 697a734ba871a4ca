"""Barrier accounting: imbalance, energy and tokens per step of a group.

Imbalance of a step is G max L - sum L over the live workers, idle ones as 0 (BF-IO, arXiv
2601.17855, section 3). Ranks of a barrier report the same step number. A step closes when all live
workers have reported it, or one reports a later one. Ranks without a barrier are sampled at the
steps of the furthest busy one, each at the load after its last step.

An engine counts steps from its start. Behind a barrier, a restarted engine's steps are renumbered:
by the count that its ranks share, else from the others' step at the end of its first one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from operator import add, attrgetter, sub

from router.core.energy.group_energy import GroupEnergy
from router.core.energy.joules import PowerLevels
from router.core.state.closed_step import ClosedStep, StepPart
from router.core.state.feed import Feed
from router.core.state.shared_steps import SharedSteps
from router.core.step_fit import StepFit
from router.core.step_time import StepTime, Work
from router.core.types import PoolState, Snapshot

# Ranks in a barrier miss a common step only when a message is lost.
STEPPING_TOGETHER = 0.9
# Contested steps that decide on a barrier: engines change.
_REMEMBERED_STEPS = 500


def is_barrier(together_share: float | None) -> bool | None:
    """True if workers wait for each other; None: unknown, no step was contested."""
    return None if together_share is None else together_share >= STEPPING_TOGETHER


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Running sums over the barrier steps of a group."""

    steps: int = 0
    imbalance_tokens: int = 0  # G max L - sum L
    max_load_tokens: int = 0  # max L
    load_tokens: int = 0  # sum L
    worker_steps: int = 0  # G
    step_s: float = 0.0  # in the engine's seconds
    energy_j: float = 0.0  # power times step time, of workers that report power
    output_tokens: int = 0
    free_slots: int = 0  # slots in which nothing ran
    entered: int = 0
    # Wait for the slowest worker: measured by engines, else modelled, the difference of the work by
    # the group's step time.
    waiting_s: float = 0.0
    timed_s: float = 0.0  # step times with a known wait; waiting_s over this is the idle share
    measured_s: float = 0.0  # part of timed_s that engines measured
    contested_steps: int = 0  # two workers or more had work
    together_steps: int = 0  # contested steps that all busy workers made together
    prompt_tokens: int = 0
    # Time that prompts have added to steps made together, by the cost of a step: that of the worker
    # with the most of them.
    prompt_s: float = 0.0

    @property
    def together_share(self) -> float | None:
        return self.together_steps / self.contested_steps if self.contested_steps else None

    def __add__(self, other: StepTotals) -> StepTotals:
        return StepTotals(*map(add, _sums(self), _sums(other)))

    def __sub__(self, other: StepTotals) -> StepTotals:
        return StepTotals(*map(sub, _sums(self), _sums(other)))


# Far faster than ``astuple``, which copies deeply; groups add them up at each step.
_sums = attrgetter(*(each.name for each in fields(StepTotals)))

# Contested steps that prove a barrier, to renumber a new engine's steps.
_PROOF = 64


@dataclass(slots=True)
class _Rank:
    """A worker's last report."""

    offset: int = 0  # the group's step number less the engine's; unknown for a ``stranger``
    stranger: bool = False
    uncounted: bool = False  # its engine cannot tell which steps of the barrier it only joins
    step: int = -1
    time_s: float = 0.0  # end of the step, by the engine's clock
    step_s: float = 0.0
    running: int = 0
    prompt_tokens: int = 0
    prompt_context: float = 0.0
    # Load in that step, and after it.
    step_tokens: int = 0
    held_tokens: int = 0
    power_w: float | None = None
    queued: int = 0
    preemptions: int | None = None  # since its engine's start; None: unknown
    new_prompt_tokens: int = 0  # of its last step, until one of the group closes
    taught: int = 0  # number of the lesson that it gave last; see ``_learn_in_turn``


class StepLedger:
    """Sums over the steps of one group.

    Attributes:
        fixed: their cost, if it is not to be learned.
        on_step: called at each closing step.
    """

    def __init__(self, levels: PowerLevels | None = None) -> None:
        self.totals = {state: StepTotals() for state in PoolState}
        self.energy = GroupEnergy(levels)
        self.step_fit = StepFit()
        self.fixed: StepTime | None = None
        self._step = -1
        self._ranks: dict[str, _Rank] = {}
        self._offsets: dict[str, tuple[str, int]] = {}
        self._shared = SharedSteps()
        self._reported: set[str] = set()
        self._step_s = 0.0
        self._output_tokens = self._free_slots = self._entered = 0
        self._waits: dict[str, float] = {}
        self._contested = self._lessons = 0
        self._together_share: float | None = None
        self._preemptions = 0
        self.on_step: Callable[[ClosedStep], None] | None = None

    @property
    def barrier(self) -> bool | None:
        return is_barrier(self._together_share)

    @property
    def step_time(self) -> StepTime | None:
        return self.fixed or self.step_fit.fitted

    def report(
        self, worker_id: str, feed: Feed, snapshot: Snapshot, state: PoolState, free_slots: int
    ) -> None:
        """Add a worker's part in a step, after its feed has applied the snapshot.

        Neither a repeated step nor an idle engine's first message counts as a step.
        """
        rank = self._ranks.get(worker_id)
        if rank is None:
            before, offset = self._offsets.get(worker_id, (snapshot.epoch, 0))
            sure = self.barrier is True and self._contested >= _PROOF
            rank = _Rank(offset) if before == snapshot.epoch else _Rank(stranger=sure)
        rank.uncounted = "idle_steps" in snapshot.unreported and not snapshot.wave_step
        resting = rank.step < 0 and not (snapshot.step_s or feed.step_running)
        number = snapshot.step if resting else self._number(worker_id, rank, snapshot)
        stepped = rank.step != number and not resting
        if stepped and number > self._step:
            self._close(state)
            self._step = number
            self._reported.add(worker_id)
        self._ranks[worker_id] = rank
        if not rank.stranger:  # else it is introduced again next time
            self._offsets[worker_id] = snapshot.epoch, rank.offset
        if self.energy.metered or not (snapshot.power_w is None and snapshot.energy_j is None):
            idle = not rank.held_tokens
            self.energy.report(worker_id, snapshot, feed.step_asked, idle=idle, stepped=stepped)
        rank.held_tokens, rank.power_w = feed.resident_tokens, snapshot.power_w
        rank.queued = snapshot.waiting
        if rank.preemptions is not None:
            self._preemptions += max(0, snapshot.preemptions_total - rank.preemptions)
        told = "preemptions" not in snapshot.unreported
        rank.preemptions = snapshot.preemptions_total if told else None
        if not stepped:
            self._step = self._step if self._reported else self._furthest()
            return
        rank.step, rank.time_s, rank.step_s = number, snapshot.time_s, snapshot.step_s
        rank.step_tokens, rank.running = feed.step_load_tokens, feed.step_running
        rank.prompt_tokens = rank.new_prompt_tokens = snapshot.scheduled_prefill_tokens
        rank.prompt_context = feed.step_prompt_context
        if snapshot.waited_s is not None:
            self._waits[worker_id] = min(snapshot.waited_s, snapshot.step_s)
        # A full snapshot does not tell what its requests gained.
        grown = feed.step_grown + feed.step_firsts
        self._output_tokens += grown or snapshot.scheduled_decode_tokens
        self._free_slots += free_slots
        self._entered += feed.step_entered
        if self._reported:
            self._reported.add(worker_id)
            if number == self._step:
                self._step_s = max(self._step_s, snapshot.step_s)

    def complete(self, live: Collection[str], state: PoolState) -> bool:
        if len(self._reported) < len(live) or not self._reported.issuperset(live):
            return False
        self._close(state)
        return True

    def leave(self, worker_id: str) -> None:
        self._ranks.pop(worker_id, None)
        self._reported.discard(worker_id)
        self._waits.pop(worker_id, None)
        self.energy.leave(worker_id)
        self._step = self._furthest()

    def forget_worker(self, worker_id: str) -> None:
        self.leave(worker_id)
        self._offsets.pop(worker_id, None)
        self._shared.forget(worker_id)
        self.energy.forget_worker(worker_id)

    def _number(self, worker_id: str, rank: _Rank, snapshot: Snapshot) -> int:
        if snapshot.wave_step:
            rank.stranger = False
            return self._shared.number(worker_id, snapshot, self._furthest())
        if rank.stranger:
            others = [each for each in self._ranks.values() if not each.stranger and each.step >= 0]
            busy = [each for each in others if each.held_tokens]
            if busy:
                latest = max(busy, key=lambda each: each.step)
                later_s = snapshot.time_s - latest.time_s
                later = later_s / snapshot.step_s if snapshot.step_s > 0 else 0.0
                rank.offset = latest.step + round(max(-1.0, min(1.0, later))) - snapshot.step
            # While the others are idle, their count is unknown.
            rank.stranger = bool(others) and not busy
        return snapshot.step + rank.offset

    def _furthest(self) -> int:
        """An idle worker stands still and does not count."""
        return max((rank.step for rank in self._ranks.values() if rank.held_tokens), default=-1)

    def _close(self, state: PoolState) -> None:
        if not self._reported:
            return
        loads, running, prompts, contexts = [], [], [], []
        for worker_id, rank in self._ranks.items():
            stepped = worker_id in self._reported
            loads.append(rank.step_tokens if stepped else rank.held_tokens)
            running.append(rank.running if stepped else 0)
            prompts.append(rank.prompt_tokens if stepped else 0)
            contexts.append(rank.prompt_context if stepped else 0)
        peak, total, old = max(loads), sum(loads), self.totals[state]
        counted = not any(rank.uncounted for rank in self._ranks.values())
        together = counted and all(
            rank.step == self._step or not rank.held_tokens for rank in self._ranks.values()
        )
        contested = self._contest(loads, together=together, counted=counted)
        cost, waits = self.step_time, {}
        if together and self.barrier is not False:
            waits = self._modelled(cost, loads, running, prompts, contexts)
        elif self.barrier is False:
            self._learn_in_turn()
        if self.energy.metered:
            made = zip(self._ranks, map(Work, loads, running, prompts), strict=True)
            work = {worker_id: its for worker_id, its in made if worker_id in self._reported}
            self.energy.close(work, waits, self._step_s, cost)
        # Of all workers whose wait is known; measured before modelled.
        known = [*self._waits.values(), *(waits[i] for i in waits if i not in self._waits)]
        prompt_s = cost.work_s(0, 0, max(prompts)) if cost is not None and waits else 0.0
        power_w = sum(rank.power_w or 0.0 for rank in self._ranks.values())
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
            waiting_s=old.waiting_s + sum(known),
            timed_s=old.timed_s + len(known) * self._step_s,
            measured_s=old.measured_s + len(self._waits) * self._step_s,
            contested_steps=old.contested_steps + contested,
            together_steps=old.together_steps + (contested and together),
            prompt_tokens=old.prompt_tokens + sum(prompts),
            prompt_s=old.prompt_s + prompt_s,
        )
        waiting_s = sum(waits.values()) if waits else None
        every = sum(self._waits.values()) if len(self._waits) == len(loads) else None
        parts, counts = self._parts(loads), (self._preemptions, every, self._output_tokens)
        step = ClosedStep(self._step, self._step_s, parts, together, waiting_s, *counts)
        self._step = self._furthest()
        self._reported.clear()
        self._step_s = 0.0
        self._output_tokens = self._free_slots = self._entered = self._preemptions = 0
        self._waits.clear()
        if self.on_step is not None:  # last: the step is over even if this fails
            self.on_step(step)

    def _parts(self, loads: Sequence[int]) -> dict[str, StepPart]:
        """The workers in the step that closes; empty if nobody wants to know."""
        parts = {}
        for (worker_id, rank), load in zip(self._ranks.items(), loads, strict=True):
            if self.on_step is not None:
                running, prompt_tokens = rank.running if load else 0, rank.new_prompt_tokens
                parts[worker_id] = StepPart(load, running, rank.queued, rank.power_w, prompt_tokens)
            rank.new_prompt_tokens = 0
        return parts

    def _contest(self, loads: Sequence[int], *, together: bool, counted: bool) -> bool:
        if not counted:  # nothing is known of a barrier
            self._together_share, self._contested = None, 0
            return False
        if sum(load > 0 for load in loads) < 2:
            return False
        self._contested = min(self._contested + 1, _REMEMBERED_STEPS)
        before = self._together_share or 0.0
        self._together_share = before + (together - before) / self._contested
        return True

    def _modelled(
        self,
        cost: StepTime | None,
        loads: Sequence[int],
        running: Sequence[int],
        prompts: Sequence[int],
        contexts: Sequence[float],
    ) -> dict[str, float]:
        """Learn from a step of all ranks; how long each waits for the slowest, empty if unknown."""
        likely, waits = None, {}
        if cost is not None:
            work = list(map(cost.work_s, loads, running, prompts))
            most_s = max(work)
            likely = work.index(most_s)
            waits = {
                worker_id: min(most_s - work_s, self._step_s)
                for worker_id, work_s in zip(self._ranks, work, strict=True)
            }
        timed = [self._waits.get(worker_id, math.inf) for worker_id in self._ranks]
        least_s = min(timed)
        # Not known where engines do not time themselves, or several have not waited at all.
        told = len(self._waits) == len(self._reported) and timed.count(least_s) == 1
        self.step_fit.observe(
            loads,
            running,
            prompts,
            contexts,
            self._step_s,
            slowest=timed.index(least_s) if told else None,
            likely=likely,
        )
        return waits

    def _learn_in_turn(self) -> None:
        """Of one worker's step: rows of all would fill the memory with fewer steps."""
        told = (rank for each, rank in self._ranks.items() if each in self._reported)
        rank = min(told, key=lambda each: each.taught)  # not asked for the longest time
        self._lessons += 1
        rank.taught = self._lessons
        row = [rank.step_tokens], [rank.running], [rank.prompt_tokens]
        self.step_fit.observe(*row, [rank.prompt_context], rank.step_s)
