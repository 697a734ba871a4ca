"""How many prompt tokens each rank of a group computes in a step.

A rank that computes a long piece of a prompt makes all ranks wait. The bound is alike on all ranks:
none waits for what another may do alone. Engines without a barrier have one each. It follows from
the learned step time. With R = C + t_l L + t_r n, the time of the slowest rank without prompts, b
prompt tokens make a step last R + a + t_p b, where a is what any prompts add; it is 0 unless steps
tell of it.

- Without targets, a step's prompts take up to three times R. Larger pieces bring first tokens no
  sooner: R is then a small part of the step, and ranks compute their prompts one after the other
  instead of together.
- With a target for the time of a token (TPOT) alone, no step is planned to last longer, and
  nearly all are to keep it: what the plan does not foresee is learned as a margin.
- With one for the time to the first token (TTFT) as well, the TPOT target holds in the mean over
  tokens. What steps without prompts leave is spent while more requests wait for their first token
  than the TTFT target allows: by Little's law, more than arrive within the target. If they are
  twice as many for long, steps become longer than the TPOT target.

The rule is our own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from router.core.errors import ConfigError
from router.core.step_time import StepTime

PROMPTS_SHARE = 3.0
"""Time of a step's prompts, in that of the rest of the step, from which on larger pieces are worse.

From simulations at t_p = 5e-5 s: TTFT is least at 1,024 tokens, TPOT grows on.
"""

# Bound where tokens of prompts cost nothing beside what any prompts add.
_MOST_TOKENS = 1 << 20
# Prompts go on where a target leaves no room, at this part of the rest of a step.
_LEAST_SHARE = 0.125
# Most by which the time of prompts, or of the mean step, is raised while first tokens are late.
_MOST_RAISED = 4.0
# First tokens are late for good where they take so many times their target.
_LATE = 2.0
# Bounds of the correction by which the mean meets the target, and what a step's error moves it.
_CORRECTION, _CORRECTS = (0.5, 2.0), 1e-3
_MEMORY_S = 120.0
# A step misses a TPOT target alone if it is longer by this factor: loads grow while a budget holds.
# The share that may miss it, what one moves the margin, and how far.
_SLACK, _MISSES, _MOVES, _LEAST_MARGIN = 1.02, 0.05, 0.02, 0.5


@dataclass(frozen=True, slots=True)
class Targets:
    """Mean times that users wait, in seconds; None: no target.

    Attributes:
        ttft_s: from the arrival of a request to its first token.
        tpot_s: for each token after the first.

    Raises:
        ConfigError: one is not above 0; names the setting.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("target_ttft", self.ttft_s), ("target_tpot", self.tpot_s)):
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} takes seconds above 0, got {value:g}")


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
    """

    step_s: float
    output_tokens: int
    firsts: int
    unstarted: int
    rest_s: float
    before_tokens: float = 0.0


class PromptBudget:
    """Budgets of one group, step after step.

    Args:
        targets: for the mean over requests.
        most_tokens: the engines' own bound; None: unknown.
    """

    def __init__(self, targets: Targets, most_tokens: int | None = None) -> None:
        self._targets = targets
        self._most = math.inf if most_tokens is None else most_tokens
        # Of the last minutes; older steps count less.
        self._steps = self._seconds = self._tokens = self._firsts = self._unstarted_s = 0.0
        self._correction = self._margin = self._raised = 1.0
        self._tpot_s = targets.tpot_s
        self._prompts_s = self._prompt_token_s = 0.0

    def after(self, seen: StepSeen, cost: StepTime | None) -> int | None:
        """Budget of the coming step; None: the engines' own, where a prompt's cost is unknown."""
        self._remember(seen)
        if cost is None or not cost.per_prompt_token_s:
            return None
        self._prompts_s, self._prompt_token_s = cost.prompts_s(seen.before_tokens)
        self._raised, tpot_s = 1.0, self._targets.tpot_s
        # Requests that may wait for their first token, by Little's law.
        allowed = (self._targets.ttft_s or 0.0) * self._rate(self._firsts)
        if allowed > 0:
            self._raised = _raised(seen.unstarted / allowed)
            if tpot_s is not None:
                late = self._rate(self._unstarted_s) / allowed
                tpot_s *= _raised(late / _LATE)
                self._correct(seen, tpot_s)
                tpot_s *= self._correction
        elif tpot_s is not None:
            tpot_s *= self._keep(seen.step_s > _SLACK * tpot_s)
        self._tpot_s = tpot_s
        return self.tokens(seen.rest_s)

    def tokens(self, rest_s: float) -> int:
        """Budget of a worker alone whose step takes ``rest_s`` without prompts."""
        prompts_s = PROMPTS_SHARE * rest_s
        if self._tpot_s is not None:
            prompts_s = min(prompts_s, self._tpot_s - rest_s)
        tokens_s = max(_LEAST_SHARE * rest_s, self._raised * prompts_s - self._prompts_s)
        most = tokens_s / self._prompt_token_s if self._prompt_token_s else math.inf
        return max(1, int(min(self._most, most, _MOST_TOKENS)))

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
        self._margin = min(1.0, max(_LEAST_MARGIN, moved))
        return self._margin

    def _correct(self, seen: StepSeen, tpot_s: float) -> None:
        """Bring the mean over tokens to the target: a step counts by its tokens."""
        usual = self._tokens / self._steps
        weight = min(2.0, seen.output_tokens / usual) if usual else 0.0
        error = max(-_MOST_RAISED, 1 - seen.step_s / tpot_s)
        least, most = _CORRECTION
        moved = self._correction + _CORRECTS * weight * error
        self._correction = min(most, max(least, moved))


def _raised(share: float) -> float:
    return min(_MOST_RAISED, max(1.0, share))
