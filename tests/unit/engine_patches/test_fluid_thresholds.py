"""Thresholds of WAIT and Nested WAIT: (11), (12), (15) and (16) of arXiv 2504.11320."""

from itertools import product

import pytest

from engine_patches.admission.theory.fluid import Flow, combined
from engine_patches.admission.theory.thresholds import (
    equal_segments,
    least_nested,
    least_wait,
    nested_conditions,
    segments_of,
    wait_conditions,
    worst_of,
)
from router.core.step_time import StepTime

FLOWS = (Flow(3.0, 2, 1), Flow(2.0, 4, 3), Flow(1.0, 2, 6))
COST = StepTime(0.3, 0.004)

# Section 6.2, as printed: rates, output lengths, thresholds.
NESTED_4 = ((20, 40, 80, 160), (20, 40, 80, 160), (15, 14, 12, 8))
LMSYS_10 = (
    (23, 11, 8, 7, 6, 4, 3, 2, 1, 1),
    tuple(range(50, 501, 50)),
    (66, 43, 32, 24, 17, 11, 7, 4, 2, 1),
)
Printed = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def printed_flows(setting: Printed, prompt_tokens: int) -> list[Flow]:
    rates, lengths, _ = setting
    return [Flow(r, prompt_tokens, length) for r, length in zip(rates, lengths, strict=True)]


def test_segments_part_the_stages() -> None:
    first, second = segments_of(FLOWS, [3, 6])

    assert (first.first_stage, first.last_stage, second.first_stage, second.last_stage) == (
        0,
        3,
        4,
        6,
    )
    assert (first.rate, second.rate, second.passing) == (6.0, 1.0, 0.0)
    assert first.passing == pytest.approx(1 / 6)
    assert first.prompt_tokens == pytest.approx((3 * 2 + 2 * 4 + 2) / 6)
    assert first.everywhere.prompt_tokens == first.prompt_tokens
    assert second.everywhere.prompt_tokens == 0


def test_segments_have_equally_many_lengths() -> None:
    assert [s.last_stage for s in equal_segments(FLOWS, 2)] == [1, 6]
    assert equal_segments(FLOWS, 9) == equal_segments(FLOWS, 3) == segments_of(FLOWS, [1, 3, 6])


def test_a_length_beyond_the_segments_is_refused() -> None:
    with pytest.raises(AssertionError, match="never end"):
        segments_of(FLOWS, [1, 3])


@pytest.mark.parametrize("least", [None, (1, 4, 1)])
def test_no_smaller_thresholds_satisfy_11(least: tuple[int, ...] | None) -> None:
    found = least_wait(FLOWS, COST, least)

    assert found is not None
    assert all(condition.holds for condition in wait_conditions(found, FLOWS, COST))
    below = product(*(range(low, n + 1) for low, n in zip(least or (1,) * 3, found, strict=True)))
    valid = [n for n in below if all(c.holds for c in wait_conditions(n, FLOWS, COST))]
    assert valid == [found]


@pytest.mark.parametrize("least", [None, (7, 1, 2)])
def test_no_smaller_thresholds_satisfy_12(least: tuple[int, ...] | None) -> None:
    segments = equal_segments(FLOWS, 3)

    found = least_nested(segments, COST, least)

    assert found is not None
    assert all(condition.holds for condition in nested_conditions(found, segments, COST))
    below = product(*(range(low, n + 1) for low, n in zip(least or (1,) * 3, found, strict=True)))
    valid = [n for n in below if all(c.holds for c in nested_conditions(n, segments, COST))]
    assert valid == [found]


def test_unstable_flows_have_no_thresholds() -> None:
    cost = StepTime(0.3, 1.0)

    assert least_wait(FLOWS, cost) is None
    assert least_nested(equal_segments(FLOWS, 3), cost) is None


def test_a_load_near_one_takes_large_thresholds_soon() -> None:
    work = sum(flow.rate * flow.everywhere.kv_tokens for flow in FLOWS)
    cost = StepTime(0.3, 0.99999 / work)

    found = least_wait(FLOWS, cost)

    assert found is not None
    assert min(found) > 10_000
    assert all(condition.holds for condition in wait_conditions(found, FLOWS, cost))


