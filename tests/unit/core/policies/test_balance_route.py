"""BalanceRoute by hand: what fits, what does not, over a look-ahead and with many free slots."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from msgspec.structs import replace

from router.core.forecast.forecast import Outlook, WorkProfile
from router.core.policies.balance_route import BalanceRoute
from router.core.policies.policy_protocol import Known
from router.core.types import WorkerView
from tests.support.core import pairs, request, requests, views


def outlook(*work: Sequence[float], request_tokens: float = 0.0) -> Outlook:
    """An outlook whose own discount and tie weight must not matter here."""
    profile = WorkProfile(request_tokens=request_tokens)
    return Outlook(np.array(work, dtype=np.float64), profile, discount=0.1, tie_weight=9.0)


def choose(
    sizes: Sequence[int],
    workers: Sequence[WorkerView],
    seen: Outlook | None = None,
) -> dict[str, list[int]]:
    """Sizes that each worker takes, in the order of choosing."""
    waiting = requests(sizes)
    done = BalanceRoute().assign(waiting, workers, Known(seen))
    taken: dict[str, list[int]] = {}
    for index, worker in pairs(done, waiting):
        taken.setdefault(worker, []).append(sizes[index])
    return taken


@pytest.mark.parametrize(
    ("sizes", "loads", "capacity", "taken"),
    [
        pytest.param([90, 40, 100, 120], [0, 100], [1, 0], {"a": [100]}, id="all that fits"),
        pytest.param([120, 110, 140], [0, 100], [1, 0], {"a": [110]}, id="least above, none fits"),
        pytest.param([60, 30, 70, 20], [0, 100], [2, 0], {"a": [30, 70]}, id="a sum that fits"),
        pytest.param([60, 40, 30, 70], [0, 100], [2, 0], {"a": [60, 40]}, id="the older of equals"),
        pytest.param([10, 20, 30], [0, 100], [2, 0], {"a": [20, 30]}, id="all fit: the largest"),
        pytest.param(
            [70, 95, 60], [0, 100], [2, 0], {"a": [95, 60]}, id="one first, then the rest"
        ),
        pytest.param([50, 51], [0, 100], [2, 0], {"a": [50, 51]}, id="1 above, worth it: F is 58"),
        pytest.param([5, 3, 4], [0, 0], [1, 0], {"a": [3]}, id="on top of all, the least"),
        pytest.param([50, 80, 90], [0, 20, 100], [1, 1, 0], {"a": [90], "b": [80]}, id="by load"),
        pytest.param([80, 30], [50, 50], [1, 1], {"a": [30], "b": [80]}, id="the peak moves"),
        pytest.param([80, 30], [50, 50], [-2, 1], {"b": [30]}, id="overrun already"),
    ],
)
def test_without_an_outlook(
    sizes: list[int], loads: list[int], capacity: list[int], taken: dict[str, list[int]]
) -> None:
    assert choose(sizes, views(loads, capacity)) == taken


def test_many_free_slots_are_filled_one_by_one_the_emptiest_worker_first() -> None:
    workers = views([0, 30, 100], [4, 5, 0])
    assert choose([10] * 9 + [99], workers) == {"b": [10, 10, 10, 10, 10], "a": [99, 10, 10, 10]}


def test_the_least_margin_of_the_look_ahead_limits_a_subset() -> None:
    # Worker a fits under b by 100 now, by 60 at the next step.
    seen = outlook([0, 0], [100, 60])
    assert choose([90, 50, 65], views([0, 100], [1, 0]), seen) == {"a": [50]}


def test_a_subset_stays_below_the_least_margin_however_far_ahead() -> None:
    # A larger one would have a higher F: 20 steps ahead an overrun costs less than it gains.
    seen = outlook([0] * 21, [100] * 20 + [10])
    workers = views([0, 100], [1, 0])
    assert choose([9, 90, 110], workers, seen) == {"a": [9]}


def test_the_last_step_of_the_look_ahead_says_who_goes_first() -> None:
    seen = outlook([0, 90], [50, 50], [200, 200])
    assert choose([120, 100], views([0, 50, 200], [1, 1, 0]), seen) == {"b": [120], "a": [100]}


def test_a_cost_per_request_is_part_of_its_size() -> None:
    seen = outlook([0], [100], request_tokens=50)
    assert choose([90, 40], views([0, 100], [1, 0]), seen) == {"a": [40]}


def test_one_worker_serves_by_age() -> None:
    assert choose([90, 10, 20], views([500], 2)) == {"a": [90, 10]}


def test_wide_requests_go_first_and_where_all_their_parts_fit() -> None:
    waiting = [request(1, 10), request(2, 30, slots=2), request(3, 30, slots=2)]
    done = BalanceRoute().assign(waiting, views([0, 0, 200], [1, 2, 2]))
    assert pairs(done, waiting) == [(1, "b"), (2, "c"), (0, "a")]
    wide = BalanceRoute().assign(waiting[1:], views([0, 0], [1, 0]))
    assert pairs(wide, waiting[1:]) == [(0, "a")]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([900, 100], [(1, "b"), (0, "c")]),
        ([900, 70, 100], [(1, "b"), (0, "c")]),
        ([900, 950, 60, 100], [(3, "b"), (0, "c")]),
        ([900, 950, 60, 5000], [(2, "b"), (0, "c")]),
    ],
)
def test_of_equal_work_one_that_fits_is_taken(
    sizes: list[int], expected: list[tuple[int, str]]
) -> None:
    """Behind a window prompts of unlike memory are equal work."""
    windowed = Outlook(np.array([[9000.0], [100], [200]]), WorkProfile(window=64), 1.0, 0.1)
    workers = [
        replace(view, admissible_tokens=room)
        for view, room in zip(
            views([9000, 100, 200], [0, 1, 1], [4, 4, 4]), (None, 500, 2000), strict=True
        )
    ]
    waiting = requests(sizes)
    assert pairs(BalanceRoute().assign(waiting, workers, Known(windowed)), waiting) == expected
