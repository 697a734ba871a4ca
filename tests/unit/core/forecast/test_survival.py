"""Survival curves of output lengths."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from router.core.forecast.end_signals import Departure, SurvivalSignal
from router.core.forecast.forecast import WorkProfile
from tests.support.lookahead import Fleet, column, departure, running


def exact(profile: WorkProfile | None = None) -> SurvivalSignal:
    """Nothing fades, nothing is borrowed."""
    return SurvivalSignal(profile, memory_steps=1e12, borrowed=1e-9)


def taught(signal: SurvivalSignal, departures: Iterable[Departure]) -> SurvivalSignal:
    for each in departures:
        signal.ended(each)
    signal.advance(1000)
    signal.observe(running([]))
    return signal


def test_before_anything_has_ended_ends_are_equally_likely_at_every_token() -> None:
    survival = SurvivalSignal().survival(100)
    assert survival[0] == 1
    assert survival[1:] / survival[:-1] == pytest.approx(1 - 1 / 256)


def test_a_curve_by_hand() -> None:
    lengths = [departure(2), departure(3, completed=False), departure(5), departure(5, cap=5)]
    survival = taught(exact(), lengths).survival(100)
    assert survival[:6] == pytest.approx([1, 1, 3 / 4, 3 / 4, 3 / 4, 3 / 8])


def first_seen(tokens: int, from_tokens: int) -> Departure:
    """It ended with so many, and had some of them when it was first seen."""
    return structs.replace(departure(tokens), from_tokens=from_tokens)


def test_whoever_was_first_seen_with_some_output_was_at_risk_from_there_on_only() -> None:
    lengths = [departure(20), departure(20), departure(60), *[first_seen(60, 50)] * 9]
    survival = taught(exact(), lengths).survival(100)
    assert survival[[19, 20, 59]] == pytest.approx([1, 1 / 3, 1 / 3], abs=1e-6)


def test_whoever_runs_and_was_first_seen_with_some_output_was_not_at_risk_before() -> None:
    signal = exact()
    for length in (20, 20, 60):
        signal.ended(departure(length))
    signal.advance(1000)
    signal.observe(replace(running([100] * 10, generated=[55] * 10), from_tokens=column([50] * 10)))
    assert signal.survival(100)[20] == pytest.approx(1 / 3)


def test_chances_are_given_how_far_a_request_has_come() -> None:
    signal = taught(exact(), [departure(n) for n in (2, 4, 4, 6)])
    now = running([100, 100, 100], generated=[0, 3, 2], caps=[9, 9, 3])
    assert signal.predict(now, 3).chances(4) == pytest.approx(
        np.array([[1, 1, 0.75, 0.75], [1, 1 / 3, 1 / 3, 0], [1, 0, 0, 0]]), abs=1e-6
    )


def test_drafts_and_prefill_move_the_ends() -> None:
    lengths = [departure(n) for n in (2, 4, 4, 6)]
    drafts = taught(exact(WorkProfile(growth=2)), lengths)
    assert drafts.predict(running([100]), 2).chances(3)[0] == pytest.approx([1, 0.75, 0.25])
    prefill = taught(exact(WorkProfile(prefill_beta=1, prefill_chunk=64)), lengths)
    now = running([100], left=[100])
    assert prefill.predict(now, 3).chances(4)[0] == pytest.approx([1, 1, 1, 0.75])


def test_behind_the_longest_ages_the_hazard_is_constant() -> None:
    signal = taught(exact(), [departure(20_000), departure(8192)])
    late = signal.predict(running([100, 100], generated=[8192, 30_000]), 2).chances(3)
    assert late[0] == pytest.approx(late[1])
    assert 1 > late[0, 1] > late[0, 2] > 0.99


def test_prompts_are_told_apart_and_sparse_ones_borrow() -> None:
    short = [departure(10, prompt=20) for _ in range(500)]
    long = [departure(100, prompt=2000) for _ in range(500)]
    signal = taught(SurvivalSignal(), short + long)
    assert signal.survival(20)[10] < 0.1
    assert signal.survival(2000)[10] > 0.9
    assert signal.survival(300)[10] == pytest.approx(0.5, abs=0.05)
    assert np.array_equal(signal.survival(1), signal.survival(15))
    assert np.array_equal(signal.survival(20_000), signal.survival(900_000))


def test_censoring_takes_the_bias_out() -> None:
    rng = np.random.default_rng(1)
    ends, aborts = rng.geometric(0.02, (2, 20_000))
    seen = [
        departure(int(min(end, abort)), completed=bool(end <= abort))
        for end, abort in zip(ends, aborts, strict=True)
    ]
    survival = taught(SurvivalSignal(), seen).survival(100)
    ages = np.array([10, 30, 60, 100])
    assert survival[ages] == pytest.approx(0.98**ages, rel=0.1)
    completed = np.array([each.generated_tokens for each in seen if each.completed])
    assert (completed > 60).mean() < 0.5 * 0.98**60  # what counting the completed would say


def test_what_still_runs_keeps_the_short_ones_from_speaking_first() -> None:
    fleet = Fleet(8, 64, np.array([20, 600]))
    signal = SurvivalSignal()
    for _ in range(300):
        signal.observe(fleet.running())
        for each in fleet.step():
            signal.ended(each)
        signal.advance(1)
    signal.advance(256)
    signal.observe(fleet.running())
    assert signal.survival(100)[20] == pytest.approx(0.5, abs=0.06)


def test_it_follows_a_drifting_workload() -> None:
    fleet = Fleet(4, 32, np.array([200]))
    signal = SurvivalSignal(memory_steps=500)
    halves: list[float] = []
    for step in range(5000):
        if step == 2000:
            fleet.outputs = np.array([50])
        signal.observe(fleet.running())
        for each in fleet.step():
            signal.ended(each)
        signal.advance(1)
        halves.append(float(signal.survival(100)[100]))
    assert halves[1999] > 0.9
    assert halves[-1] < 0.02


def test_curves_are_drawn_anew_now_and_then_only() -> None:
    signal = SurvivalSignal()
    signal.observe(running([]))
    before = signal.survival(100)
    for _ in range(100):
        signal.ended(departure(5))
    signal.advance(255)
    signal.observe(running([]))
    assert np.array_equal(signal.survival(100), before)
    signal.advance(1)
    signal.observe(running([]))
    assert signal.survival(100)[5] < 0.5
