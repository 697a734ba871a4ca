"""Prompt budgets that routers have set for one engine, each until its lease ends.

The vLLM plug-in and the emulator use ``PromptLeases``.
"""

from collections.abc import Mapping

from router.core.step_time import StepBudget
from router.core.wire import BUDGET_LEASE_S, MOST_EVERY, BudgetMessage

AGREE_STEPS = 8
"""Ranks behind a barrier agree on a budget after the first of so many steps."""

NO_BUDGET = StepBudget(0)


class PromptLeases:
    """Budgets by router; one thread takes them, another may read them.

    A lease begins at the engine's own snapshot that the router had read, by the engine's clock.
    A message that comes late, or once more, therefore holds no longer than at first.
    """

    def __init__(self) -> None:
        self._held: Mapping[str, BudgetMessage] = {}

    def take(self, told: BudgetMessage, now_s: float) -> None:
        """Hold a budget, unless it is late, or no newer than the one held of its router."""
        held = {router: one for router, one in self._held.items() if _holds(one, now_s)}
        before = held.get(told.router)
        if _holds(told, now_s) and (before is None or told.seen_s > before.seen_s):
            held[told.router] = told
        self._held = held

    def least(self, now_s: float) -> StepBudget:
        """The smallest budget held; ``NO_BUDGET``: none is."""
        held = [one for one in self._held.values() if _holds(one, now_s)]
        return min(
            (StepBudget(one.tokens, one.every) for one in held), key=packed, default=NO_BUDGET
        )


def packed(budget: StepBudget) -> int:
    """The budget in one number; a smaller one has fewer tokens a step, whole ones, on average."""
    a_step, further = divmod(budget.tokens, budget.every)
    return (a_step * MOST_EVERY + further) * MOST_EVERY + budget.every


def unpacked(number: int) -> StepBudget:
    """The budget that ``packed`` has made the number of."""
    rest, every = divmod(number, MOST_EVERY)
    a_step, further = divmod(rest, MOST_EVERY)
    return StepBudget(a_step * every + further, every)


def _holds(told: BudgetMessage, now_s: float) -> bool:
    return told.seen_s <= now_s < told.seen_s + BUDGET_LEASE_S
