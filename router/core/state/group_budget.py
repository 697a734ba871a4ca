"""Prompt budgets of a group's workers, from their states."""

from collections.abc import Mapping

from router.core.prompt_budget import PromptBudget, StepSeen
from router.core.state.barrier import StepTotals
from router.core.state.group import Group


class GroupBudget:
    """Keeps a group's ``prompt_budget``: ranks have one, engines without a barrier one each.

    Args:
        budget: chooses it after each step; or the same for all steps; None: the engines' own.
    """

    def __init__(self, group: Group, budget: PromptBudget | int | None) -> None:
        self._group = group
        self._budget = budget if isinstance(budget, PromptBudget) else None
        self._own: Mapping[str, int] = {}
        self._counted = StepTotals()
        group.prompt_budget = budget if isinstance(budget, int) else None

    def of(self, worker_id: str) -> int | None:
        """Most prompt tokens of a worker's coming step."""
        return self._own.get(worker_id, self._group.prompt_budget)

    def step_ended(self) -> bool:
        """Choose for the coming step; call it at each step's end. False: nothing is chosen."""
        group, budget = self._group, self._budget
        if budget is None:
            return False
        cost, every = group.step_time, group.every_step
        rests_s, firsts, unstarted = dict[str, float](), 0, group.waiting
        for worker in group.live_workers():
            if (feed := worker.feed) is None:
                continue
            if cost is not None:
                rests_s[worker.spec.id] = cost.seconds(feed.resident_tokens, feed.running)
            firsts += feed.step_firsts
            unstarted += worker.requests - feed.running + feed.computing
        step, self._counted = every - self._counted, every
        rest_s = max(rests_s.values(), default=0.0)
        seen = StepSeen(step.step_s, step.output_tokens, firsts, unstarted, rest_s)
        chosen, self._own = budget.after(seen, cost), {}
        if not rests_s:  # no engine tells of its steps, so none takes budgets
            chosen = None
        elif cost is not None and chosen is not None and group.barrier is False:
            self._own = {i: budget.tokens(own_s, cost) for i, own_s in rests_s.items()}
            chosen = max(self._own.values())
        group.prompt_budget = chosen
        return True
