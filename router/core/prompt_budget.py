"""How many prompt tokens each rank of a group computes in a step.

A rank that computes a long piece of a prompt makes all ranks wait. The bound is alike on all ranks:
none waits for what another may do alone. Engines without a barrier have one each. It follows from
the learned step time. With R = C + t_l L + t_r n, the time of the slowest rank without prompts, b
prompt tokens make a step last R + a + t_p b, where a is what any prompts add; it is 0 unless steps
tell of it.

- Without targets, a step's prompts take up to three times R. Larger pieces bring first tokens no
  sooner: R is then a small part of the step, and ranks compute their prompts one after the other
  instead of together. Where prompts fill most of the time, they take more, up to twelve times R:
  ranks compute them together anyhow, and R is lost at each step.
- With a target for the time of a token (TPOT) alone, no step is planned to last longer, and
  nearly all are to keep it: what the plan does not foresee is learned as a margin.
- With one for the time to the first token (TTFT) as well, the TPOT target holds in the mean over
  tokens. What steps without prompts leave is spent while more requests wait for their first token
  than the TTFT target allows: by Little's law, more than arrive within the target. If they are
  twice as many for long, steps become longer than the TPOT target.

Where a is large, small pieces are inefficient: one step of several then takes a large piece, the
others none. Of the windows that keep the TPOT target in the mean, the one is taken that spends the
largest share of the time on prompt tokens.

The rule is our own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from router.core.step_time import StepBudget, StepTime
from router.core.targets import Targets

PROMPTS_SHARE = 3.0
"""Time of a step's prompts, in that of the rest of the step, from which on larger pieces are worse.

From simulations at t_p = 5e-5 s: TTFT is least at 1,024 tokens, TPOT grows on.
"""

FIRST_TOKENS = 512
"""Budget until steps have told what they cost.

