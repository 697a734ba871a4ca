"""Fair shares between tenants: what each may have, whose turn it is, and who keeps a place."""

import math
from dataclasses import replace

import pytest

from router.core.queue.fair_share import FairShare, equal, level
from router.core.queue.pool import Pool
from router.core.types import Request
from tests.support.core import request, token

WEIGHTS = {"heavy": 3.0, "light": 0.5}


def weight(tenant: str) -> float:
    return WEIGHTS.get(tenant, 1.0)


@pytest.mark.parametrize(
    ("wanted", "slots", "expected"),
    [
        pytest.param({"a": 3, "b": 4}, 8, math.inf, id="enough for all"),
        pytest.param({"a": 3, "b": 4}, 7, 4, id="just enough"),
        pytest.param({"a": 9, "b": 9}, 8, 4, id="halves"),
        pytest.param({"a": 1, "b": 9, "c": 9}, 8, 3.5, id="what one leaves is the others'"),
        pytest.param({"heavy": 90, "a": 90}, 8, 2, id="by weight"),
        pytest.param({"heavy": 5, "a": 90, "light": 90}, 8, 2, id="weights, and one wants less"),
        pytest.param({"a": 1, "b": 1}, 0, 0, id="nothing to divide"),
    ],
)
def test_the_level_divides_all_slots(
    wanted: dict[str, float], slots: float, expected: float
) -> None:
    found = level(wanted, weight, slots)
    assert found == expected
    shares = [min(wanted[each], found * weight(each)) for each in wanted]
    assert sum(shares) == pytest.approx(min(slots, sum(wanted.values())))


def lately(**held: int) -> FairShare:
    """One that has seen these slots in use for long."""
    fair = FairShare(weight)
    fair.see(0.0, held)
    fair.see(1e9, held)
    return fair


def test_slots_of_late_are_averaged_and_forgotten() -> None:
    fair = FairShare(of_late_s=10.0)
    fair.see(5.0, {"a": 4})
    assert fair.of_late("a") == 0, "no time has passed"
    fair.see(6.0, {"a": 4})
    assert fair.of_late("a") == pytest.approx(4), "nothing is known of before"
    fair.see(1e9, {"a": 4})
    fair.see(1e9 + 10, {"b": 8})
    assert fair.of_late("a") == pytest.approx(4 / math.e)
    assert fair.of_late("b") == pytest.approx(8 - 8 / math.e)
    fair.see(2e9, {})
    assert (fair.of_late("a"), fair.of_late("b")) == (0.0, 0.0)


ALL = math.inf


@pytest.mark.parametrize(
    ("of_late", "held", "waiting", "expected"),
    [
        pytest.param((12, 3), (12, 3), (90, 1), [{"b": ALL}, {"a": ALL}], id="b wants little"),
        pytest.param((1, 0), (1, 0), (3, 4), [{"a": ALL, "b": ALL}], id="there is room for both"),
        pytest.param((15, 0), (15, 0), (90, 90), [{"b": ALL}], id="a has had too much of late"),
        pytest.param((10, 6), (8, 7), (90, 90), [{"b": ALL}], id="of late counts more than now"),
        pytest.param((8, 7), (8, 7), (90, 90), [{"a": ALL, "b": ALL}], id="alike"),
        pytest.param((5, 3), (5, 4), (90, 90), [{"b": ALL}, {"a": ALL}], id="a step apart"),
        pytest.param((9, 9), (9, 9), (90, 90), [{"a": ALL, "b": ALL}], id="hardly more"),
    ],
)
def test_whose_turn_it_is(
    of_late: tuple[int, int],
    held: tuple[int, int],
    waiting: tuple[int, int],
    expected: list[dict[str, float]],
) -> None:
    fair = lately(a=of_late[0], b=of_late[1])
    slots = {"a": held[0], "b": held[1]}
    capacity = max(0, 16 - sum(held))
    assert fair.turns(slots, {"a": waiting[0], "b": waiting[1]}, capacity) == expected


