"""What decides for one group: its pool, its policy, the look-ahead, and what came of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from router import rounds
from router.access.shares import FairShare, Offer
from router.clock import Clock
from router.errors import PolicyError
from router.forecast import Outlook
from router.group import Group
from router.lookahead import LookAhead
from router.overcommit import Overcommit
from router.policies.bfio import BfIo, Decision
from router.policy import Policy
from router.pool import Pool
from router.reservations import Reservations
from router.stats import GroupStats
from router.types import Assignment, Dispatch, PoolState, WorkerView

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Decider:
    """Chooses which of a group's waiting requests go where, round by round.

    Attributes:
        fallback: stands in for a round in which the policy broke its contract.
        look_ahead: what the policy is told of the near future; None for one that asks nothing.
        fair: whose turn it is, where requests of several tenants wait.
        solved: what bfio solved in the last round, None where it solved nothing.
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

    def learn(self, *, step_complete: bool = False) -> None:
        """Tell the look-ahead who has left, and that steps have passed.

        To be called at each step's end, and now and then besides. Where no live worker has
        snapshots, the tokens that requests receive say how many steps.
        """
        # Taken before they are looked at: one that could not be learned from is not met again.
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
        """Assign who waits to who has room; nobody where there is none."""
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
        gap_tokens = rounds.gap_tokens(views)
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
            assignments = rounds.assign(self.policy, tiers, views, outlook, overdue, askable)
            if assignments and isinstance(self.policy, BfIo):
                self.solved = self.policy.last
            return assignments
        except Exception as error:  # a policy's bug must not stop the service
            reason = "broke its contract" if isinstance(error, PolicyError) else "failed"
            log.exception("the policy %s, this round is assigned by the fallback", reason)
        self.stats.policy_errors += 1
        return rounds.assign(self.fallback, tiers, views, overdue=overdue, askable=askable)

    def _turns(self, capacity: int) -> Sequence[Offer]:
        """Whose requests go first; one tenant alone has the pool as it stands."""
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
    """Moves that a policy's search has made so far."""
    return policy.spent if isinstance(policy, BfIo) else 0