Sarathi-Serve (arXiv 2403.02310) has it for strict targets on an A100.
"""

# No budget is smaller where no target asks for it, not even where a step seems to take no time.
_FEWEST_TOKENS = 64
# Bound where tokens of prompts cost nothing beside what any prompts add.
_MOST_TOKENS = 1 << 20
# The most of it, where prompts fill the steps: the share of the ranks' time from which on they do,
# and how long an earlier step counts.
_MOST_SHARE, _FILLED, _FILLED_S = 12.0, 0.6, 2.0
# Prompts go on where a target leaves no room, at this part of the rest of a step.
_LEAST_SHARE = 0.125
# Most by which the time of prompts, or of the mean step, is raised while first tokens are late.
_MOST_RAISED = _MOST_SHARE / PROMPTS_SHARE
# First tokens are late for good where they take so many times their target.
_LATE = 2.0
# Least part of a target that is planned for.
_LEAST_PART = 0.5
# Most of the correction by which the mean meets the target, and what a step's error moves it.
_MOST_CORRECTION, _CORRECTS = 2.0, 1e-3
_MEMORY_S = 120.0
# A step misses a TPOT target alone if it is longer by this factor: loads grow while a budget holds.
# The share that may miss it, and what one moves the margin.
_SLACK, _MISSES, _MOVES = 1.02, 0.05, 0.02
# Steps of a window; only the longest lets so few steps miss the target. A longer one makes requests
# wait: it must spend so many times as much time on prompt tokens. There are windows only where any
# prompts add at least this part of the rest of a step.
_WINDOWS: tuple[int, ...] = (2, 4, 8, 20)
_PAYS, _INEFFICIENT = 1.1, 1 / 16


@dataclass(frozen=True, slots=True)
class StepSeen:
    """A group after a step.

    Attributes:
        step_s: duration of the step.
        output_tokens: that requests gained in it.
        firsts: requests that it gave their first token.
        unstarted: requests without their first token, on workers and in the pool.
        rest_s: time of a step without prompts, by the learned cost; 0 while that is unknown.
        before_tokens: mean tokens before a prompt token that it computed.
        prompt_tokens: that it computed, mean over the workers.
    """

    step_s: float
    output_tokens: int
    firsts: int
    unstarted: int
    rest_s: float
    before_tokens: float = 0.0
    prompt_tokens: float = 0.0


class PromptBudget:
    """Budgets of one group, step after step.

    Args:
        targets: for the mean over requests.
        most_tokens: the engines' own bound; None: unknown.
    """

    def __init__(self, targets: Targets, most_tokens: int | None = None) -> None:
        self.targets = targets
        self._most = math.inf if most_tokens is None else most_tokens
        # Of the last minutes; older steps count less.
        self._steps = self._seconds = self._tokens = self._firsts = self._unstarted_s = 0.0
        self._correction = self._margin = self._raised = 1.0
        self._tpot_s = self._mean_s = math.inf
        self._windows: tuple[int, ...] = ()
        self._every, self._tried = 1, False
        self._prompts_s = self._prompt_token_s = 0.0
        self._tokens_before = FIRST_TOKENS
        self._filled = 0.0  # share of the last seconds that workers computed prompts, mean

    def after(self, seen: StepSeen, cost: StepTime | None) -> StepBudget | None:
        """Budget of the coming step; None: the engines' own, where prompts cost nothing."""
        self._remember(seen)
        if cost is None or not (cost.per_prompt_token_s or cost.prompts_known):
            return StepBudget(int(min(self._most, FIRST_TOKENS)))
        if not cost.per_prompt_token_s:
            return None
        any_s, self._prompt_token_s = cost.prompts_s(seen.before_tokens)
        self._fill(seen)
        # Steps of windows do not tell it: they have large pieces alone.
        self._prompts_s = any_s if self._every == 1 else max(any_s, self._prompts_s)
        self._raised, self._windows = 1.0, _WINDOWS[-1:]
        tpot_s = self.targets.tpot_s or math.inf
        asked = tpot_s < math.inf
        # Requests that may wait for their first token, by Little's law.
        allowed = (self.targets.ttft_s or 0.0) * self._rate(self._firsts)
        if allowed > 0:
            self._raised = _raised(seen.unstarted / allowed)
            late = self._rate(self._unstarted_s) / allowed
            tpot_s *= _raised(late / _LATE)
            self._correct(seen, tpot_s)
            self._windows = _WINDOWS
            self._mean_s = self._tpot_s = tpot_s * self._correction
        else:
            self._mean_s = self._tpot_s = tpot_s
            if asked:
                self._tpot_s *= self._keep(seen.step_s > _SLACK * tpot_s)
        # What makes all steps miss the target may be what any prompts add: windows tell it.
        least = self._tpot_s <= _LEAST_PART * tpot_s
        self._tried = asked and not cost.rest_known and (least or self._tried)
        chosen = self.of(seen.rest_s)
        self._every, self._tokens_before = chosen.every, chosen.tokens
        return chosen

    def of(self, rest_s: float) -> StepBudget:
        """Budget of a worker alone whose step takes ``rest_s`` without prompts."""
        every, most_s = 1, self._most_share * rest_s
        prompts_s = min(most_s, self._tpot_s - rest_s)
        if rest_s and (self._tried or self._prompts_s >= _INEFFICIENT * rest_s):
            once_s = prompts_s if self._tried else min(most_s, self._mean_s - rest_s)
            share = self._share(1, rest_s, once_s)
            mean_s = max(_LEAST_SHARE * rest_s, self._mean_s - rest_s)
            for longer in self._windows:
                longer_s = min(most_s, longer * mean_s)
                spent = self._share(longer, rest_s, longer_s)
                if spent > _PAYS * share:
                    every, prompts_s, share = longer, longer_s, spent
        raised_s = min(self._raised * prompts_s, _MOST_SHARE * rest_s)
        if self._tpot_s < math.inf:
            raised_s, fewest = max(_LEAST_SHARE * rest_s, raised_s - self._prompts_s), 1
        else:
            fewest = _FEWEST_TOKENS
        most = raised_s / self._prompt_token_s if self._prompt_token_s else math.inf
        return StepBudget(int(min(self._most, max(fewest, most), _MOST_TOKENS)), every)

    @property
    def _most_share(self) -> float:
        """Time of a step's prompts in that of its rest: a rank has time for all of them.

        With s times R for prompts, a rank that computes some in each step spends s / (1 + s) of its
        time on them.
        """
        part = self._filled / _FILLED
        most = part / (1 - part) if part < 1 else _MOST_SHARE
        return min(_MOST_SHARE, max(PROMPTS_SHARE, most))

    def _fill(self, seen: StepSeen) -> None:
        if seen.step_s:
            kept = math.exp(-seen.step_s / _FILLED_S)
            any_s = self._prompts_s * min(1.0, seen.prompt_tokens / self._tokens_before)
            part = (seen.prompt_tokens * self._prompt_token_s + any_s) / seen.step_s
            self._filled = kept * self._filled + (1 - kept) * min(1.0, part)

    def _share(self, every: int, rest_s: float, prompts_s: float) -> float:
        """Of the time, spent on prompt tokens, where one of so many steps has prompts."""
        return max(0.0, prompts_s - self._prompts_s) / (every * rest_s + prompts_s)

    def _rate(self, total: float) -> float:
        return total / self._seconds if self._seconds else 0.0

    def _remember(self, seen: StepSeen) -> None:
        kept = math.exp(-seen.step_s / _MEMORY_S)
        self._steps = kept * self._steps + 1
        self._seconds = kept * self._seconds + seen.step_s
        self._tokens = kept * self._tokens + seen.output_tokens
        self._firsts = kept * self._firsts + seen.firsts
        self._unstarted_s = kept * self._unstarted_s + seen.unstarted * seen.step_s

    def _keep(self, missed: bool) -> float:
        """Follow the part of the target to plan for, so that few steps miss it."""
        moved = self._margin + _MOVES * (_MISSES - missed)
        self._margin = min(1.0, max(_LEAST_PART, moved))
        return self._margin

    def _correct(self, seen: StepSeen, tpot_s: float) -> None:
        """Bring the mean over tokens to the target: a step counts by its tokens."""
        usual = self._tokens / self._steps
        weight = min(2.0, seen.output_tokens / usual) if usual else 0.0
        error = max(-_MOST_RAISED, 1 - seen.step_s / tpot_s)
        moved = self._correction + _CORRECTS * weight * error
        self._correction = min(_MOST_CORRECTION, max(_LEAST_PART, moved))


def _raised(share: float) -> float:
    return min(_MOST_RAISED, max(1.0, share))
