"""Laws of the plan for prompts, for every state of the workers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from router.core.policies.bfio.prompt_plan import PromptPlan
from router.core.policies.prompts import EXCESS_STEPS


@st.composite
def plans(draw: st.DrawFn) -> PromptPlan:
    """Few different numbers, so that there are ties, and all costs are exact in floats."""
    requests, workers = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    sizes = rng.integers(1, 40, requests)
    cached = np.where(rng.random((requests, workers)) < 0.3, rng.random((requests, workers)), 0.0)
    return PromptPlan(
        work=np.round(1024.0 * sizes[:, None] * (1 - cached)),
        sizes=sizes,
        waited=1024.0 * rng.integers(0, 60, requests).astype(np.float64),
        pending=1024.0 * np.where(rng.random(workers) < 0.6, rng.integers(0, 60, workers), 0.0),
        loads=rng.integers(0, 5000, workers).astype(np.float64),
        open_below=1024.0 * draw(st.sampled_from([1, 8, 64])),
        fits=rng.random((requests, workers)) < draw(st.sampled_from([0.7, 1.0])),
        barrier=draw(st.booleans()),
    )


def one_by_one(plan: PromptPlan) -> set[tuple[int, int]]:
    """The plan as it is described: the request of least cost, then the next."""
    pending, loads, sent = plan.pending.copy(), plan.loads.copy(), set()
    left = [row for row in range(len(plan.sizes)) if plan.fits[row].any()]
    while left:
        after = loads + plan.sizes[left, None]
        if plan.barrier:
            after = np.maximum(0, after - loads.max())
        costs = pending + plan.work[left] + EXCESS_STEPS * after + 1e-6 * loads
        costs[~plan.fits[left]] = np.inf
        at = int((costs.min(axis=1) - plan.waited[left]).argmin())
        row, worker = left.pop(at), int(costs[at].argmin())
        if pending[worker] < plan.open_below:
            sent.add((row, worker))
        pending[worker] += plan.work[row, worker]
        loads[worker] += plan.sizes[row]
    return sent


@given(plan=plans())
def test_what_is_sent_is_sent_once_to_a_worker_that_is_open_and_fits(plan: PromptPlan) -> None:
    sent = list(plan.sent())
    assert len({row for row, _ in sent}) == len(sent)
    pending = plan.pending.copy()
    for row, worker in sent:
        assert plan.fits[row, worker]
        assert pending[worker] < plan.open_below
        pending[worker] += plan.work[row, worker]


@given(plan=plans())
def test_who_waits_waits_for_a_worker_that_is_busy(plan: PromptPlan) -> None:
    rows = {row for row, _ in plan.sent()}
    pending = plan.pending.copy()
    for row, worker in plan.sent():
        pending[worker] += plan.work[row, worker]
    waits = [row for row in range(len(plan.sizes)) if row not in rows and plan.fits[row].any()]
    # Planned ones before it count as well, wherever they are.
    assert not waits or (pending.sum() + plan.work[waits].max(axis=1).sum() >= plan.open_below)


@given(plan=plans())
def test_an_idle_group_computes_at_once(plan: PromptPlan) -> None:
    idle = PromptPlan(
        plan.work,
        plan.sizes,
        plan.waited,
        np.zeros_like(plan.pending),
        plan.loads,
        plan.open_below,
        plan.fits,
        plan.barrier,
    )
    assert bool(list(idle.sent())) == bool(plan.fits.any())


@given(plan=plans())
def test_passes_give_what_one_by_one_gives(plan: PromptPlan) -> None:
    """A pass is many steps; they agree where nothing is equal and the fullest load stays so."""
    flat = np.full_like(plan.loads, 1e9)
    flat[0] = 2e9
    level = PromptPlan(
        plan.work + np.random.default_rng(0).random(plan.work.shape),
        plan.sizes,
        plan.waited + np.arange(len(plan.sizes)) / 64,
        plan.pending,
        flat,
        plan.open_below,
        plan.fits,
        barrier=True,
    )
    assert set(level.sent()) == one_by_one(level)
