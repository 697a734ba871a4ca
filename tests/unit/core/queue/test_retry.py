"""Which answers are asked for anew, and how many."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.queue.retry import (
    MOST_REST_S,
    WINDOW_S,
    Deadlines,
    RetryBudget,
    faults,
    may_differ_elsewhere,
    rest_s,
)
from router.core.stats import Recent

GAPS = st.lists(st.tuples(st.floats(0, 3), st.booleans()), max_size=200)


def test_what_is_asked_elsewhere_and_what_speaks_against_a_worker() -> None:
    every = range(100, 600)
    assert {s for s in every if may_differ_elsewhere(s)} == {408, 429, *range(500, 600)} - {501}
    assert {s for s in every if faults(s)} == set(range(500, 600)) - {501}


@pytest.mark.parametrize(
    ("status", "header", "seconds"),
    [
        (429, b"2", 2),
        (503, b"0", 0),
        (503, b"3600", MOST_REST_S),
        (503, b"", 0),
        (503, b"Wed, 21 Oct 2015 07:28:00 GMT", 0),
        (500, b"2", 0),
        (200, b"2", 0),
    ],
)
def test_how_long_a_worker_asks_to_be_left_alone(
    status: int, header: bytes, seconds: float
) -> None:
    assert rest_s(status, header) == seconds


@given(GAPS, st.floats(0, 1), st.floats(0, 5))
def test_retries_stay_within_their_share_of_the_requests_of_late(
    steps: list[tuple[float, bool]], share: float, min_per_s: float
) -> None:
    budget, now = RetryBudget(share, min_per_s), 1000.0
    requests: list[float] = []
    retries: list[float] = []
    for gap, is_request in steps:
        now += gap
        if is_request:
            budget.earn(now)
            requests.append(now)
        elif budget.spend(now):
            retries.append(now)
            # Remembered are nine tenths of the window at least, and never more than all of it.
            spent = sum(at > now - 0.9 * WINDOW_S for at in retries)
            earned = sum(at >= now - WINDOW_S for at in requests)
            assert spent <= share * earned + min_per_s * WINDOW_S


def test_the_first_retries_need_no_requests_and_come_again() -> None:
    budget = RetryBudget(0.5, 0.1)
    assert [budget.spend(0.0), budget.spend(0.0)] == [True, False]
    budget.earn(1.0)
    budget.earn(1.0)
    assert [budget.spend(1.0), budget.spend(1.0)] == [True, False]
    assert budget.spend(1.0 + WINDOW_S)


@given(st.lists(st.floats(0, 7), max_size=60), st.floats(1, 20))
def test_a_recent_count_is_between_those_of_nine_and_of_ten_tenths_of_the_window(
    gaps: list[float], window_s: float
) -> None:
    recent, now = Recent(window_s), 500.0
    times: list[float] = []
    for gap in gaps:
        now += gap
        recent.add(now)
        times.append(now)
        least = sum(at > now - 0.899 * window_s for at in times)
        most = sum(at > now - 1.001 * window_s for at in times)
        assert least <= recent.count(now) <= most
    recent.clear()
    assert recent.count(now) == 0


def test_a_clients_wish_shortens_the_time_of_its_request_alone() -> None:
    routers = Deadlines(request_timeout_s=60.0, first_byte_timeout_s=5.0, stream_idle_timeout_s=7.0)
    assert routers.within(None) == routers.within(90.0) == routers
    assert routers.within(2.0) == Deadlines(2.0, 5.0, 7.0)
    assert Deadlines().within(2.0) == Deadlines(request_timeout_s=2.0)
    assert Deadlines().within(None) == Deadlines()
