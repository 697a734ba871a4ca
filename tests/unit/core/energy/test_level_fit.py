"""Power levels from what meters have counted."""

import random

import pytest

from router.core.energy.joules import PowerLevels, Span
from router.core.energy.levels import LEAST_S, LevelFit

LEVELS = PowerLevels(90.0, 240.0, 620.0)


def joules(span: Span) -> float:
    parts = span.idle_s * LEVELS.idle_w, span.waiting_s * LEVELS.spin_w
    return sum(parts) + span.computing_s * LEVELS.busy_w


def spans(count: int, seed: int = 1) -> list[Span]:
    """A quarter of a second each; one in five is rest."""
    draw = random.Random(seed)
    made = []
    for number in range(count):
        share = draw.uniform(0.05, 0.6)
        rest = number % 5 == 0
        made.append(Span(idle_s=0.25) if rest else Span(0.25 * (1 - share), 0.25 * share))
    return made


def fit(noise_w: float = 0.0, count: int = 400) -> LevelFit:
    fit, draw = LevelFit(), random.Random(2)
    for span in spans(count):
        length_s = span.step_s + span.idle_s
        fit.observe(joules(span) + draw.gauss(0.0, noise_w) * length_s, span)
    return fit


def test_levels_without_noise_are_found_exactly() -> None:
    assert fit().fitted() == pytest.approx((90.0, 240.0, 620.0))


def test_noise_moves_them_little() -> None:
    found = fit(noise_w=40.0).fitted()
    assert found != pytest.approx((90, 240, 620), rel=1e-3)
    assert found == pytest.approx((90, 240, 620), abs=40)


def test_nothing_is_said_before_each_has_been_done_for_a_while() -> None:
    found = LevelFit()
    assert found.fitted() is None
    for _ in range(100):
        found.observe(1.0, Span(0.1, 0.1))
    assert found.fitted() is None, "they have not rested"
    assert found.seconds == pytest.approx([0, 10, 10])
    found.observe(9 * LEAST_S, Span(idle_s=LEAST_S))
    assert found.fitted() is None, "waiting and computing have come in one proportion"


def test_what_is_too_uncertain_is_not_said() -> None:
    assert fit(noise_w=2000.0, count=40).fitted() is None


def test_steps_of_which_waiting_is_not_known_are_left_out() -> None:
    found = fit()
    before = found.fitted()
    found.observe(1e6, Span(1.0, 0.5, 0.0, 0.5))
    found.observe(1e6, Span())
    assert found.fitted() == before
    assert found.unknown_s == 2


def test_even_power_is_found_too() -> None:
    fit = LevelFit()
    for span in spans(200):
        fit.observe(100 * (span.step_s + span.idle_s), span)
    assert fit.fitted() == pytest.approx((100, 100, 100))