def test_with_many_types_a_load_near_one_takes_hardly_more_than_the_fluid() -> None:
    flows = [Flow(1.0, 10, steps) for steps in range(1, 101)]
    work = sum(flow.everywhere.kv_tokens for flow in flows)
    cost = StepTime(1e-3, (1 - 1e-6) / work)

    found = least_wait(flows, cost)

    assert found is not None
    assert all(condition.holds for condition in wait_conditions(found, flows, cost))
    assert 1000 < max(found) <= 1010


@pytest.mark.parametrize("spare", [1e-10, 1e-15])
def test_a_load_that_no_number_tells_from_one_has_no_thresholds(spare: float) -> None:
    flows = [Flow(1.0, 1, 0)]

    assert least_wait(flows, StepTime(1.0, 1 - spare)) is None
    assert least_nested(equal_segments(flows, 1), StepTime(1.0, 1 - spare)) is None


def test_slack_puts_thresholds_above_their_ratio() -> None:
    segments = equal_segments(FLOWS, 3)
    cost = StepTime(100.0)

    tight, loose = (least_nested(segments, cost, slack=slack) for slack in (0.0, 0.5))

    assert tight is not None
    assert loose is not None
    assert tight == (601, 301, 101)
    assert loose == (601, 451, 226)
    assert least_nested(segments, cost, slack=9.0) == (601, 601, 601)


@pytest.mark.parametrize(
    ("setting", "nearest"),
    [
        pytest.param(NESTED_4, (15, 15, 13, 9), id="nested4"),
        pytest.param(LMSYS_10, (66, 44, 33, 25, 18, 12, 8, 5, 3, 2), id="lmsys10"),
    ],
)
def test_the_printed_thresholds_are_on_the_edge(setting: Printed, nearest: tuple[int, ...]) -> None:
    flows = printed_flows(setting, 60)
    segments = equal_segments(flows, len(flows))
    cost = StepTime(0.1 * setting[2][0] / sum(setting[0]))

    entry, *ratios = nested_conditions(setting[2], segments, cost)

    assert entry.holds
    assert all(ratio.edge and not ratio.holds for ratio in ratios)
    assert least_nested(segments, cost, setting[2]) == nearest
    assert all(c.holds for c in nested_conditions(nearest, segments, cost))


def memory_13(setting: Printed, prompt_tokens: int) -> float:
    _, lengths, thresholds = setting
    total = cumulated = previous = 0.0
    for length, n in zip(lengths, thresholds, strict=True):
        cumulated += length
        total += n * (prompt_tokens + cumulated / 2) * (length - previous)
        previous = length
    return total


def memory_16(setting: Printed, prompt_tokens: int) -> float:
    _, lengths, thresholds = setting
    width = lengths[-1] / len(lengths)
    return sum(n * (prompt_tokens + k / 2 * width) * width for k, n in enumerate(thresholds, 1))


def test_the_printed_memory_of_a_batch_is_not_what_its_stages_hold() -> None:
    """(13) is 1.4 times what the batch of section 6.2 holds, the sum before (16) 0.73 times."""
    _, lengths, thresholds = LMSYS_10
    segments = equal_segments(printed_flows(LMSYS_10, 60), 10)
    held = 0
    for stage in range(lengths[-1] + 1):
        segment = next(k for k, length in enumerate(lengths) if stage <= length)
        held += thresholds[segment] * (60 + stage)

    assert combined(thresholds, [s.everywhere for s in segments]).kv_tokens == held
    assert memory_13(LMSYS_10, 60) / held == pytest.approx(1.392, abs=1e-3)
    assert memory_16(LMSYS_10, 60) / held == pytest.approx(0.731, abs=1e-3)


def test_rates_that_change_are_judged_by_their_worst() -> None:
    """(15): by day more requests, by night longer ones."""
    day = equal_segments([Flow(9.0, 2, 1), Flow(3.0, 2, 5)], 2)
    night = equal_segments([Flow(2.0, 2, 1), Flow(4.0, 2, 5)], 2)
    cost = StepTime(1.0)

    worst = worst_of([day, night])

    assert [(s.rate, s.passing) for s in worst] == [(12.0, pytest.approx(2 / 3)), (4.0, 0.0)]
    found = least_nested(worst, cost)
    assert found == (13, 9)
    for period in (day, night):
        assert all(c.holds for c in nested_conditions(found, period, cost))
    assert not all(c.holds for c in nested_conditions((13, 4), night, cost))


def test_on_the_edge_a_condition_does_not_hold_strictly() -> None:
    (condition,) = wait_conditions([4], [Flow(4.0, 1, 1)], StepTime(1.0))

    assert condition.edge
    assert not condition.holds
