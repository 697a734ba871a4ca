"""Prompt budgets of a group's workers, from their states."""

from collections.abc import Mapping, Sequence

from router.core.prompt_budget import PromptBudget, StepSeen
from router.core.state.feed import Feed
from router.core.state.group import Group
from router.core.step_time import StepBudget
from router.core.targets import Targets

# Part of the tightest target that the mean over requests is to keep, so that each keeps its own.
# Found by simulation.
_PART = 0.95
# While no budget seems to keep a TPOT target, the first of so many steps try parts of the prompt
# tokens that ranks compute otherwise: more steps than the fit of the cost leaves out as hiccups.
# Each part holds for so many steps that ranks behind a barrier agree on it.
_TRIED, _OF_STEPS = 128, 2048
_PARTS, _EACH = (0.5, 0.25, 0.5, 2.0), 16
# Steps after which a cost that is still not known may never be without.
_PATIENCE = 256


class GroupBudget:
    """Keeps a group's ``prompt_budget``: ranks have one, engines without a barrier one each.

    Args:
        budget: chooses it after each step, by the targets of the requests that run if it has none;
            or the same for all steps; None: the engines' own.
    """

    def __init__(self, group: Group, budget: PromptBudget | int | None) -> None:
        self._group = group
        self._budget = budget if isinstance(budget, PromptBudget) else None
        self._by_requests = self._budget is not None and self._budget.targets == Targets()
        if self._by_requests and group.serves is not None:
            self._budget = None  # workers that only compute prompts make nobody wait
        self._own: Mapping[str, StepBudget] = {}
        self._counted = group.every_step
        self._before_tokens = 0.0  # mean before a prompt token, of the last step that computed any
        self._doubted = 0  # steps whose targets no budget seemed to keep
        self._unknown = 0  # steps since the cost is looked for
        self._trying = False
        self._usual = 0.0  # prompt tokens that a rank computed in the last steps without a try
        group.prompt_budget = StepBudget(budget) if isinstance(budget, int) else None

    def of(self, worker_id: str) -> StepBudget | None:
        """Of a worker's coming steps; in windows only while requests decode that gain by it."""
        return self._own.get(worker_id, self._group.prompt_budget)

    def step_ended(self) -> bool:
        """Choose for the coming step; call it at each step's end. False: nothing is chosen."""
        group, budget = self._group, self._budget
        if budget is None:
            return False
        before, every = group.prompt_budget, group.every_step
        told = [(each, each.feed) for each in group.live_workers() if each.feed is not None]
        if not told or not (group.wanted or self._pays([feed for _, feed in told])):
            # These steps tell nothing of what a later budget is for.
            self._counted, self._own, group.prompt_budget = every, {}, None
            return before is not None
        cost = group.step_time
        batch = max([feed.running for _, feed in told])
        rests_s, firsts, unstarted, context = dict[str, float](), 0, group.line.waiting, 0.0
        decoding = {each.spec.id for each, feed in told if feed.running > feed.computing}
        for worker, feed in told:
            if cost is not None:
                rests_s[worker.spec.id] = cost.rest_s(feed.resident_tokens, feed.running, batch)
            firsts += feed.step_firsts
            unstarted += worker.requests - feed.running + feed.computing
            context += feed.step_prompt_context
        step, self._counted = every - self._counted, every
        if step.prompt_tokens:
            self._before_tokens = context / step.prompt_tokens
        rest_s = max(rests_s.values(), default=0.0)
        seen = StepSeen(
            step.step_s,
            step.output_tokens,
            firsts,
            unstarted,
            rest_s,
            self._before_tokens,
            step.prompt_tokens / len(told),
        )
        tpot_s = self._aim(budget, rest_s)
        chosen, self._own = budget.after(seen, cost), {}
        self._unknown = self._unknown + 1 if cost is None else 0
        doubted = tpot_s is not None and (
            chosen is None or rest_s >= tpot_s or self._unknown > _PATIENCE
        )
        priced = cost is not None and cost.per_prompt_token_s > 0
        tried = self._tried(seen.prompt_tokens, doubted=doubted)
        if tried is not None:
            chosen = tried
        elif chosen is not None and priced and group.barrier is False:
            own = {i: budget.of(own_s) for i, own_s in rests_s.items()}
            self._own = {
                i: one if i in decoding else StepBudget(one.tokens) for i, one in own.items()
            }
            chosen = max(self._own.values())
        elif chosen is not None and not decoding:
            chosen = StepBudget(chosen.tokens)
        group.prompt_budget = chosen
        return (before or chosen) is not None

    def _pays(self, feeds: Sequence[Feed]) -> bool:
        """Whether a budget is of use that nobody has asked for.

        All ranks take it, and wait for each other.
        """
        if not self._by_requests:
            return True
        told = self._group.steps_told and len(feeds) > 1
        takes = None not in [feed.last.prompt_budget for feed in feeds]
        return told and takes and self._group.barrier is True

    def _aim(self, budget: PromptBudget, rest_s: float) -> float | None:
        """Set the budget's target to what can be kept; return the TPOT wanted, kept or not.

        If none can be kept, prompts are bounded as without targets.
        """
        if not self._by_requests:
            return budget.targets.tpot_s
        every, kept = (self._group.wanted.tpot_s(least_s) for least_s in (0.0, rest_s))
        budget.targets = Targets(tpot_s=None if kept is None else _PART * kept)
        return every

    def _tried(self, prompt_tokens: float, *, doubted: bool) -> StepBudget | None:
        """Now and then a part of what ranks compute otherwise, while none seems to keep a target.

        It may only seem so, since steps that are all full do not show what their prompts cost.
        """
        if not self._trying:
            self._usual = max(prompt_tokens, 0.9 * self._usual)
        self._doubted += doubted
        since = self._doubted % _OF_STEPS
        part = _PARTS[since // _EACH % len(_PARTS)]
        tokens = int(part * self._usual) if doubted and since < _TRIED else 0
        self._trying = bool(tokens)
        return StepBudget(tokens) if tokens else None
