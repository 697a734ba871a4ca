"""Workers that are lowered in time for requests that fit nowhere."""

import numpy as np
import pytest

from router.core.forecast.forecast import Outlook, WorkProfile
from router.core.rounds.reservations import Reservations
from tests.support.core import views


def outlook(*loads: float) -> Outlook:
    """Two steps; everybody grows by 10."""
    work = np.array([[load, load + 10] for load in loads], dtype=np.float64)
    return Outlook(work, WorkProfile(), discount=1.0, tie_weight=0.0)


def added(reservations: Reservations, loads: list[int], *wanted: tuple[str, float]) -> list[float]:
    """What is counted on each worker; the same at every step."""
    before = outlook(*loads)
    kept = before.work.copy()
    work = reservations.make_room(wanted, views(loads), before).work - kept
    assert (before.work == kept).all()
    assert (work[:, 0] == work[:, 1]).all()
    return list(work[:, 0])


def test_nothing_is_counted_while_nobody_needs_room() -> None:
    before = outlook(5, 9)
    assert Reservations().make_room([], views([5, 9]), before) is before


def test_the_least_loaded_worker_is_lowered_but_is_no_fuller_than_the_fullest() -> None:
    assert added(Reservations(), [500, 300, 900], ("x", 200.0)) == [0, 200, 0]
    assert added(Reservations(), [500, 300, 900], ("x", 2000.0)) == [0, 600, 0]
    assert added(Reservations(), [500, 300, 900], ("x", 0.0)) == [0, 0, 0]


def test_it_stays_the_same_worker_until_the_request_has_entered() -> None:
    reservations = Reservations()
    assert added(reservations, [500, 300, 900], ("x", 100.0)) == [0, 100, 0]
    assert added(reservations, [200, 800, 900], ("x", 100.0)) == [0, 100, 0]
    assert added(reservations, [200, 800, 900], ("y", 100.0)) == [100, 0, 0]


def test_a_worker_that_is_gone_is_lowered_no_more() -> None:
    reservations = Reservations()
    assert added(reservations, [500, 900, 300], ("x", 100.0)) == [0, 0, 100]
    assert added(reservations, [500, 900], ("x", 100.0)) == [100, 0]


@pytest.mark.parametrize(("workers", "lowered"), [(1, 1), (4, 1), (8, 2), (9, 2)])
def test_a_quarter_of_the_workers_is_lowered_the_oldest_requests_first(
    workers: int, lowered: int
) -> None:
    loads = [*range(workers - 1), 1000]
    wanted = [(f"r{number}", 100.0 + number) for number in range(5)]
    found = added(Reservations(), loads if workers > 1 else [1000], *wanted)
    counted = [100.0 + number for number in range(lowered)] if workers > 1 else [0.0]
    assert found == [*counted, *[0.0] * (workers - len(counted))]


def test_a_second_request_gets_a_worker_of_its_own() -> None:
    reservations, loads = Reservations(), [*range(7), 1000]
    assert added(reservations, loads, ("x", 100.0)) == [100.0, *[0.0] * 7]
    assert added(reservations, loads, ("x", 100.0), ("y", 50.0)) == [100.0, 50.0, *[0.0] * 6]