def test_nobody_is_offered_much_more_than_its_share_when_many_slots_are_free() -> None:
    (turn,) = lately(a=8, b=8).turns({}, {"a": 90, "b": 90}, 16)
    room = 3 * 1.1 * 8 - 2 * 8
    assert turn["a"] == turn["b"] == pytest.approx(room + 2)
    assert FairShare().turns({}, {"a": 90, "b": 90}, 16) == [{"a": ALL, "b": ALL}]


def test_shares_are_by_weight() -> None:
    waiting = {"heavy": 90, "a": 90}
    for held, first in (({"heavy": 14, "a": 1}, "a"), ({"heavy": 9, "a": 6}, "heavy")):
        assert lately(**held).turns(held, waiting, 1) == [{first: ALL}]


def of(tenant: str, number: int, arrival: float = 0, **fields: int) -> Request:
    return replace(request(number, arrival=arrival, **fields), tenant=tenant)


def tiers(pool: Pool, *turns: dict[str, float], now: float = 0) -> list[list[str]]:
    """Tiers as lists of the requests' numbers."""
    return [[one.id.lstrip("es-0") for one in tier] for tier in pool.tiers(now, 2, 0, turns)]


def test_tenants_have_their_turns_and_in_each_everything_is_as_it_is_of_one() -> None:
    pool = Pool(100, starvation=10)
    for one in (
        *(of("a", 1, 0), of("a", 2, 1), of("a", 3, 95)),
        *(of("b", 4, 94), of("b", 5, 96), of("b", 6, 97, priority=-1)),
        *(of("c", 7, 2), of("c", 8, 98)),
    ):
        pool.add(one)
    assert tiers(pool, {"b": math.inf}, {"c": 1}, now=100) == [
        *(["6"], ["4", "5"]),  # b, by priority
        ["7"],  # c as far as it is offered
        *(["1"], ["2", "3", "8"]),  # all others: a late one first
    ]


def test_requests_and_slots_are_counted_by_tenant() -> None:
    pool = Pool(100)
    for one in (of("a", 1, slots=3), of("a", 2), of("b", 3)):
        pool.add(one)
    assert (pool.requests_of, pool.slots_of) == ({"a": 2, "b": 1}, {"a": 4, "b": 1})
    pool.remove(token(1))
    pool.remove(token(3))
    assert (pool.requests_of, pool.slots_of) == ({"a": 1}, {"a": 1})


@pytest.mark.parametrize(
    ("waiting", "newcomer", "displaced"),
    [
        pytest.param("aaaa", "b", 4, id="the newest of the only one"),
        pytest.param("aabab", "b", None, id="then it would have more"),
        pytest.param("aaaab", "b", 4, id="then it has as many"),
        pytest.param("aaaa", "a", None, id="its own are as good"),
        pytest.param("aaaab", "a", None, id="it has the most itself"),
        pytest.param("abbbbc", "c", 5, id="the one with the most gives way"),
        pytest.param(["heavy"] * 6 + ["a"] * 2, "a", None, id="by weight it has the most"),
        pytest.param(["heavy"] * 4 + ["a"] * 4, "heavy", 8, id="by weight it has little"),
        pytest.param("", "a", None, id="nobody waits"),
    ],
)
def test_who_gives_its_place_up(
    waiting: str | list[str], newcomer: str, displaced: int | None
) -> None:
    pool = Pool(len(waiting))
    for number, tenant in enumerate(waiting, 1):
        pool.add(of(tenant, number, number))
    found = pool.displaced_by(newcomer, weight)
    assert (found and found.id) == (displaced and token(displaced))


def test_the_last_in_order_gives_way_not_the_youngest() -> None:
    pool = Pool(3)
    for one in (of("a", 1, 1, priority=2), of("a", 2, 2), of("a", 3, 3)):
        pool.add(one)
    found = pool.displaced_by("b", equal)
    assert found is not None
    assert found.id == token(1)
