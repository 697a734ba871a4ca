"""How many requests may queue in an engine before a slot is free, chosen by what slots stand empty.

From the end of a request to the first step of the next one there is a bubble: the snapshot, the
decision and the dispatch take their time. A request that already queues in the engine fills the
slot at once, but it was chosen for a worker before that was known to have a slot. In simulations
(`make figures`, dispatch delay) the first pays where outputs are short against the bubble, and
costs balance where they are long: so the share of slot time that is lost decides. With a number
that works next to nothing is lost, and that says nothing of a lower one: it is tried now and then.
"""

from __future__ import annotations

from router.barrier import StepTotals

MOST = 2
REVIEW_STEPS = 256
RETRY_REVIEWS = 32  # after too much was lost, before a lower number is tried
# Shares of the slots' time that stand empty while requests wait.
_TOO_MUCH = 0.02
_NEXT_TO_NOTHING = 0.002


class Overcommit:
    """The number in force for one group.

    Args:
        fixed: the number, whatever is measured; None: 0 at first, then by the measured bubble.
    """

    def __init__(self, fixed: int | None = None) -> None:
        self.requests = fixed or 0
        self.bubble_steps: float | None = None
        self._fixed = fixed is not None
        self._seen = StepTotals()
        self._until_retry = 0

    def review(self, totals: StepTotals, slots: int) -> None:
        """Look at the steps since the last review, once there are enough.

        Args:
            totals: sums over the steps in which requests waited.
            slots: of all workers together.
        """
        steps = totals.steps - self._seen.steps
        entered = totals.entered - self._seen.entered
        if steps < REVIEW_STEPS or entered == 0:
            return
        empty = totals.free_slots - self._seen.free_slots
        self._seen = totals
        self.bubble_steps = empty / entered
        if self._fixed:
            return
        lost = empty / (steps * slots)
        self._until_retry -= 1
        if lost > _TOO_MUCH:
            self.requests = min(MOST, self.requests + 1)
            self._until_retry = RETRY_REVIEWS
        elif lost < _NEXT_TO_NOTHING and self._until_retry <= 0:
            self.requests = max(0, self.requests - 1)
