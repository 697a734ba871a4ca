"""Laws of the fluid model, of its thresholds and of the buffers of Nested WAIT."""

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from engine_patches.admission.theory.fluid import (
    Flow,
    combined,
    equilibrium,
    sustainable_share,
)
from engine_patches.admission.theory.thresholds import (
    best_nested,
    decay_rate,
    equal_segments,
    least_nested,
    least_wait,
    nested_conditions,
    nested_memory,
    wait_conditions,
)
from router.core.step_time import StepTime

flows = st.lists(
    st.builds(Flow, st.floats(0.01, 50), st.integers(1, 200), st.integers(0, 60)),
    min_size=1,
    max_size=6,
)
costs = st.builds(
    StepTime, st.floats(1e-3, 1), st.floats(0, 1e-4), st.floats(0, 1e-3), st.floats(0, 1e-4)
)
tokens = st.integers(1, 10**6)


@given(types=flows, cost=costs, capacity=tokens)
def test_the_equilibrium_is_a_fixed_point(types: list[Flow], cost: StepTime, capacity: int) -> None:
    found = equilibrium(types, cost)
    columns = [flow.everywhere for flow in types]

    if not found.stable:
        assert math.isinf(found.memory_tokens)
        return
    batch = combined([flow.rate * found.step_s for flow in types], columns)
    assert cost.base_s + batch.work_s(cost) == pytest.approx(found.step_s)
    assert batch.kv_tokens == pytest.approx(found.memory_tokens)
    assert batch.requests == pytest.approx(sum(found.requests))
    share = sustainable_share(types, cost, capacity)
    assert (share >= 1) == (capacity >= found.memory_tokens * (1 - 1e-12)) or share == (
        pytest.approx(1)
    )


@given(types=flows, cost=costs, data=st.data())
def test_wait_thresholds_are_valid_and_none_is_too_high(
    types: list[Flow], cost: StepTime, data: st.DataObject
) -> None:
    floor = data.draw(st.lists(st.integers(1, 20), min_size=len(types), max_size=len(types)))
    assume(not 0.99 < equilibrium(types, cost).load < 1)

    found = least_wait(types, cost, floor)

    assert (found is None) == (not equilibrium(types, cost).stable)
    if found is None:
        return
    assert all(condition.holds for condition in wait_conditions(found, types, cost))
    for j, (n, least) in enumerate(zip(found, floor, strict=True)):
        if n > least:
            lower = [*found[:j], n - 1, *found[j + 1 :]]
            assert not all(each.holds for each in wait_conditions(lower, types, cost))


@given(types=flows, cost=costs, count=st.integers(1, 6), slack=st.floats(0, 1))
def test_nested_thresholds_are_valid(
    types: list[Flow], cost: StepTime, count: int, slack: float
) -> None:
    segments = equal_segments(types, count)

    found = least_nested(segments, cost, slack=slack)

    if found is None:
        return
    assert equilibrium(types, cost).stable
    assert all(condition.holds for condition in nested_conditions(found, segments, cost))
    assert list(found) == sorted(found, reverse=True)
    assert math.isfinite(nested_memory(found, segments, 1e6, 1e-3).tokens)


@given(types=flows, prompt=st.integers(1, 200), cost=costs, count=st.integers(1, 6))
def test_a_plan_needs_more_than_the_equilibrium(
    types: list[Flow], prompt: int, cost: StepTime, count: int
) -> None:
    """Of one length of prompts: a segment counts them with their mean."""
    alike = [replace(flow, prompt_tokens=prompt) for flow in types]

    plan = best_nested(equal_segments(alike, count), cost, 1e6, 1e-3)

    if plan is not None:
        assert plan.memory.tokens > equilibrium(alike, cost).memory_tokens


@given(before=st.integers(2, 1000), passing=st.floats(0.01, 0.99), place=st.floats(0.001, 0.999))
def test_the_decay_rate_solves_20_above_its_bound(
    before: int, passing: float, place: float
) -> None:
    after = before * (passing + (1 - passing) * place)
    theta = decay_rate(before, after, passing)

    assert 8 * (after - before * passing) / before <= theta * (1 + 1e-9) < math.inf
    log_mean = theta + math.log(passing + (1 - passing) * math.exp(-theta))
    assert before * log_mean - theta * after == pytest.approx(0, abs=1e-6 * (1 + theta * after))


@given(before=st.integers(3, 500), passing=st.floats(0.05, 0.95), data=st.data())
def test_more_room_makes_long_queues_rarer(
    before: int, passing: float, data: st.DataObject
) -> None:
    spare = st.floats(0.01, 0.99).map(lambda part: before * (passing + (1 - passing) * part))
    less, more = sorted((data.draw(spare), data.draw(spare)))

    assert decay_rate(before, less, passing) <= decay_rate(before, more, passing) * (1 + 1e-9)
