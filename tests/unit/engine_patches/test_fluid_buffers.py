"""Safety buffers of Nested WAIT: (14), (17) and (20) of arXiv 2504.11320, against exact chances."""

import math

import numpy as np
import pytest

from engine_patches.admission.theory.fluid import Flow, equilibrium
from engine_patches.admission.theory.thresholds import (
    NestedMemory,
    best_nested,
    decay_rate,
    equal_segments,
    nested_conditions,
    nested_memory,
)
from router.core.step_time import StepTime

SETTINGS = [(40, 21, 0.5), (100, 62, 0.6), (15, 15 - 1, 14 / 15 - 0.05), (66, 44, 43 / 66)]
LMSYS_RATES = (23, 11, 8, 7, 6, 4, 3, 2, 1, 1)


def passing_chances(before: int, passing: float) -> list[float]:
    return [
        math.comb(before, k) * passing**k * (1 - passing) ** (before - k) for k in range(before + 1)
    ]


def chance_of_a_long_queue(
    before: int, after: int, passing: float, level: int, steps: int
) -> float:
    """That the queue before a segment reaches a level in some step, exactly.

    The queue of appendix C: W <- W + Y - n 1{W + Y >= n} with Y binomial, begun empty.
    """
    moves = np.zeros((level + 1, level + 1))
    moves[level, level] = 1.0
    for queue in range(level):
        for came, chance in enumerate(passing_chances(before, passing)):
            then = queue + came
            moves[queue, min(level, then - after * (then >= after))] += chance
    return float(np.linalg.matrix_power(moves, steps)[0, level])


@pytest.mark.parametrize(("before", "after", "passing"), SETTINGS)
def test_the_decay_rate_solves_20(before: int, after: int, passing: float) -> None:
    theta = decay_rate(before, after, passing)

    mean = math.exp(-theta * after) * (1 - passing + passing * math.exp(theta)) ** before
    assert theta > 0.01
    assert mean == pytest.approx(1)
    assert theta >= 8 * (after - before * passing) / before  # Lemma 8


@pytest.mark.parametrize(("before", "after", "passing"), [(40, 21, 0.5), (66, 44, 43 / 66)])
def test_queues_exceed_their_buffers_as_rarely_as_asked(
    before: int, after: int, passing: float
) -> None:
    steps, delta = 10_000, 0.05
    theta = decay_rate(before, after, passing)
    level = math.ceil(after + math.log(steps / delta) / theta)

    assert chance_of_a_long_queue(before, after, passing, level, steps) <= delta


def test_the_bound_printed_in_14_is_above_the_solution_and_unsafe() -> None:
    before, after, passing, steps, delta = 40, 21, 0.5, 10_000, 0.05
    printed = 8 * (after - before * passing) / after

    assert printed > 1.8 * decay_rate(before, after, passing)
    level = math.ceil(after + math.log(steps / delta) / printed)
    assert chance_of_a_long_queue(before, after, passing, level, steps) > 5 * delta


@pytest.mark.parametrize(
    ("before", "after", "passing", "theta"),
    [
        pytest.param(10, 10, 0.9, math.inf, id="never more come than go on"),
        pytest.param(10, 5, 0.0, math.inf, id="nobody comes"),
        pytest.param(66, 43, 43 / 66, 0.0, id="the edge"),
        pytest.param(66, 40, 43 / 66, 0.0, id="past the edge"),
    ],
)
def test_where_20_has_no_solution(before: int, after: int, passing: float, theta: float) -> None:
    assert decay_rate(before, after, passing) == theta


def test_large_counts_do_not_overflow() -> None:
    theta = decay_rate(1e6, 999_000.0, 0.001)

    assert theta == pytest.approx(-math.log(0.001) * 1e6 / 1000)
    assert 0 < decay_rate(1e6, 0.5e6 + 1, 0.5) < 1e-5


