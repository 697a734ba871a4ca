"""The cost of a step, learned from the messages of ranks that compute prompts in chunks."""

from dataclasses import astuple

import numpy as np
import pytest

from router.core.step_time import StepTime
from router.core.types import PoolState
from tests.support.swept import COST, SweptRanks

STEPS = 2000


def swept(seed: int, noise: float = 0.0) -> SweptRanks:
    rng = np.random.default_rng(seed + 99)
    ranks = SweptRanks(seed, factor=lambda: 1 + noise * rng.normal())
    for _ in ranks.take(STEPS):
        pass
    return ranks


def found(ranks: SweptRanks) -> list[tuple[float, bool]]:
    """Of each number: how far it is off, as a share, and whether its interval holds the truth."""
    fitted = ranks.group.fitted
    assert fitted is not None
    numbers = zip(astuple(fitted), fitted.intervals, astuple(COST), strict=False)
    return [(abs(number / true - 1), low <= true <= high) for number, (low, high), true in numbers]


@pytest.mark.parametrize("seed", range(3))
def test_under_a_sweep_of_load_each_number_is_found(seed: int) -> None:
    ranks = swept(seed)
    assert max(off for off, _ in found(ranks)) < 0.005
    assert ranks.group.fitted is not None
    assert ranks.group.fitted.explained > 0.9999
    assert ranks.group.step_time is ranks.group.fitted


def test_with_noise_each_number_is_near_or_inside_its_interval() -> None:
    numbers = np.array([found(swept(seed, 0.03)) for seed in range(4)])
    good = (numbers[:, :, 0] < 0.05) | (numbers[:, :, 1] > 0)
    assert good.mean() >= 0.9, numbers


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.03, 0.1])
def test_intervals_hold_the_truth_at_most_seeds(noise: float) -> None:
    numbers = np.array([found(swept(seed, noise)) for seed in range(20)])
    inside = numbers[:, :, 1].mean(axis=0)
    assert (inside >= 0.9).all(), inside


def test_modelled_waits_are_those_that_ranks_have_really_waited() -> None:
    ranks = SweptRanks(7)
    for number, _ in enumerate(ranks.take(1000)):
        if number == 255:
            begun_s, begun = ranks.idle_s, ranks.group.every_step
    told = ranks.group.every_step - begun
    assert told.measured_s == 0
    assert told.waiting_s == pytest.approx(ranks.idle_s - begun_s, rel=0.005)


def test_measured_waits_tell_the_slowest_rank() -> None:
    ranks = SweptRanks(3, time_waits=True)
    for _ in ranks.take(600):
        pass
    assert max(off for off, _ in found(ranks)) < 0.005
    told = ranks.group.totals[PoolState.EMPTY]
    assert told.measured_s == pytest.approx(told.timed_s)
    assert told.waiting_s == pytest.approx(ranks.idle_s)


def test_a_fixed_step_time_goes_before_the_learned_one() -> None:
    ranks, fixed = SweptRanks(5), StepTime(1e-3, 1e-7)
    ranks.group.fix_step_time(fixed)
    assert ranks.group.step_time is fixed
    for _ in ranks.take(70):
        pass
    told = ranks.group.every_step
    assert told.waiting_s == pytest.approx(1e-7 * told.imbalance_tokens)
    assert ranks.group.fitted is not None, "what the steps teach is there beside it"
    ranks.group.fix_step_time(None)
    assert ranks.group.step_time is ranks.group.fitted
