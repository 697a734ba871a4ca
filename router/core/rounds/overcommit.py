"""Number of requests that may queue in an engine, chosen by the measured slot bubble.

A slot is empty between a request's end and the next one's first step: snapshot, decision, dispatch.
A queued request fills it at once, but was chosen before its worker had one. In simulations (`make
figures`, dispatch delay) a queue pays where outputs are short against the bubble, and costs balance
where they are long. So the share of lost slot time decides. Where a number works, little is lost,
which tells nothing of a lower one: that is tried now and then.
"""

from router.core.state.barrier import StepTotals

MOST = 2
REVIEW_STEPS = 256
RETRY_REVIEWS = 32  # reviews after a loss before a lower number is tried
# Shares of slot time that is empty while requests wait.
_TOO_MUCH = 0.02
_NEXT_TO_NOTHING = 0.002


class Overcommit:
    """The number in force for one group; ``fixed`` None: 0 at first, then by the bubble."""

    def __init__(self, fixed: int | None = None) -> None:
        self.requests = fixed or 0
        self.bubble_steps: float | None = None
        self._fixed = fixed is not None
        self._seen = StepTotals()
        self._until_retry = 0

    @property
    def imposed(self) -> bool:
        """True if a number above 0 is fixed."""
        return self._fixed and self.requests > 0

    def review(self, totals: StepTotals, slots: int) -> None:
        """Update it after enough steps in which requests waited."""
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
