"""Who waits in which order, and who goes first."""

import math
from dataclasses import replace
from typing import Any

import pytest

from router.core.errors import PoolFullError
from router.core.queue.pool import Pool
from router.core.targets import Targets
from router.core.types import Request
from tests.support.core import request, token


def pool_of(*waiting: Request, patience: float = 10.0, timeout: float = 60.0) -> Pool:
    pool = Pool(100, patience, timeout)
    for one in waiting:
        pool.add(one)
    return pool


def tiers(pool: Pool, now: float, capacity: int, gap_tokens: int = 0) -> list[list[str]]:
    """Tiers as lists of the requests' last digits."""
    return [
        [one.id.lstrip("es-0") for one in tier] for tier in pool.tiers(now, capacity, gap_tokens)
    ]


def test_lowest_priority_number_first_then_in_order_of_arrival() -> None:
    pool = pool_of(
        request(1, priority=1, arrival=0),
        request(2, arrival=5),
        request(3, arrival=4),
        request(4, priority=-1, arrival=9),
        request(5, arrival=4),
    )
    assert [one.id for one in pool] == [token(i) for i in (4, 3, 5, 2, 1)]
    assert len(pool) == 5


def test_a_pool_is_full_at_its_limit_and_still_takes_back() -> None:
    pool = Pool(2)
    pool.add(request(1))
    assert not pool.full
    pool.add(request(2))
    assert pool.full
    pool.add(request(3))
    assert (len(pool), pool.full) == (3, True)


def test_a_request_is_taken_out_once() -> None:
    waiting = [request(1), request(2)]
    pool = pool_of(*waiting)
    assert token(1) in pool
    assert pool.remove(token(1)) is waiting[0]
    assert token(1) not in pool
    assert pool.remove(token(1)) is None
    assert list(pool) == waiting[1:]


def test_who_comes_back_takes_its_old_place() -> None:
    waiting = [request(number, arrival=number) for number in range(5)]
    pool = pool_of(*waiting)
    taken = pool.remove(token(2))
    assert taken is not None
    pool.add(request(5, arrival=5))
    pool.add(taken)
    assert [one.id for one in pool] == [token(i) for i in range(6)]


def test_who_waited_for_the_timeout_expires() -> None:
    pool = pool_of(request(1, arrival=0), request(2, arrival=5, priority=-1), timeout=10.0)
    assert pool.expired(9.9) == []
    assert [one.id for one in pool.expired(10.0)] == [token(1)]
    assert [one.id for one in pool.expired(15.0)] == [token(2), token(1)]
    assert len(pool) == 2, "they are still there to be given up by the caller"


def test_without_patience_and_timeout_nothing_is_ever_due() -> None:
    pool = Pool(10)
    pool.add(request(1))
    assert pool.expired(1e18) == []
    assert tiers(pool, 1e18, 1, gap_tokens=10**9) == [["1"]]


ONES = [request(number, arrival=number) for number in range(1, 5)]
WIDE = [request(1, slots=1), request(2, slots=2), request(3, slots=3), request(4)]
WIDEST = [request(1, slots=4), request(2), request(3)]
TWO_CLASSES = [
    request(1, arrival=1),
    request(2, arrival=2),
    request(3, arrival=1, priority=1),
    request(4, arrival=2, priority=1),
    request(5, arrival=90, priority=1),
]


