"""When a worker is ejected, how it comes back, and what never happens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.state.breaker import (
    LEAST_JUDGED,
    MOST_OPEN_S,
    Breaker,
    BreakerSettings,
    BreakerState,
    may_open,
    review,
)

SETTINGS = BreakerSettings()
SLOTS = 8


def breaker(**settings: float) -> Breaker:
    return Breaker(BreakerSettings(**settings))  # type: ignore[arg-type]


def fail(one: Breaker, now: float, *, suspect: bool = False, may: bool = True) -> bool:
    return one.failed("x", now, suspect=suspect, may_open=may)


def broken(now: float = 0.0) -> Breaker:
    """One that has just been opened."""
    one = breaker()
    assert [fail(one, now) for _ in range(SETTINGS.breaker_failures)][-1]
    return one


def room(one: Breaker, now: float, requests: int = 0) -> int:
    one.look(now)
    return one.capacity(SLOTS - requests, SLOTS, requests)


def test_failures_in_a_row_eject_and_a_success_between_them_does_not() -> None:
    one = breaker(breaker_failures=3, breaker_share=1.0)
    assert not any(fail(one, 0) for _ in range(2))
    one.succeeded("x", 0)
    assert [fail(one, 0) for _ in range(3)] == [False, False, True]
    assert (one.state, one.ejected, room(one, 1)) == (BreakerState.OPEN, True, 0)


def test_a_large_share_of_failures_ejects_once_there_are_enough_to_judge() -> None:
    one = breaker()
    for number in range(LEAST_JUDGED // 2 - 1):
        one.succeeded("x", number)
        assert not fail(one, number)
    one.succeeded("x", 9)
    assert fail(one, 9)


def test_failures_that_are_long_past_are_no_share() -> None:
    one = breaker(breaker_failures=99)
    for _ in range(LEAST_JUDGED - 1):
        fail(one, 0)
    assert not fail(one, 2 * SETTINGS.breaker_window_s)


def test_a_request_that_others_fail_too_ejects_nobody() -> None:
    one = breaker()
    assert not any(fail(one, 0, suspect=True) for _ in range(50))
    assert one.calm


def test_trials_decide_whether_it_is_closed() -> None:
    one = broken()
    assert room(one, SETTINGS.breaker_open_s - 0.1) == 0
    assert room(one, SETTINGS.breaker_open_s) == SETTINGS.breaker_trials
    one.succeeded("sent before", SETTINGS.breaker_open_s)
    one.sent("a")
    one.sent("b")
    assert (room(one, 6), one.state) == (0, BreakerState.HALF_OPEN)
    one.gone("b")  # its client left: another may try
    assert room(one, 6) == 1
    one.sent("c")
    one.succeeded("a", 7)
    one.succeeded("c", 7)
    assert (one.state, one.calm) == (BreakerState.CLOSED, False)


def test_a_trial_that_fails_ejects_for_twice_as_long_each_time_up_to_a_minute() -> None:
    one, now, out_s = broken(), 0.0, SETTINGS.breaker_open_s
    for _ in range(8):
        assert room(one, now + out_s - 0.1) == 0
        now += out_s
        assert room(one, now) > 0
        one.sent("trial")
        assert one.failed("trial", now, suspect=True, may_open=True)
        out_s = min(2 * out_s, MOST_OPEN_S)
    assert out_s == MOST_OPEN_S


def test_what_has_been_well_for_long_is_out_for_a_short_time_again() -> None:
    one = broken()
    assert room(one, 5) > 0
    fail(one, 5)  # out until 15
    for attempt in ("a", "b"):
        room(one, 20)
        one.sent(attempt)
        one.succeeded(attempt, 20)
    later = 21 + SETTINGS.breaker_window_s
    for _ in range(SETTINGS.breaker_failures):
        fail(one, later)
    assert room(one, later + SETTINGS.breaker_open_s) == SETTINGS.breaker_trials


def test_a_trial_that_fails_where_nobody_else_is_left_closes_it() -> None:
    one = broken()
    room(one, 5)
    assert not fail(one, 5, may=False)
    assert one.state is BreakerState.CLOSED


def test_late_words_change_nothing_while_it_is_open() -> None:
    one = broken()
    one.succeeded("x", 1)
    assert not fail(one, 1)
    assert room(one, SETTINGS.breaker_open_s) == SETTINGS.breaker_trials


def test_slots_grow_slowly_after_a_recovery() -> None:
    one = breaker()
    one.fell()
    one.rose(0)
    assert one.calm  # the first time it is no recovery
    one.fell()
    one.rose(100)
    assert [room(one, 100 + s) for s in (0, 2.5, 5, 9.9)] == [1, 2, 4, 8]
    assert (room(one, 105, requests=3), room(one, 105, requests=6)) == (1, 0)
    assert one.starting
    one.look(110)
    assert one.calm


def test_without_a_slow_start_all_slots_are_there_at_once() -> None:
    one = breaker(slow_start_s=0)
    one.rose(0)
    one.fell()
    one.rose(100)
    assert one.calm


def test_an_engine_that_starts_anew_is_judged_anew() -> None:
    one = broken()
    one.rose(0)
    assert one.state is BreakerState.OPEN  # a check that went well says nothing of requests
    one.fell()
    one.rose(1)
    assert one.starting


def test_who_asks_for_a_rest_has_it_whatever_else() -> None:
    one = breaker()
    one.rest(10, 3)
    one.rest(10, 1)
    one.waived = True
    assert (room(one, 12.9), room(one, 13)) == (0, SLOTS)
    assert one.calm


@pytest.mark.parametrize(
    ("out", "live", "max_ejected", "may"),
    [
        (0, 1, 1.0, False),
        (0, 2, 0.5, True),
        (0, 3, 0.5, True),
        (1, 3, 0.5, False),
        (1, 4, 0.5, True),
        (2, 3, 1.0, False),
        (0, 9, 0.0, False),
    ],
)
def test_so_many_of_a_group_may_be_out(out: int, live: int, max_ejected: float, may: bool) -> None:
    others = [broken() if i < out else breaker() for i in range(live - 1)]
    assert may_open(others, max_ejected) is may


def test_when_the_last_healthy_worker_goes_the_others_are_better_than_nothing() -> None:
    out, healthy = broken(), breaker()
    review([out, healthy], 1)
    assert (out.capacity(SLOTS, SLOTS, 0), out.ejected) == (0, True)
    review([out], 1)
    assert (out.capacity(SLOTS, SLOTS, 0), out.ejected) == (SLOTS, False)


def test_a_slow_start_holds_nobody_back_where_all_start() -> None:
    starting, other = breaker(), breaker()
    for _ in range(2):
        starting.fell()
        starting.rose(0)
    review([starting, other], 1)
    assert starting.capacity(SLOTS, SLOTS, 0) == 1
    review([starting], 1)
    assert starting.capacity(SLOTS, SLOTS, 0) == SLOTS


STEPS = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from(["fail", "suspect", "answer", "leave", "wait"])),
    max_size=300,
)


@given(STEPS, st.floats(0.1, 1), st.integers(2, 5))
def test_a_group_is_never_empty_and_never_has_more_trials_than_allowed(
    steps: list[tuple[int, str]], max_ejected: float, workers: int
) -> None:
    group = [breaker(breaker_failures=3) for _ in range(workers)]
    now, serial = 0.0, 0
    there: dict[int, list[str]] = {place: [] for place in range(workers)}
    for which, what in steps:
        place = which % workers
        one, others = group[place], [b for b in group if b is not group[place]]
        now += 3.0 if what == "wait" else 0.01
        review(group, now)
        if one.capacity(SLOTS, SLOTS, 0) > 0:
            serial += 1
            one.sent(str(serial))
            there[place].append(str(serial))
        attempt = there[place].pop(0) if there[place] and what != "wait" else None
        if attempt is not None and what in ("fail", "suspect"):
            may, suspect = may_open(others, max_ejected), what == "suspect"
            one.failed(attempt, now, suspect=suspect, may_open=may)
        elif attempt is not None and what == "answer":
            one.succeeded(attempt, now)
        if attempt is not None:
            one.gone(attempt)
        review(group, now)
        out = [b for b in group if b.state is not BreakerState.CLOSED]
        assert len(out) < workers
        assert len(out) <= max_ejected * workers
        assert len(one._trials) <= SETTINGS.breaker_trials
        assert any(b.capacity(SLOTS, SLOTS, 0) == SLOTS for b in group)
