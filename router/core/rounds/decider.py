"""Decisions for one group: pool, policy, look-ahead and counters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from router.core.clock import Clock
from router.core.forecast.forecast import Outlook
from router.core.forecast.look_ahead import LookAhead
from router.core.policies.bfio.policy import BfIo, Decision
from router.core.policies.protocol import Policy
from router.core.queue.fair_share import FairShare, Offer
from router.core.queue.pool import Pool
from router.core.rounds import assignment
from router.core.rounds.overcommit import Overcommit
from router.core.rounds.reservations import Reservations
from router.core.state.group import Group
from router.core.stats import GroupStats
from router.core.types import Assignment, Dispatch, PoolState, WorkerView


@dataclass(slots=True)
class Decider:
    """Assigns a group's waiting requests, round by round.

    Attributes:
        fallback: policy for rounds in which the main one broke its contract.
        solved: bfio's last program; None if it solved nothing.
        on_policy_error: callback for an exception of the policy; the fallback then assigns.
    """

    group: Group
    pool: Pool
    policy: Policy
    fallback: Policy
    dispatch: Dispatch
    look_ahead: LookAhead | None = None
    overcommit: Overcommit = field(default_factory=Overcommit)
    reservations: Reservations = field(default_factory=Reservations)
    fair: FairShare = field(default_factory=FairShare)
    stats: GroupStats = field(default_factory=GroupStats)
    solved: Decision | None = None
    on_policy_error: Callable[[Exception], None] = lambda _: None

    def learn(self, *, step_complete: bool = False) -> None:
        """Feed departures and steps to the look-ahead; call it at each step's end, and between.

        Without live snapshots, steps are derived from the tokens that requests receive.
        """
        # Cleared first: a departure that raises must not be met again.
        departures = self.group.departures[:]
        self.group.departures.clear()
        if self.look_ahead is not None:
            for departure in departures:
                self.look_ahead.ended(departure)
            step_tokens = self.look_ahead.profile.step_tokens
            if steps := 1 if step_complete else self.group.own_steps(step_tokens):
                self.look_ahead.advance(steps)
        if step_complete:
            slots = sum(worker.slots for worker in self.group.live_workers())
            self.overcommit.review(self.group.totals[PoolState.WAITING], slots)

    def decide(self, now: float, clock: Clock) -> Sequence[Assignment]:
        """Assign waiting requests to workers with free capacity; empty when there is none."""
        self.learn()
        self.fair.see(now, self.group.held)
        self.group.review(now)
        views = self.group.views(self.dispatch, self.overcommit.requests)
        capacity = sum(view.capacity for view in views)
        if not self.pool or not capacity:
            return ()
        waiting = len(self.pool)
        spent = _spent(self.policy)
        assignments = self._assign(now, capacity, views)
        self.stats.decided(clock() - now, waiting, len(assignments))
        if self.solved is not None:
            self.stats.decision_objective.observe(self.solved.solution.objective)
            self.stats.decision_moves.observe(_spent(self.policy) - spent)
        return assignments

    def _assign(
        self, now: float, capacity: int, views: Sequence[WorkerView]
    ) -> Sequence[Assignment]:
        gap_tokens = assignment.gap_tokens(views)
        tiers = self.pool.tiers(now, capacity, gap_tokens, self._turns(capacity))
        overdue = self.pool.overdue(now, tiers)
        askable = self.group.askable if any(tier.avoid for tier in tiers) else frozenset()
        self.stats.rounds += 1
        self.solved = None
        try:
            outlook = self._outlook(views)
            if outlook is not None:
                wanted = self.pool.room_wanted(now, gap_tokens)
                outlook = self.reservations.make_room(wanted, views, outlook)
            assignments = assignment.assign(self.policy, tiers, views, outlook, overdue, askable)
            if assignments and isinstance(self.policy, BfIo):
                self.solved = self.policy.last
            return assignments
        except Exception as error:  # noqa: BLE001 - a policy's bug must not stop the service
            self.on_policy_error(error)
        self.stats.policy_errors += 1
        return assignment.assign(self.fallback, tiers, views, overdue=overdue, askable=askable)

    def _turns(self, capacity: int) -> Sequence[Offer]:
        waiting = self.pool.slots_of
        return self.fair.turns(self.group.held, waiting, capacity) if len(waiting) > 1 else ()

    def _outlook(self, views: Sequence[WorkerView]) -> Outlook | None:
        if self.look_ahead is None:
            return None
        slots = sum(view.slots for view in views) // len(views)
        if self.look_ahead.needs_running:
            outlook = self.look_ahead.renewed(self.group.versions(), self.group.running, slots)
            live = self.group.live_workers()
            if any(worker.foreign.load_tokens for worker in live):
                foreign = np.array([[worker.foreign.load_tokens] for worker in live])
                outlook = replace(outlook, work=outlook.work + foreign)
            return outlook
        loads = np.array([view.load_tokens for view in views], dtype=np.float64)
        requests = np.array([view.requests for view in views])
        return self.look_ahead.outlook_from_loads(loads, requests, slots)


def _spent(policy: Policy) -> int:
    return policy.spent if isinstance(policy, BfIo) else 0
