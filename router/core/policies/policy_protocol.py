from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from router.core.types import Assignment, Hits, Request, WorkerView

if TYPE_CHECKING:
    from router.core.forecast.forecast import Outlook
    from router.core.policies.bfio.solver import Instance, Solution
    from router.core.step_time import StepTime


@dataclass(frozen=True, slots=True)
class Known:
    """What a policy may know of a round beyond the views.

    Attributes:
        outlook: predicted loads of the workers; None without look-ahead.
        step_time: cost of the group's steps, learned or configured; None while unknown.
        hits: cached part of each prompt by worker; None: unknown, which counts as 0.
        now_s: time of the round.
        may_wait: whether a request may wait for a busy worker, instead of going to a free one.
        steps_under_way: steps that begin before what this round sends arrives.
        slots_first: whether requests wait for slots, and hardly for workers that have their
            prefixes cached.
    """

    outlook: Outlook | None = None
    step_time: StepTime | None = None
    hits: Hits | None = None
    now_s: float = 0.0
    may_wait: bool = False
    steps_under_way: int = 0
    slots_first: bool = False

    @property
    def busy_from(self) -> float:
        """Pending prompt tokens of a worker that needs no more before this round's could arrive."""
        if not self.may_wait or self.outlook is None or not self.outlook.profile.prefill_beta:
            return math.inf
        return self.outlook.profile.prefill_chunk * (1 + self.steps_under_way)


NOTHING = Known()


@dataclass(frozen=True, slots=True)
class Decision:
    """The last program and its solution: one-slot requests, in the pool's order."""

    instance: Instance
    solution: Solution


class Policy(Protocol):
    """Assigns a pool of waiting requests to workers, jointly.

    Only a policy that solves a program changes the attributes.

    Attributes:
        solves: true if it searches within a budget of moves.
        share: part of the budget for the next call; ``rounds`` divides it among a round's calls.
        spent: moves since the start.
        last: program of the last call; None if it solved nothing.
    """

    solves: bool = False
    share: float = 1.0
    spent: int = 0
    last: Decision | None = None

    def assign(
        self,
        waiting: Sequence[Request],
        workers: Sequence[WorkerView],
        known: Known = NOTHING,
    ) -> Sequence[Assignment]:
        """Assign requests of one round, in the order of choice.

        Each request occurs at most once, on a worker with capacity left (a request of several slots
        may exceed it). What a worker receives needs no more than its ``admissible`` memory, or is a
        single request on an idle one. None waits that fits on a worker with capacity left.
        ``rounds`` checks all of this.

        Args:
            waiting: candidates of one priority, oldest first.
            workers: live workers of one group, in a fixed order.
            known: what is known beyond the views; its rows are in the workers' order.
        """
