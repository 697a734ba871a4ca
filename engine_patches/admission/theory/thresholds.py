"""Thresholds of WAIT and Nested WAIT: their validity, the least valid ones, and their memory.

Sections 4, 5 and 7 of arXiv 2504.11320: (11), (12), (15) and (16). Memory is the plain sum over the
stages. (13) counts the lengths of all earlier segments twice, and the sum before (16) places a
segment's middle at half its end; neither is used. There are as many thresholds as flows or
segments.

The safety buffers of Nested WAIT, (14) and (17), depend on theta_k, the solution of (20), solved
here numerically. Of the paper's two bounds for it, Lemma 8's, 8 D / n_{k-1} with
D = n_k - p n_{k-1}, holds. (14)'s, 8 D / n_k, can lie above the solution, and then the buffer is
too small. p is the share that passes from segment k-1 to k, p_{k-1} in the notation of (12).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import le

from engine_patches.admission.theory.fluid import Batch, Flow, combined
from router.core.step_time import StepTime

# Tolerance for ratios of printed integers that are meant to be equal.
_SAME = 1e-9
# With a load so near to 1 that it takes more rounds, the result is least up to one percent.
_EXACT_ROUNDS = 2000
_EXACT_WORK = 50_000
_STRIDE = 1.01

Thresholds = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """Requests in a range of stages, whatever their final lengths."""

    # first_stage, last_stage: both included.
    first_stage: int
    last_stage: int
    rate: float  # requests per second that enter it
    passing: float  # share of these that pass to the next; 0 for the last
    prompt_tokens: float  # mean

    @property
    def everywhere(self) -> Batch:
        """One request in every stage."""
        stages = self.last_stage - self.first_stage + 1
        middle = (self.first_stage + self.last_stage) / 2
        prompt = self.prompt_tokens if self.first_stage == 0 else 0.0
        return Batch(stages * (self.prompt_tokens + middle), stages, prompt)


def segments_of(flows: Sequence[Flow], last_stages: Sequence[int]) -> tuple[Segment, ...]:
    """Cut the stages into segments that end at ``last_stages``, ascending to the greatest l'."""
    assert last_stages[-1] == max(flow.decode_steps for flow in flows), "some would never end"
    segments = []
    for before, last in pairwise((-1, *last_stages)):
        entering = [flow for flow in flows if flow.decode_steps > before]
        rate = math.fsum(flow.rate for flow in entering)
        passing = math.fsum(flow.rate for flow in entering if flow.decode_steps > last)
        prompts = math.fsum(flow.rate * flow.prompt_tokens for flow in entering)
        segments.append(Segment(before + 1, last, rate, passing / rate, prompts / rate))
    return tuple(segments)