@pytest.mark.parametrize(
    ("waiting", "now", "capacity", "expected"),
    [
        pytest.param([], 0, 4, [], id="nobody"),
        pytest.param(ONES, 10, 4, [["1", "2", "3", "4"]], id="nobody is overdue"),
        pytest.param(ONES, 12, 4, [["1", "2"], ["3", "4"]], id="two are overdue"),
        pytest.param(ONES, 99, 4, [["1", "2", "3", "4"]], id="all are overdue and get in"),
        pytest.param(ONES, 99, 3, [["1", "2", "3"], ["4"]], id="the oldest of the overdue"),
        pytest.param(WIDE, 99, 6, [["1", "2", "3"], ["4"]], id="as many slots as there are"),
        pytest.param(WIDE, 99, 5, [["1", "2"], ["3", "4"]], id="only who surely gets in"),
        pytest.param(WIDEST, 99, 2, [["1"], ["2", "3"]], id="wider than what is free, but first"),
        pytest.param(TWO_CLASSES, 99, 9, [["1", "2"], ["3", "4"], ["5"]], id="priorities apart"),
        pytest.param(TWO_CLASSES, 99, 3, [["1", "2"], ["3"], ["4", "5"]], id="one slot is left"),
        pytest.param(
            TWO_CLASSES, 99, 1, [["1"], ["2"], ["3"], ["4", "5"]], id="no slot is left, if all fit"
        ),
        pytest.param(TWO_CLASSES, 0, 1, [["1", "2"], ["3", "4", "5"]], id="priority alone"),
    ],
)
def test_tiers(
    waiting: list[Request], now: float, capacity: int, expected: list[list[str]]
) -> None:
    assert tiers(pool_of(*waiting), now, capacity) == expected


SIZES = [request(1, 900, arrival=0), request(2, 300, arrival=1), request(3, 300, arrival=2)]


@pytest.mark.parametrize(
    ("now", "gap_tokens", "expected"),
    [
        pytest.param(1.9, 10**6, [["1", "2", "3"]], id="nobody has waited a fifth"),
        pytest.param(2.0, 900, [["1"], ["2", "3"]], id="a fifth: the whole must fit"),
        pytest.param(2.0, 899, [["1", "2", "3"]], id="and does not"),
        pytest.param(9.9, 427, [["1"], ["2", "3"]], id="near the bound: 1 - .99^64 of it must fit"),
        pytest.param(9.9, 426, [["2"], ["1", "3"]], id="else the next that fits, one at a time"),
        pytest.param(10, 0, [["1"], ["2", "3"]], id="no patience left: nothing must fit"),
    ],
)
def test_the_longer_a_request_waits_the_smaller_the_gap_it_takes(
    now: float, gap_tokens: int, expected: list[list[str]]
) -> None:
    assert tiers(pool_of(*SIZES), now, 9, gap_tokens) == expected


@pytest.mark.parametrize(
    ("now", "gap_tokens", "expected"),
    [
        pytest.param(4.9, 0, [], id="nobody has waited half of the patience"),
        pytest.param(6, 0, [(1, 225.0), (2, 0.0)], id="a quarter of the way; one just begins"),
        pytest.param(7, 0, [(1, 450.0), (2, 75.0), (3, 0.0)], id="half of it"),
        pytest.param(7, 300, [(1, 450.0), (2, 0.0), (3, 0.0)], id="none for those that fit"),
        pytest.param(9.5, 0, [(1, 900.0), (2, 262.5), (3, 187.5)], id="all of it"),
        pytest.param(10, 0, [(1, 0.0), (2, 300.0), (3, 225.0)], id="no patience left: it enters"),
    ],
)
def test_room_is_made_for_those_that_have_waited_for_long(
    now: float, gap_tokens: int, expected: list[tuple[int, float]]
) -> None:
    wanted = pool_of(*SIZES).room_wanted(now, gap_tokens)
    assert [name for name, _ in wanted] == [token(number) for number, _ in expected]
    assert [room for _, room in wanted] == pytest.approx([room for _, room in expected])


def test_without_patience_no_room_is_ever_made() -> None:
    assert Pool(9).room_wanted(1e9, 0) == []
    pool = Pool(9)
    pool.add(request(1))
    assert pool.room_wanted(1e9, 0) == []


def test_who_finds_no_room_is_told_to_come_back() -> None:
    error = PoolFullError(512, retry_after_s=3)
    assert (str(error), error.retry_after_s) == (
        "the waiting pool is full (512 requests); retry later",
        3,
    )


# those that workers have failed


def failed(number: int, avoid: str, **fields: Any) -> Request:
    return replace(request(number, **fields), avoid=frozenset(avoid))


