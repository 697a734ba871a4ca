"""Predicted loads of the workers."""

import numpy as np
import pytest

from router.core.forecast.forecast import Chances, Ends, Outlook, WorkProfile, forecast
from router.core.queue.tier import Tier
from router.core.types import Assignment
from tests.support.core import requests, views
from tests.support.lookahead import column, running


def test_who_ends_counts_no_more() -> None:
    now = running([10, 20, 30], worker=[0, 2, 0], generated=[1, 2, 3])
    ends = Ends(column([1, 2, 9]))
    assert forecast(now, ends, WorkProfile(), 3, 3).tolist() == [
        [11 + 33, 34, 35, 36],
        [0, 0, 0, 0],
        [22, 23, 0, 0],
    ]


def test_no_horizon_is_the_coming_step() -> None:
    now = running([10, 20], worker=[0, 1])
    assert forecast(now, Ends(column([1, 5])), WorkProfile(), 2, 0).tolist() == [[10], [20]]


def test_chances_weigh() -> None:
    now = running([10, 20])
    chances = Chances(np.array([[1, 0.5, 0.25], [1, 1, 0]]))
    assert forecast(now, chances, WorkProfile(), 1, 2).tolist() == [[30, 5.5 + 21, 3]]


def test_a_profile_that_is_not_plain() -> None:
    now = running([10, 20], left=[0, 8])
    profile = WorkProfile(window=15, prefill_beta=1, prefill_chunk=4, request_tokens=100)
    work = forecast(now, Ends(column([2, 3])), profile, 1, 3)
    assert work.tolist() == [[110 + 115 + 4, 111 + 115 + 4, 115, 0]]


@pytest.mark.parametrize("profile", [WorkProfile(), WorkProfile(window=9)])
def test_nobody_runs(profile: WorkProfile) -> None:
    work = forecast(running([]), Ends(column([])), profile, 2, 3)
    assert work.tolist() == [[0.0] * 4] * 2
    work += 0.5  # whole numbers would refuse it


def test_a_prediction_as_chances() -> None:
    assert Ends(column([1, 3])).chances(3).tolist() == [[1, 0, 0], [1, 1, 1]]
    assert Chances(np.array([[1, 0.5, 0.25]])).chances(2).tolist() == [[1, 0.5]]


def test_some_of_the_running() -> None:
    now = running([10, 20, 30], generated=[1, 2, 3])
    assert len(now) == 3
    assert now.take(slice(None, None, 2)).tokens.tolist() == [11, 33]
    assert now.take(column([2, 0])).id.tolist() == [2, 0]
    assert now.take(np.array([False, True, False])).prompt_tokens.tolist() == [20]


def test_what_is_assigned_adds_to_the_outlook() -> None:
    outlook = Outlook(np.array([[5.0, 6.0], [0.0, 0.0]]), WorkProfile(), 0.8, 0.1)
    waiting = requests([10, 20])
    after = outlook.after([Assignment(waiting[1].id, "b")], Tier.of(waiting).by_id, views([5, 0]))
    assert after.work.tolist() == [[5, 6], [20, 21]]
    assert outlook.request_work(waiting).tolist() == [[10, 11], [20, 21]]
