"""BF-IO's work profile as a group's own steps show it: nobody has to know it."""

import math
from dataclasses import dataclass, replace

from router.core.forecast.forecast import DEFAULT_CHUNK, WorkProfile
from router.core.step_fit import FittedStepTime
from router.core.step_time import StepTime

# t_p / t_l while no step with prompts is known; measured ratios lie between 50 and 530.
PROMPT_RATIO = 200.0
# Below, in KV tokens' worth, a request or a prompt token costs nothing worth a decision.
_LEAST_REQUEST, _LEAST_PROMPT = 1.0, 0.1
# Above, KV tokens would be lost in rounding.
_MOST = 1e5
# A profile is kept until one of its numbers moves by more, or leaves its interval.
_MOVES = 0.05


@dataclass(frozen=True, slots=True)
class Shown:
    """What engines show of their requests.

    Attributes:
        window, window_share: as in ``WorkProfile``.
    """

    growth: float = 1.0  # output tokens of a request in a step, accepted drafts included
    chunk: int = DEFAULT_CHUNK  # prompt tokens that a step computes where more are left
    window: int | None = None
    window_share: float = 1.0
    # Whether a guess of what prompts cost is better than none: they may compute prompts, since no
    # request has begun without, and have caches or tell of no steps.
    prompts: bool = False


def learned(before: WorkProfile, cost: StepTime | None, shown: Shown) -> WorkProfile:
    """The profile by now, in KV tokens' worth; numbers that have moved by noise only are kept.

    Where KV tokens cost too little to be seen, as with MLA, they count as the most that they may
    cost: prompts then decide, and KV tokens decide among equals. So one unit serves both, and the
    profile is continuous as evidence comes in. A prompt token of which nothing is known costs
    ``PROMPT_RATIO`` where engines compute prompts and have caches, which the router would pass over
    at first, or tell of no steps, so that it would never learn.
    """
    request, prompt = before.request_tokens, before.prefill_beta
    if prompt == PROMPT_RATIO:  # a guess is no evidence
        prompt = 0.0
    if cost is not None:
        # 95 % intervals of the four; configured numbers are certain.
        certain = tuple((number, number) for number in cost.numbers)
        found = cost.intervals if isinstance(cost, FittedStepTime) else certain
        _, token, by_request, by_prompt = found
        unit = cost.per_token_s if token[0] > 0 else token[1]
        unit = max(unit, cost.per_request_s / _MOST, cost.per_prompt_token_s / _MOST)
        request = _ratio(request, cost.per_request_s, by_request, unit, token, _LEAST_REQUEST)
        prompt = _ratio(prompt, cost.per_prompt_token_s, by_prompt, unit, token, _LEAST_PROMPT)
    if shown.prompts and not (cost is not None and cost.prompts_known):
        prompt = prompt or PROMPT_RATIO
    return replace(
        before,
        growth=before.growth if _near(before.growth, shown.growth) else shown.growth,
        window=shown.window,
        window_share=shown.window_share,
        request_tokens=request,
        prefill_beta=prompt,
        prefill_chunk=(
            before.prefill_chunk if _near(before.prefill_chunk, shown.chunk) else shown.chunk
        ),
    )


_Interval = tuple[float, float]


def _ratio(
    before: float, cost_s: float, cost: _Interval, unit_s: float, token: _Interval, least: float
) -> float:
    """A cost in KV tokens' worth; 0 if it may be none."""
    if cost[0] <= 0 or cost_s < least * unit_s:
        return 0.0
    ratio = cost_s / unit_s
    low = cost[0] / token[1] if token[1] > 0 else ratio
    high = cost[1] / token[0] if token[0] > 0 else math.inf
    kept = before > 0 and (low <= before <= high or _near(before, ratio))
    return before if kept else ratio


def _near(before: float, now: float) -> bool:
    return abs(now - before) <= _MOVES * before