def test_those_that_workers_have_failed_go_first_and_together_if_by_the_same() -> None:
    pool = pool_of(
        request(1, arrival=0),
        failed(2, "a", arrival=3),
        failed(3, "ab", arrival=2),
        failed(4, "a", priority=-1, arrival=4),
        request(5, priority=-2, arrival=5),
    )
    assert tiers(pool, 5, 9) == [["4", "2"], ["3"], ["5"], ["1"]]
    assert [tier.avoid for tier in pool.tiers(5, 9, 0)][:2] == [{"a"}, {"a", "b"}]
    assert (len(pool), {one.id for one in pool}) == (5, {token(i) for i in range(1, 6)})


def test_a_failed_request_counts_and_leaves_as_others_do() -> None:
    pool, again = Pool(2), failed(1, "a", slots=3)
    pool.add(again)
    pool.add(request(2))
    assert pool.full
    assert (token(1) in pool, pool.slots_of[""]) == (True, 4)
    assert pool.remove(token(1)) is again
    assert (token(1) in pool, pool.slots_of[""], len(pool)) == (False, 1, 1)
    assert pool.remove(token(1)) is None


def test_slots_for_failed_requests_are_not_there_for_late_ones() -> None:
    late = [request(number, arrival=0) for number in range(1, 5)]
    pool = pool_of(failed(9, "a", slots=2, arrival=0), *late, patience=1)
    assert tiers(pool, 5, 4) == [["9"], ["1", "2"], ["3", "4"]]


def test_a_request_may_wait_for_less_time_than_others_but_for_no_more() -> None:
    own = {1: None, 2: 5.0, 3: 90.0}
    waiting = [replace(request(i), queue_timeout_s=own_s) for i, own_s in own.items()]
    pool = pool_of(*waiting, timeout=60)
    assert [pool.timeout_of(each) for each in waiting] == [60, 5, 60]
    assert [one.id for one in pool.expired(5)] == [token(2)]
    assert len(pool.expired(60)) == 3


def test_nobody_else_has_to_leave_for_those_that_were_failed() -> None:
    pool = Pool(2)
    for number in (1, 2):
        pool.add(replace(failed(number, "a"), tenant="many"))
    assert pool.displaced_by("few", lambda _: 1) is None


def hurried(number: int, ttft_s: float, **fields: int) -> Request:
    return replace(request(number, **fields), targets=Targets(ttft_s))


def test_those_that_can_be_in_time_precede_those_that_are_late_or_have_no_target() -> None:
    pool = pool_of(
        request(1, arrival=0),
        hurried(2, 5.0, arrival=1),
        hurried(3, 2.0, arrival=2),
        request(4, arrival=3, priority=-1),
        replace(request(5, arrival=0), targets=Targets(tpot_s=0.04)),
    )
    assert tiers(pool, 4.0, 9) == [["4"], ["2", "3"], ["1", "5"]]
    assert tiers(pool, 4.5, 9) == [["4"], ["2"], ["1", "5", "3"]], "its target has passed"
    assert [one.id for one in pool] == [token(i) for i in (4, 2, 1, 5, 3)]
    assert tiers(pool, 7.0, 9) == [["4"], ["1", "5", "2", "3"]]
    assert pool.remove(token(3)) is not None
    assert pool.remove(token(2)) is not None
    assert tiers(pool, 7.0, 9) == [["4"], ["1", "5"]]