def test_memory_is_the_sum_of_17() -> None:
    flows = [Flow(30.0, 10, 4), Flow(20.0, 10, 9)]
    segments = equal_segments(flows, 2)
    steps, delta = 1000, 0.01

    found = nested_memory((60, 30), segments, steps, delta)

    theta = decay_rate(60, 30, 0.4)
    batch = 60 * sum(10 + s for s in range(5)) + 30 * sum(10 + s for s in range(5, 10))
    assert found.batch_tokens == batch
    assert found.queue_tokens == (10 + 4) * 30
    assert found.buffer_tokens == pytest.approx((10 + 4) / theta * math.log(1000 / 0.01))
    assert found.tokens == pytest.approx(batch + 420 + found.buffer_tokens)


def test_on_the_edge_no_memory_is_enough() -> None:
    segments = equal_segments([Flow(30.0, 10, 4), Flow(20.0, 10, 9)], 2)

    assert math.isinf(nested_memory((50, 20), segments, 1000, 0.01).tokens)


def test_the_rarest_of_events_needs_a_buffer_that_is_finite() -> None:
    segments = equal_segments([Flow(30.0, 10, 4), Flow(20.0, 10, 9)], 2)

    found = nested_memory((60, 30), segments, 1e12, 1e-300)

    assert found.buffer_tokens == pytest.approx(14 / decay_rate(60, 30, 0.4) * 312 * math.log(10))


def test_one_segment_needs_no_buffer() -> None:
    segments = equal_segments([Flow(30.0, 10, 4)], 1)

    assert nested_memory((50,), segments, 1000, 0.01) == NestedMemory(50 * 60, 0, 0)


def test_the_best_thresholds_are_valid_and_need_less_than_the_least() -> None:
    flows = [Flow(r, 60, 50 * k) for k, r in enumerate(LMSYS_RATES, 1)]
    segments, cost = equal_segments(flows, 10), StepTime(10.0)

    best = best_nested(segments, cost, steps=1e6, delta=1e-3)

    assert best is not None
    assert best.slack > 0
    assert all(c.holds for c in nested_conditions(best.thresholds, segments, cost))
    edge = [n + 1 for n in (660, 430, 320, 240, 170, 110, 70, 40, 20, 10)]
    assert best.memory.tokens < nested_memory(edge, segments, 1e6, 1e-3).tokens
    assert best.memory.tokens > equilibrium(flows, cost).memory_tokens


def test_unstable_flows_have_no_plan() -> None:
    segments = equal_segments([Flow(30.0, 10, 4)], 1)

    assert best_nested(segments, StepTime(1.0, 1.0), 1e6, 1e-3) is None


def memory_of(count: int, per_step: float, steps: float, delta: float) -> NestedMemory:
    """Figures 16 to 18: 500 lengths, prompts of 62 tokens, rates as LMSYS has them per 50."""
    share = per_step / sum(LMSYS_RATES) / 50
    flows = [Flow(share * LMSYS_RATES[k // 50], 62, k + 1) for k in range(500)]
    best = best_nested(equal_segments(flows, count), StepTime(1.0), steps, delta)
    assert best is not None
    return best.memory


def test_memory_against_the_number_of_segments_is_u_shaped() -> None:
    needs = {count: memory_of(count, 50, 200, 0.1) for count in (1, 2, 5, 8, 10, 20, 50, 500)}
    tokens = {count: memory.tokens for count, memory in needs.items()}

    assert min(tokens, key=tokens.__getitem__) == 10
    assert sorted(tokens.values(), reverse=True)[:2] == [tokens[500], tokens[1]]
    # Against the paper's words: with many segments the queues need as much as the batch.
    assert needs[500].queue_tokens > 0.9 * needs[500].batch_tokens


@pytest.mark.parametrize(
    ("less", "more"),
    [
        pytest.param((200, 0.1), (200, 1e-5), id="delta"),
        pytest.param((20, 1e-3), (2000, 1e-3), id="steps"),
    ],
)
def test_buffers_grow_with_the_logarithm(
    less: tuple[float, float], more: tuple[float, float]
) -> None:
    small, large = memory_of(10, 50, *less), memory_of(10, 50, *more)

    assert small.batch_tokens == large.batch_tokens
    ratio = math.log(9 * more[0] / more[1]) / math.log(9 * less[0] / less[1])
    assert large.buffer_tokens == pytest.approx(small.buffer_tokens * ratio)
