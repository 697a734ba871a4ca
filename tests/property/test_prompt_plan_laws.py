"""Laws of the plan for prompts, for every state of the workers."""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import cast
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.policies.bfio import plan_kernel
from router.core.policies.bfio.prompt_plan import PromptPlan
from router.core.policies.prompts import ANEW, EXCESS_STEPS
from tests.support.uncompiled import uncompiled

Kernel = Callable[..., int]


@pytest.fixture(scope="module")
def plain() -> Kernel:
    """The plan where numba is not installed."""
    with uncompiled():
        return cast(Kernel, import_module(plan_kernel.__name__).plan)


@st.composite
def plans(draw: st.DrawFn) -> PromptPlan:
    """Few different numbers, so that there are ties.

    Work or loads cost more, so that loads often rise above the fullest one.
    """
    requests, workers = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    sizes = rng.integers(1, 40, requests)
    unit, loads = draw(st.sampled_from([1024.0, 16.0])), draw(st.sampled_from([5000, 40]))
    cached = np.where(rng.random((requests, workers)) < 0.3, rng.random((requests, workers)), 0.0)
    return PromptPlan(
        work=np.round(unit * sizes[:, None] * (1 - cached)),
        sizes=sizes,
        slots=rng.integers(1, 3, requests),
        waited=unit * rng.integers(0, 60, requests).astype(np.float64),
        pending=unit * np.where(rng.random(workers) < 0.6, rng.integers(0, 60, workers), 0.0),
        loads=rng.integers(0, loads, workers).astype(np.float64),
        capacity=rng.integers(1, 9, workers),
        open_below=unit * draw(st.sampled_from([1, 8, 64])),
        fits=rng.random((requests, workers)) < draw(st.sampled_from([0.7, 1.0])),
    )


def one_by_one(plan: PromptPlan) -> list[tuple[int, int]]:
    """The plan as it is described: the request of least cost, then the next."""
    pending, loads, capacity = plan.pending.copy(), plan.loads.copy(), plan.capacity.copy()
    fits, sent = plan.fits.copy(), []
    left = list(range(len(plan.sizes)))
    while left := [row for row in left if fits[row].any()]:
        excess = np.maximum(0, loads + plan.sizes[left, None] - loads.max())
        costs = pending + ANEW * plan.work[left] + EXCESS_STEPS * excess + 1e-6 * loads
        costs[~fits[left]] = np.inf
        at = int((costs.min(axis=1) - plan.waited[left]).argmin())
        row, worker = left.pop(at), int(costs[at].argmin())
        if pending[worker] < plan.open_below:
            sent.append((row, worker))
            capacity[worker] -= plan.slots[row]
            fits[:, worker] &= capacity[worker] > 0
        pending[worker] += plan.work[row, worker]
        loads[worker] += plan.sizes[row]
    return sent


@given(plan=plans())
def test_what_is_sent_is_sent_once_to_a_worker_that_is_open_and_fits(plan: PromptPlan) -> None:
    sent = plan.sent()
    assert len({row for row, _ in sent}) == len(sent)
    pending = plan.pending.copy()
    for row, worker in sent:
        assert plan.fits[row, worker]
        assert pending[worker] < plan.open_below
        pending[worker] += plan.work[row, worker]


@given(plan=plans())
def test_who_waits_waits_for_a_worker_that_is_busy(plan: PromptPlan) -> None:
    rows = {row for row, _ in plan.sent()}
    pending, capacity = plan.pending.copy(), plan.capacity.copy()
    for row, worker in plan.sent():
        pending[worker] += plan.work[row, worker]
        capacity[worker] -= plan.slots[row]
    left = [row for row in range(len(plan.sizes)) if row not in rows]
    waits = [row for row in left if (plan.fits[row] & (capacity > 0)).any()]
    # Planned ones before it count as well, wherever they are.
    assert not waits or (pending.sum() + plan.work[waits].max(axis=1).sum() >= plan.open_below)


@given(plan=plans())
def test_nobody_is_held_while_another_worker_costs_less(plan: PromptPlan) -> None:
    """Prompts alone: loads hold nobody up here."""
    plan = replace(plan, sizes=0 * plan.sizes, loads=0 * plan.loads)
    pending, capacity = plan.pending.copy(), plan.capacity.copy()
    held = {*range(len(plan.sizes))}
    for row, worker in plan.sent():
        held.remove(row)
        pending[worker] += plan.work[row, worker]
        capacity[worker] -= plan.slots[row]
    for row in held:
        costs = pending + ANEW * plan.work[row]
        busy = plan.fits[row] & (pending >= plan.open_below)
        could = plan.fits[row] & ~busy & (capacity > 0)
        assert not could.any() or costs[busy].min() <= costs[could].min() + 1


@given(plan=plans())
def test_an_idle_group_computes_at_once(plan: PromptPlan) -> None:
    idle = replace(plan, pending=np.zeros_like(plan.pending))
    assert bool(idle.sent()) == bool(plan.fits.any())


@settings(max_examples=500)
@given(plan=plans())
def test_the_least_cost_goes_first_then_the_next(plan: PromptPlan) -> None:
    assert plan.sent() == one_by_one(plan)


@given(plan=plans())
def test_compiled_or_not_it_is_the_same(plain: Kernel, plan: PromptPlan) -> None:
    with patch.object(plan_kernel, "plan", plain):
        slow = plan.sent()
    assert plan.sent() == slow


@given(plan=plans())
def test_a_plan_is_left_as_it_was(plan: PromptPlan) -> None:
    """It can be asked twice."""
    assert plan.sent() == plan.sent()
