"""The fluid equilibrium of one engine: arXiv 2504.11320, section 3."""

import math

import pytest

from engine_patches.admission.theory.fluid import (
    Batch,
    Flow,
    combined,
    equilibrium,
    sustainable_share,
)
from router.core.step_time import StepTime

# Low and high demand of section 6.1, in requests per second as its engine would see them.
TWO = (Flow(10.0, 10, 10), Flow(10.0, 10, 20))
COST = StepTime(6.97e-3, 0.093e-6, 75.7e-6, 2e-5)


def test_example_2_of_the_paper() -> None:
    found = equilibrium([Flow(4, 1, 1)], StepTime(1))

    assert (found.memory_tokens, found.requests, found.decode_tok_s) == (12, (8,), 4)
    assert found.stable
    assert found.load == 0


def test_one_type_is_equation_5() -> None:
    flow, cost = Flow(3.0, 20, 100), StepTime(0.01, 1e-5)
    work = cost.per_token_s * flow.rate * 101 * (20 + 50)

    found = equilibrium([flow], cost)

    assert found.load == pytest.approx(work)
    assert found.memory_tokens == pytest.approx(0.01 * 3.0 * 101 * 70 / (1 - work))


def test_a_stage_holds_the_prompt_and_what_was_decoded() -> None:
    flow = Flow(1.0, 7, 5)

    assert flow.everywhere == Batch(sum(7 + s for s in range(6)), 6, 7)


def test_requests_settle_at_the_equilibrium() -> None:
    """Step by step, as many as arrive in one enter the next, and each moves on by a stage."""
    stages = [[0.0] * (flow.decode_steps + 1) for flow in TWO]
    step_s = COST.base_s
    for _ in range(400):
        for flow, counts in zip(TWO, stages, strict=True):
            counts.insert(0, flow.rate * step_s)
            counts.pop()
        held = sum(
            count * (flow.prompt_tokens + stage)
            for flow, counts in zip(TWO, stages, strict=True)
            for stage, count in enumerate(counts)
        )
        prompts = sum(f.prompt_tokens * counts[0] for f, counts in zip(TWO, stages, strict=True))
        step_s = COST.seconds(held, sum(map(sum, stages)), prompts)

    found = equilibrium(TWO, COST)

    assert step_s == pytest.approx(found.step_s)
    assert held == pytest.approx(found.memory_tokens)
    assert [sum(counts) for counts in stages] == pytest.approx(found.requests)


@pytest.mark.parametrize("share", [1.0, 1.5])
def test_unstable_from_a_load_of_one(share: float) -> None:
    flow = Flow(2.0, 10, 9)
    cost = StepTime(0.01, share / (flow.rate * flow.everywhere.kv_tokens))

    found = equilibrium([flow], cost)

    assert found.load == pytest.approx(share)
    assert not found.stable
    assert math.isinf(found.memory_tokens)
    assert math.isinf(found.step_s)


@pytest.mark.parametrize("rate", [10.0, 400.0])
def test_the_rates_that_a_memory_sustains(rate: float) -> None:
    flows = [Flow(rate, 10, 10), Flow(rate, 10, 20)]
    capacity = 500.0

    share = sustainable_share(flows, COST, capacity)

    slower = [Flow(rate * share, flow.prompt_tokens, flow.decode_steps) for flow in flows]
    assert equilibrium(slower, COST).memory_tokens == pytest.approx(capacity)


def test_a_batch_is_a_sum() -> None:
    assert combined([2, 3], [Batch(10, 1, 4), Batch(1, 1, 0)]) == Batch(23, 5, 8)
    with pytest.raises(ValueError, match="shorter"):
        combined([2, 3], [Batch(10, 1, 4)])
