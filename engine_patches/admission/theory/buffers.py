"""Memory that Nested WAIT needs, with its safety buffers: Theorems 2 and 4 of arXiv 2504.11320.

The buffers of (14) and (17) depend on theta_k, the solution of (20), solved here numerically. Of
the paper's two bounds for it, Lemma 8's, 8 D / n_{k-1} with D = n_k - p n_{k-1}, holds. (14)'s,
8 D / n_k, can lie above the solution, and then the buffer is too small. p is the share that passes
from segment k-1 to k, p_{k-1} in the notation of (12).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from engine_patches.admission.theory.fluid import combined
from engine_patches.admission.theory.thresholds import Segment, Thresholds, least_nested
from router.core.step_time import StepTime


def decay_rate(before: float, after: float, passing: float) -> float:
    """Solve (20) for theta, the decay rate of the probability of a long queue before a segment.

    In each step ``before`` (n_{k-1}) requests end the previous segment, each passes on with
    probability ``passing``, and ``after`` (n_k) are taken up:
    P(queue >= after + c) <= exp(-theta c). Theta, per request, is 0 if the queue has no bound (at
    the edge of (12), or past it), infinite if it never exceeds ``after``.
    """
    if after >= before or passing == 0:
        return math.inf
    if after <= before * passing or math.isclose(after, before * passing, rel_tol=1e-9):
        return 0.0
    low = 8 * (after - before * passing) / before  # (22)
    high = before * -math.log(passing) / (before - after)
    for _ in range(200):  # enough bisections for an interval of 53-bit numbers
        middle = (low + high) / 2
        # ln(1 - p + p e^theta) - theta, without overflow.
        log_mean = math.log1p((1 - passing) * math.expm1(-middle))
        if log_mean * before < (after - before) * middle:
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True, slots=True)
class NestedMemory:
    """Sufficient memory for Nested WAIT, (17)."""

    batch_tokens: float  # M_pi, all stages full
    queue_tokens: float  # queues as long as the entries of each later segment in a step
    buffer_tokens: float  # queues that are longer by chance

    @property
    def tokens(self) -> float:
        return self.batch_tokens + self.queue_tokens + self.buffer_tokens


def nested_memory(
    thresholds: Sequence[float], segments: Sequence[Segment], steps: float, delta: float
) -> NestedMemory:
    """Memory exceeded with probability at most ``delta``, over B ``steps`` and all segments."""
    batch = combined(thresholds, [segment.everywhere for segment in segments])
    odds = math.log(max(1, len(segments) - 1) * steps) - math.log(delta)
    queue_tokens = buffer_tokens = 0.0
    for (before, after), (earlier, segment) in zip(
        pairwise(thresholds), pairwise(segments), strict=True
    ):
        held_tokens = segment.prompt_tokens + earlier.last_stage
        theta = decay_rate(before, after, earlier.passing)
        queue_tokens += held_tokens * after
        buffer_tokens += held_tokens * odds / theta if theta else math.inf
    return NestedMemory(batch.kv_tokens, queue_tokens, buffer_tokens)


@dataclass(frozen=True, slots=True)
class NestedPlan:
    """``slack``: share by which n_{k+1} was to exceed p_k n_k."""

    thresholds: Thresholds
    slack: float
    memory: NestedMemory


def best_nested(
    segments: Sequence[Segment], cost: StepTime, steps: float, delta: float
) -> NestedPlan | None:
    """Valid thresholds with the least memory, with one slack for all segments."""
    plans = []
    for slack in _SLACKS:
        thresholds = least_nested(segments, cost, slack=slack)
        if thresholds is not None:
            memory = nested_memory(thresholds, segments, steps, delta)
            plans.append(NestedPlan(thresholds, slack, memory))
    return min(plans, key=lambda plan: plan.memory.tokens, default=None)


_SLACKS = (0.0, *(2.0 ** (k / 2) for k in range(-16, 1)))
