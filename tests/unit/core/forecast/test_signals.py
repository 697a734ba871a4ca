"""What signals say of coming ends; those that learn: test_survival."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from router.core.forecast.end_signals import (
    CapSignal,
    NoSignal,
    ProvenSignal,
    ReportedSignal,
    Signal,
    SurvivalSignal,
)
from router.core.forecast.forecast import NO_CAP, Chances, Running, WorkProfile
from tests.support.lookahead import departure, running

PREFILL = WorkProfile(prefill_beta=1, prefill_chunk=4)


def chances(signal: Signal, now: Running, horizon: int) -> list[list[float]]:
    rows: list[list[float]] = signal.predict(now, horizon).chances(horizon + 1).tolist()
    return rows


def test_no_signal_sees_no_end() -> None:
    signal = NoSignal()
    signal.follow(PREFILL)
    assert chances(signal, running([10], caps=[1]), 3) == [[1, 1, 1, 1]]


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


def test_where_nothing_is_reported_a_request_goes_on_to_its_cap() -> None:
    now = running([10, 10], p=[0.5, np.nan], caps=[9, 2])
    assert chances(ReportedSignal(), now, 2) == [[1, 0.5, 0.25], [1, 1, 0]]


def scored(signal: ProvenSignal, told: Callable[[int], float]) -> None:
    """Sets of requests that end after 1 to 64 steps, with what ``told`` makes of what is left."""
    for start in range(0, 40_000, 64):
        alive = list(range(1, 65))
        for step in range(65):
            left = [end - step for end in alive]
            n = len(alive)
            now = running([100] * n, generated=[step] * n, p=list(map(told, left)))
            now = replace(now, id=start + np.array(alive, dtype=np.int64))
            signal.chances(now, np.arange(2)[:, None])
            if signal.stale:
                signal.observe(now)
            for end in [end for end in alive if end == step + 1]:
                signal.ended(departure(end, number=start + end))
            alive = [end for end in alive if end > step + 1]
            signal.advance(1)


@pytest.mark.parametrize(
    ("told", "pays"),
    [
        (lambda left: 0.5 if left <= 16 else 0.0, True),  # the end shows long before
        (lambda left: 0.9 if left <= 1 else 1e-6, False),  # in its own step alone
        (lambda _: np.nan, False),
    ],
)
def test_reported_chances_count_where_they_foretell(
    told: Callable[[int], float], pays: bool
) -> None:
    signal = ProvenSignal()
    scored(signal, told)
    now = running([100, 100], p=[0.25, np.nan], generated=[9, 9])
    reported, learned = chances(ReportedSignal(), now, 2), chances(SurvivalSignal(), now, 2)
    assert (chances(signal, now, 2)[0] == reported[0]) == pays
    assert chances(signal, now, 2)[1] != learned[1], "it has learned"


def test_it_stops_asking_for_what_no_engine_reports_any_more() -> None:
    signal, asked = ProvenSignal(), []
    for p in (0.25, np.nan):
        now = running([100], p=[p], generated=[9])
        chances(signal, now, 2)
        asked.append(signal.stale)
        signal.observe(now)
        signal.advance(16)
        asked.append(signal.stale)
    assert asked == [True, True, True, False]


def test_all_of_them_follow_another_profile() -> None:
    followed = ProvenSignal()
    followed.follow(PREFILL)
    now = running([10], left=[9])
    assert chances(followed, now, 3) == chances(SurvivalSignal(PREFILL), now, 3)


def test_who_ends_by_itself() -> None:
    assert departure(5, cap=6).by_itself
    assert not departure(6, cap=6).by_itself
    assert not departure(5, completed=False).by_itself


@pytest.mark.parametrize("make", [ReportedSignal, SurvivalSignal, ProvenSignal])
def test_nobody_runs(make: Callable[[], Signal]) -> None:
    assert make().predict(running([]), 3).chances(4).shape == (0, 4)


def test_all_reported_is_chances() -> None:
    assert isinstance(ReportedSignal().predict(running([1], p=[0.1]), 1), Chances)