def equal_segments(flows: Sequence[Flow], count: int) -> tuple[Segment, ...]:
    """Cut into segments in which equally many different l' end (section 7.2)."""
    lengths = sorted({flow.decode_steps for flow in flows})
    count = min(count, len(lengths))
    return segments_of(flows, [lengths[len(lengths) * k // count - 1] for k in range(1, count + 1)])


def worst_of(periods: Sequence[Sequence[Segment]]) -> tuple[Segment, ...]:
    """Segments that (15) requires for changing rates: the maxima over all periods."""
    names = ("rate", "passing", "prompt_tokens")
    return tuple(
        replace(same[0], **{name: max(getattr(one, name) for one in same) for name in names})
        for same in zip(*periods, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Condition:
    """``value``, in the unit of ``limit``, must be less than it."""

    what: str
    value: float
    limit: float

    @property
    def edge(self) -> bool:
        """Queues grow as the square root of time, buffers without bound."""
        return math.isclose(self.value, self.limit, rel_tol=_SAME)

    @property
    def holds(self) -> bool:
        return self.value < self.limit and not self.edge

    def __str__(self) -> str:
        return f"{self.what}: {self.value:.6g} against {self.limit:.6g}"


def wait_conditions(
    thresholds: Sequence[float], flows: Sequence[Flow], cost: StepTime
) -> list[Condition]:
    """(11) for each flow; on the edge it still holds there, with growing latencies."""
    batch = combined(thresholds, [flow.everywhere for flow in flows])
    step_s = cost.base_s + batch.work_s(cost)
    return [
        Condition(f"(11) step of full batch < n_{j} / lambda_{j}", step_s, threshold / flow.rate)
        for j, (threshold, flow) in enumerate(zip(thresholds, flows, strict=True), 1)
    ]


def nested_conditions(
    thresholds: Sequence[float], segments: Sequence[Segment], cost: StepTime
) -> list[Condition]:
    """(12), or (16) if types share segments; (15) for the segments of ``worst_of``."""
    batch = combined(thresholds, [segment.everywhere for segment in segments])
    step_s = cost.base_s + batch.work_s(cost)
    first = thresholds[0] / segments[0].rate
    found = [Condition("(12) step of full batch < n_1 / lambda", step_s, first)]
    pairs = zip(segments[:-1], pairwise(thresholds), strict=True)
    return found + [
        Condition(f"(12) p_{k} < n_{k + 1} / n_{k}", segment.passing, following / n)
        for k, (segment, (n, following)) in enumerate(pairs, 1)
    ]


def least_wait(
    flows: Sequence[Flow], cost: StepTime, at_least: Sequence[int] | None = None
) -> Thresholds | None:
    """Least integer thresholds, none below ``at_least``, for which (11) holds strictly.

    None: the flows are unstable.
    """
    columns = [flow.everywhere for flow in flows]
    least = tuple(at_least or [1] * len(flows))

    def needed(step_s: float) -> Thresholds:
        return tuple(max(n, _above(f.rate * step_s)) for n, f in zip(least, flows, strict=True))

    load = combined([flow.rate for flow in flows], columns).work_s(cost)
    return _settled(needed, columns, cost, load)


def least_nested(
    segments: Sequence[Segment],
    cost: StepTime,
    at_least: Sequence[int] | None = None,
    slack: float = 0.0,
) -> Thresholds | None:
    """Least integer thresholds, none below ``at_least``, for which (12) or (16) holds.

    ``slack`` is the share by which n_{k+1} exceeds p_k n_k, as far as it stays at or below n_k.
    None: there are none with such a slack.
    """
    columns = [segment.everywhere for segment in segments]
    least = tuple(at_least or [1] * len(segments))
    shares = [
        max(segment.passing, min(1.0, segment.passing * (1 + slack))) for segment in segments[:-1]
    ]

    def needed(step_s: float) -> Thresholds:
        found = [max(least[0], _above(segments[0].rate * step_s))]
        for n, segment, share in zip(least[1:], segments, shares, strict=False):
            wanted = max(_above(segment.passing * found[-1]), math.ceil(share * found[-1] - _SAME))
            found.append(max(n, wanted))
        return tuple(found)

    sizes = [segments[0].rate]
    for share in shares:
        sizes.append(share * sizes[-1])
    load = combined(sizes, columns).work_s(cost)
    return _settled(needed, columns, cost, load)


def _above(value: float) -> int:
    """Least integer above a value that may be an integer up to rounding."""
    return math.floor(value * (1 + _SAME)) + 1


def _settled(
    needed: Callable[[float], Thresholds], columns: Sequence[Batch], cost: StepTime, load: float
) -> Thresholds | None:
    """Least thresholds that satisfy the step time which they cause.

    They exist if the load is below 1, with a small tolerance for each threshold.
    """
    if load * (1 + _SAME) ** len(columns) >= 1:
        return None
    exact_rounds = min(_EXACT_ROUNDS, _EXACT_WORK // len(columns))
    step_s, rounds = cost.base_s, 0
    while True:
        thresholds = needed(step_s)
        then_s = cost.base_s + combined(thresholds, columns).work_s(cost)
        if all(map(le, needed(then_s), thresholds)):
            return thresholds
        rounds += 1
        step_s = then_s if rounds < exact_rounds else max(then_s, step_s * _STRIDE)


@dataclass(frozen=True, slots=True)
class Validity:
    """Whether thresholds are valid; ``nearest``: the smallest valid ones, none below these."""

    thresholds: Thresholds
    conditions: tuple[Condition, ...]
    nearest: Thresholds | None

    @property
    def missed(self) -> list[Condition]:
        """The violated conditions, else those on the edge."""
        missed = [condition for condition in self.conditions if not condition.holds]
        return [condition for condition in missed if not condition.edge] or missed


def wait_validity(thresholds: Sequence[int], flows: Sequence[Flow], cost: StepTime) -> Validity:
    """Evaluate (11), for as many thresholds as types."""
    given = tuple(thresholds)
    conditions = tuple(wait_conditions(given, flows, cost))
    return Validity(given, conditions, least_wait(flows, cost, given))


def nested_validity(
    thresholds: Sequence[int], segments: Sequence[Segment], cost: StepTime
) -> Validity:
    """Evaluate (12) or (16), for as many thresholds as segments."""
    given = tuple(thresholds)
    conditions = tuple(nested_conditions(given, segments, cost))
    return Validity(given, conditions, least_nested(segments, cost, given))


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
