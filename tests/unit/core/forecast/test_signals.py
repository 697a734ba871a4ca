"""What signals say of coming ends; those that learn: test_survival."""

from collections.abc import Callable

import numpy as np
import pytest

from router.core.forecast.end_signals import (
    CapSignal,
    LearningSignal,
    NoSignal,
    ReportedSignal,
    SurvivalSignal,
)
from router.core.forecast.forecast import NO_CAP, Chances, Ends, Running, Signal, WorkProfile
from tests.support.lookahead import departure, running

PREFILL = WorkProfile(prefill_beta=1, prefill_chunk=4)


def chances(signal: Signal, now: Running, horizon: int) -> list[list[float]]:
    rows: list[list[float]] = signal.predict(now, horizon).chances(horizon + 1).tolist()
    return rows


def test_no_signal_sees_no_end() -> None:
    assert chances(NoSignal(), running([10], caps=[1]), 3) == [[1, 1, 1, 1]]


def test_a_cap_is_an_end() -> None:
    now = running([10, 10, 10], generated=[3, 3, 9], caps=[5, NO_CAP, 9])
    prediction = CapSignal().predict(now, 20)
    assert prediction.steps.tolist() == [2, NO_CAP - 3, 1]


def test_caps_with_drafts_and_prefill() -> None:
    now = running([10, 10], generated=[0, 0], caps=[5, 6], left=[0, 9])
    assert CapSignal(WorkProfile(growth=2)).predict(now, 9).steps.tolist() == [3, 3]
    assert CapSignal(PREFILL).predict(now, 9).steps.tolist() == [5, 2 + 6]


def test_reported_chances_hold_for_every_token() -> None:
    now = running([10, 10], p=[0.5, 0], generated=[0, 0], caps=[NO_CAP, 2])
    assert chances(ReportedSignal(), now, 3) == [[1, 0.5, 0.25, 0.125], [1, 1, 0, 0]]


def test_reported_chances_with_drafts_and_prefill() -> None:
    now = running([10, 10], p=[0.5, 0.5], left=[0, 9])
    assert chances(ReportedSignal(WorkProfile(growth=2)), now, 1) == [[1, 0.25]] * 2
    followed = ReportedSignal()
    followed.follow(PREFILL)
    assert chances(followed, now, 3) == chances(ReportedSignal(PREFILL), now, 3)
    assert chances(ReportedSignal(PREFILL), now, 3) == [[1, 0.5, 0.25, 0.125], [1, 1, 1, 0.5]]


def test_where_nothing_is_reported_another_signal_speaks() -> None:
    now = running([10, 10], p=[0.5, np.nan], caps=[9, 2])
    assert chances(ReportedSignal(), now, 2) == [[1, 0.5, 0.25], [1, 1, 0]]
    assert chances(ReportedSignal(otherwise=NoSignal()), now, 2)[1] == [1, 1, 1]
    nothing = running([10], caps=[2])
    assert isinstance(ReportedSignal().predict(nothing, 2), Ends)


def test_where_some_tell_nothing_what_is_learned_speaks_for_them() -> None:
    now, inner = running([10, 10], p=[0.5, np.nan], caps=[9, 2]), SurvivalSignal()
    mixed = chances(ReportedSignal(otherwise=inner), now, 2)
    assert mixed == [[1, 0.5, 0.25], chances(inner, now, 2)[1]]


def test_the_other_signal_learns() -> None:
    inner = SurvivalSignal()
    signal = ReportedSignal(otherwise=inner)
    now = running([100], generated=[9])
    before = chances(inner, now, 3)
    for _ in range(99):
        signal.ended(departure(10))
    assert not signal.stale
    signal.advance(1000)
    assert signal.stale
    signal.observe(now)
    assert not signal.stale
    assert chances(inner, now, 3) < before


def test_who_learns() -> None:
    assert isinstance(SurvivalSignal(), LearningSignal)
    assert not isinstance(CapSignal(), LearningSignal)
    alone = ReportedSignal()
    alone.observe(running([1]))
    alone.ended(departure(3))
    alone.advance(1)
    assert not alone.stale
    assert alone == ReportedSignal()


def test_who_ends_by_itself() -> None:
    assert departure(5, cap=6).by_itself
    assert not departure(6, cap=6).by_itself
    assert not departure(5, completed=False).by_itself


@pytest.mark.parametrize("make", [ReportedSignal, SurvivalSignal])
def test_nobody_runs(make: Callable[[], Signal]) -> None:
    assert make().predict(running([]), 3).chances(4).shape == (0, 4)


def test_all_reported_is_chances() -> None:
    assert isinstance(ReportedSignal().predict(running([1], p=[0.1]), 1), Chances)
