"""The rule for H, gamma and mu, and the skill that it goes by."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from router.core.forecast.end_signals import NoSignal, Signal, SkillMeter
from router.core.forecast.forecast import Chances, Prediction, Running
from router.core.forecast.look_ahead import (
    BLIND_LEAD,
    BLIND_TIE_WEIGHT,
    LEAD,
    MANY_TIE_WEIGHT,
    NEEDED_SKILL,
    TIE_WEIGHTS,
    Parameters,
    choose,
)
from tests.support.lookahead import Fleet, departure, running

SKILLED = 1.0


@pytest.mark.parametrize("skill", [None, -1.0, 0.0, NEEDED_SKILL - 0.01])
def test_without_skill_nothing_is_looked_ahead(skill: float | None) -> None:
    assert choose(16, 72, 250, 1000, skill) == Parameters(
        0, 1.0, BLIND_TIE_WEIGHT, BLIND_LEAD * 250
    )


def test_a_worker_alone_has_nothing_to_balance() -> None:
    assert choose(1, 72, 250, 1000, SKILLED).horizon == 0


def test_a_window_of_some_completions() -> None:
    chosen = [choose(16, 72, tokens, 1000, SKILLED) for tokens in (10, 250, 500, 1300, 100_000)]
    assert all(a.horizon <= b.horizon and a.discount <= b.discount for a, b in pairwise(chosen))
    assert chosen[0].horizon < chosen[3].horizon
    assert all(6 <= each.horizon <= 40 for each in chosen)
    assert all(each.discount**each.horizon < 0.05 for each in chosen)


def test_many_workers_get_a_large_tie_weight() -> None:
    sizes = [choose(workers, 72, 100, 1000, SKILLED).tie_weight for workers in (16, 63, 64, 256)]
    assert sizes[0] == sizes[1] < sizes[2] == sizes[3] == MANY_TIE_WEIGHT / 1000
    assert choose(256, 72, 100, 1000, None) == choose(16, 72, 100, 1000, None)


@pytest.mark.parametrize("workers", [16, 256])
@pytest.mark.parametrize("output_steps", [10, 250, 100_000])
def test_the_tie_weight_is_in_sizes_of_requests(workers: int, output_steps: float) -> None:
    """Loads that are ten times as large change no choice."""
    one, ten = (choose(workers, 72, output_steps, size, SKILLED) for size in (1000, 10_000))
    assert ten.tie_weight == pytest.approx(one.tie_weight / 10)
    assert replace(ten, tie_weight=one.tie_weight) == one
    least, most = TIE_WEIGHTS
    assert least <= one.tie_weight * 1000 <= most


def test_the_tie_weight_grows_with_the_time_between_completions() -> None:
    weights = [choose(16, slots, 250, 1000, SKILLED).tie_weight for slots in (256, 72, 24, 4)]
    assert weights == sorted(weights)
    assert weights[0] < weights[-1] < BLIND_TIE_WEIGHT


def test_a_horizon_that_is_given_is_kept() -> None:
    assert choose(16, 72, 250, 1000, None, horizon=20).horizon == 20
    assert choose(16, 72, 250, 1000, SKILLED, horizon=0) == Parameters(
        0, 1.0, BLIND_TIE_WEIGHT, BLIND_LEAD * 250
    )


def test_the_lead_is_what_a_worker_gains_until_its_next_request_ends() -> None:
    assert choose(16, 72, 250, 1000, SKILLED, growth=2).lead_tokens == LEAD * 2 * 250
    assert choose(16, 72, 250, 1000, None, growth=0).lead_tokens == 0


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((-1, 0.8, 0.1), "horizon -1: give 0 steps or more"),
        ((5, 0.0, 0.1), "discount 0.0: give more than 0"),
        ((5, 1.1, 0.1), "discount 1.1"),
        ((5, 0.8, -0.1), "tie_weight -0.1: give a number from 0 up"),
        ((5, 0.8, float("nan")), "tie_weight nan"),
    ],
)
def test_impossible_parameters(values: tuple[int, float, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Parameters(*values)


def test_an_impossible_lead() -> None:
    with pytest.raises(ValueError, match=r"lead_tokens -1.0: give a number from 0 up"):
        Parameters(0, 1.0, 0.1, -1.0)


class Says(Signal):
    """The same chances of going on for everybody."""

    def __init__(self, *chances: float) -> None:
        super().__init__()
        self._chances = chances

    def predict(self, running: Running, horizon: int) -> Prediction:
        return Chances(np.tile(self._chances[: horizon + 1], (len(running), 1)))


def measured(signal: Signal, fleet: Fleet, meter: SkillMeter, steps: int) -> float | None:
    for _ in range(steps):
        if meter.due:
            meter.note(fleet.running(), signal)
        for each in fleet.step():
            meter.ended(each)
        meter.advance(1)
    return meter.skill


def geometric(seed: int = 0) -> Fleet:
    return Fleet(4, 64, np.random.default_rng(seed).geometric(0.02, 5000))


def test_an_oracle_has_all_the_skill() -> None:
    fleet = geometric()
    assert measured(fleet, fleet, SkillMeter(), 200) == 1


def test_the_base_rate_has_none() -> None:
    even = Says(*(0.98 ** np.arange(17)).tolist())
    assert measured(even, geometric(), SkillMeter(), 2000) == pytest.approx(0, abs=0.02)


def test_saying_nothing_is_worse_than_the_base_rate() -> None:
    skill = measured(NoSignal(), geometric(), SkillMeter(), 2000)
    assert skill is not None
    assert skill < -0.2


def test_skill_by_hand() -> None:
    meter = SkillMeter(steps=2, evidence=1)
    assert meter.due
    meter.note(running([1, 1, 1, 1]), Says(1, 0.9, 0.5))
    assert not meter.due
    meter.ended(departure(1, number=0))
    meter.advance(1)
    meter.ended(departure(2, number=3, completed=False))
    meter.ended(departure(2, number=77))
    assert meter.skill is None
    meter.advance(1)
    assert meter.due
    assert meter.skill == pytest.approx(1 - 3 * 0.25 / (3 * (1 / 3) * (2 / 3)))


def test_a_sample_is_noted() -> None:
    meter = SkillMeter(steps=1, sample=4, evidence=1)
    meter.note(running([1] * 10), Says(1, 1))
    for number in (1, 2, 3, 4):
        meter.ended(departure(1, number=number))
    meter.advance(3)
    assert meter.due
    meter.advance(1)
    assert meter.skill == pytest.approx(1 - 1 / (4 * 0.25 * 0.75))


def test_old_outcomes_fade() -> None:
    meter = SkillMeter(memory=1000)
    fleet = geometric()
    assert measured(fleet, fleet, meter, 1000) == 1
    skill = measured(NoSignal(), fleet, meter, 1000)
    assert skill is not None
    assert skill < -0.2


def test_nobody_to_note() -> None:
    meter = SkillMeter()
    meter.note(running([]), NoSignal())
    meter.advance(16)
    assert meter.skill is None