def test_of_many_that_are_late_at_once_the_oldest_fall_behind_first() -> None:
    pool = pool_of(*(hurried(number, 1.0, arrival=number // 10) for number in range(100)))
    falls = [[one.id for one in pool.tiers(60.0, 9, 0)[0]] for _ in range(4)]
    assert [ids[0] for ids in falls[:3]] == [token(32), token(64), token(96)]
    assert [one.id for one in pool] == [token(number) for number in range(100)]


def test_of_those_behind_one_entry_in_eleven_is_for_the_oldest_past_the_bound() -> None:
    pool = pool_of(request(1, arrival=0), hurried(2, 100.0, arrival=9), patience=10.0)
    assert tiers(pool, 11.0, 1) == [["2"], ["1"]]
    pool.entered([request(number) for number in range(10, 20)], 11.0)
    assert tiers(pool, 11.0, 1) == [["1"], ["2"]]
    entered = pool.remove(token(1))
    assert entered is not None
    pool.entered([entered], 11.0)
    pool.add(request(3, arrival=0))
    assert tiers(pool, 11.0, 1) == [["2"], ["3"]]


def test_ahead_are_those_as_urgent_whose_first_tokens_are_due_sooner() -> None:
    def wants(number: int, ttft_s: float | None, slots: int = 1, **fields: int) -> Request:
        targets = None if ttft_s is None else Targets(ttft_s)
        return replace(request(number, 100 * number, slots=slots, **fields), targets=targets)

    pool = pool_of(
        wants(1, 3.0, arrival=1),
        wants(2, 5.0, arrival=1),
        wants(3, None),
        wants(4, 1.0, priority=1),
        wants(5, 9.0, slots=2, priority=-1),
    )
    for newcomer, slots, tokens in (
        (wants(9, 4.0, arrival=2), 2, [100, 200]),
        (wants(9, 1.0, arrival=2), 0, []),
        (wants(9, 9.0, arrival=2), 4, [500, 100, 200]),
        (wants(9, None), 5, [500, 100, 200, 300]),
        (wants(9, 9.0, priority=-1), 2, [500]),
    ):
        ahead_slots, ahead_tokens = pool.ahead_of(newcomer)
        assert (ahead_slots, ahead_tokens.tolist()) == (slots, tokens)
    pool.remove(token(1))
    assert pool.ahead_of(wants(9, 4.0, arrival=2))[0] == 1


# long pools


def long_pool(waiting: int, *, entered: int, over: float, patience: float = 10.0) -> Pool:
    """After entries at a steady rate for much longer than the patience."""
    pool = Pool(10_000, patience)
    for number in range(waiting):
        pool.add(request(number, 100 + number, arrival=over))
    for turn in range(entered):
        pool.entered([request(waiting)], over * (turn + 1) / entered)
    return pool


@pytest.mark.parametrize(
    ("waiting", "expected"),
    [
        pytest.param(10, 10.0, id="arrival order would take 5 s: patience alone"),
        pytest.param(100, 100.0, id="twice the 50 s of arrival order"),
    ],
)
def test_in_a_long_pool_the_bound_is_twice_the_wait_of_arrival_order(
    waiting: int, expected: float
) -> None:
    pool = long_pool(waiting, entered=400, over=200.0)
    assert pool.bound == pytest.approx(expected, rel=0.06)
    assert [len(tier) for tier in pool.tiers(200 + 0.9 * expected, 1, 0)] == [waiting]
    assert [len(tier) for tier in pool.tiers(200 + 1.1 * expected, 1, 0)] == [1, waiting - 1]


def test_without_patience_the_bound_stays_infinite() -> None:
    assert long_pool(100, entered=40, over=200.0, patience=math.inf).bound == math.inf


def test_a_policy_chooses_from_the_oldest() -> None:
    pool = pool_of(*(request(number, 10 * number, arrival=number) for number in range(1, 6)))
    (tier,) = pool.tiers(0, 1, 0, choice=3)
    assert [one.id for one in tier] == [token(number) for number in (1, 2, 3)]
    assert tier.prompt_tokens.tolist() == [10, 20, 30]


def test_where_some_workers_cannot_serve_all_it_chooses_from_all() -> None:
    pool = pool_of(*(request(number, arrival=number) for number in range(1, 5)))
    pool.add(replace(request(5, arrival=9), lacks=frozenset("a")))
    assert sum(map(len, pool.tiers(0, 1, 0, choice=2))) == 5


def test_one_entry_in_eleven_goes_to_late_requests_of_less_urgent_priorities() -> None:
    pool = pool_of(*(request(number, arrival=50) for number in range(1, 30)))
    late = [request(90, priority=1, arrival=0), request(91, priority=2, arrival=-1)]
    for one in (*late, request(92, priority=1, arrival=50)):
        pool.add(one)
    turns = []
    for _ in range(25):
        first = pool.tiers(50, 1, 0)[0][0]
        pool.remove(first.id)
        pool.entered([first], 50)
        turns.append(first)
    places = [place for place, one in enumerate(turns) if one.priority]
    assert [turns[place] for place in places] == [late[1], late[0]]
    assert places == [10, 21]
    assert pool.tiers(50, 1, 0)[0][0].priority == 0, "the last one is not late"
