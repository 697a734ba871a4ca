"""Question and answer of ``evenstep fluid``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine_patches.admission.theory.fluid import (
    Equilibrium,
    Flow,
    combined,
    equilibrium,
    sustainable_share,
)
from engine_patches.admission.theory.thresholds import (
    Condition,
    NestedPlan,
    Segment,
    Thresholds,
    Validity,
    best_nested,
    equal_segments,
    least_wait,
    nested_memory,
    nested_validity,
    wait_validity,
    worst_of,
)
from router.commands.json_output import finite
from router.core.step_time import StepTime

# Relative tolerance of sums that should be whole.
ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class Question:
    """Types with their rates in each period, usually one; ``steps`` and ``delta`` of buffers."""

    periods: tuple[tuple[Flow, ...], ...]
    cost: StepTime
    capacity_tokens: int | None
    thresholds: Thresholds
    nested_thresholds: Thresholds
    segments: tuple[int, ...]
    steps: float
    delta: float

    @property
    def flows(self) -> tuple[Flow, ...]:
        """The types at their greatest rates, as (15) takes them."""
        return tuple(
            max(same, key=lambda flow: flow.rate) for same in zip(*self.periods, strict=True)
        )

    def cut(self, count: int) -> tuple[Segment, ...]:
        """The types in a number of segments, each at its worst."""
        return worst_of([equal_segments(flows, count) for flows in self.periods])


@dataclass(frozen=True, slots=True)
class Check:
    """Whether given thresholds are valid, and the memory that they need."""

    policy: str
    found: Validity
    memory_tokens: float


@dataclass(frozen=True, slots=True)
class Answer:
    """Least thresholds of WAIT, and plans of Nested WAIT by number of segments; None: none."""

    question: Question
    equilibria: tuple[Equilibrium, ...]
    wait: Thresholds | None
    checks: tuple[Check, ...]
    plans: dict[int, NestedPlan | None]

    @property
    def best(self) -> NestedPlan | None:
        plans = [plan for plan in self.plans.values() if plan is not None]
        return min(plans, key=lambda plan: plan.memory.tokens, default=None)

    def batch_tokens(self, thresholds: Sequence[int]) -> float:
        flows = self.question.flows
        return combined(thresholds, [flow.everywhere for flow in flows]).kv_tokens

    def short_tokens(self, needed: float) -> float | None:
        """Tokens that the capacity falls short by; None if it was not given."""
        capacity = self.question.capacity_tokens
        if capacity is None:
            return None
        return needed - capacity if needed > capacity * (1 + ROUNDING) else 0.0


def answered(question: Question) -> Answer:
    """Analyse a question."""
    cost, flows, checks = question.cost, question.flows, []
    if given := question.thresholds:
        batch = combined(given, [flow.everywhere for flow in flows])
        checks.append(Check("wait", wait_validity(given, flows, cost), batch.kv_tokens))
    if given := question.nested_thresholds:
        segments = question.cut(len(given))
        memory = nested_memory(given, segments, question.steps, question.delta)
        valid = nested_validity(given, segments, cost)
        checks.append(Check("nested_wait", valid, memory.tokens))
    return Answer(
        question,
        tuple(equilibrium(period, cost) for period in question.periods),
        least_wait(flows, cost),
        tuple(checks),
        {
            count: best_nested(question.cut(count), cost, question.steps, question.delta)
            for count in question.segments
        },
    )


def report(answer: Answer) -> dict[str, Any]:
    """JSON-able form; null for infinite or missing values."""
    question = answer.question
    best = answer.best
    wait_tokens = None if answer.wait is None else answer.batch_tokens(answer.wait)
    return {
        "types": len(question.flows),
        "capacity_tokens": question.capacity_tokens,
        "periods": [
            _period(answer, *each) for each in zip(question.periods, answer.equilibria, strict=True)
        ],
        "wait": {"thresholds": answer.wait} | _memory(answer, wait_tokens),
        "nested_wait": {
            "best_segments": None if best is None else len(best.thresholds),
            "by_segments": [_plan(answer, count, plan) for count, plan in answer.plans.items()],
        },
        "checks": [
            {
                "policy": check.policy,
                "thresholds": check.found.thresholds,
                "valid": not check.found.missed,
                "conditions": [
                    {
                        "condition": each.what,
                        "value": each.value,
                        "limit": each.limit,
                        "verdict": verdict(each),
                    }
                    for each in check.found.conditions
                ],
                "nearest": check.found.nearest,
                **_memory(answer, check.memory_tokens),
            }
            for check in answer.checks
        ],
    }


def _memory(answer: Answer, tokens: float | None) -> dict[str, Any]:
    short = None if tokens is None else answer.short_tokens(tokens)
    return {
        "memory_tokens": finite(tokens),
        "enough_memory": None if short is None else short == 0,
        "short_tokens": finite(short),
    }


def _period(answer: Answer, flows: Sequence[Flow], found: Equilibrium) -> dict[str, Any]:
    capacity = answer.question.capacity_tokens
    share = None if capacity is None else sustainable_share(flows, answer.question.cost, capacity)
    return {
        "stable": found.stable,
        "load": found.load,
        "step_s": finite(found.step_s),
        "throughput_tok_s": found.decode_tok_s,
        "requests": [finite(count) for count in found.requests],
        "sustainable_share": share,
    } | _memory(answer, found.memory_tokens)


def _plan(answer: Answer, count: int, plan: NestedPlan | None) -> dict[str, Any]:
    if plan is None:
        return {"segments": count, "thresholds": None}
    memory = plan.memory
    return {
        "segments": count,
        "last_stages": [segment.last_stage for segment in answer.question.cut(count)],
        "thresholds": plan.thresholds,
        "batch_tokens": memory.batch_tokens,
        "queue_tokens": memory.queue_tokens,
        "buffer_tokens": finite(memory.buffer_tokens),
    } | _memory(answer, memory.tokens)


def verdict(condition: Condition) -> str:
    """One word for a condition."""
    if condition.edge:
        return "edge"
    return "holds" if condition.holds else "broken"
