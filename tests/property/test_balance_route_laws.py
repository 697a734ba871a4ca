"""BalanceRoute: subset sums and the peak of F against brute force, the contract with an outlook."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.forecast.forecast import Outlook, WorkProfile
from router.core.policies.balance_route import BalanceRoute, _Loads
from router.core.policies.bfio import subsets
from router.core.policies.bfio.subsets import Shelf
from router.core.policies.policy_protocol import Known
from router.core.rounds import assignment
from tests.support.core import request, views

POOLS = st.lists(st.integers(0, 40), min_size=1, max_size=9)


@given(sizes=POOLS, data=st.data(), limit=st.floats(0, 150))
@settings(deadline=None)
def test_a_subset_has_the_nearest_sum(sizes: list[int], data: st.DataObject, limit: float) -> None:
    count = data.draw(st.integers(1, len(sizes)))
    found = Shelf(sizes).subset(count, limit)
    assert len(set(found)) == len(found) == count
    sums = {sum(chosen) for chosen in combinations(sizes, count)}
    below = [total for total in sums if total <= limit]
    assert sum(sizes[candidate] for candidate in found) == max(below, default=min(sums))


@given(sizes=st.lists(st.integers(0, 10**7), min_size=3, max_size=9), limit=st.floats(0, 3e7))
@settings(deadline=None)
def test_long_sums_are_near(sizes: list[int], limit: float) -> None:
    got = sum(sizes[candidate] for candidate in Shelf(sizes).subset(2, limit))
    sums = {sum(pair) for pair in combinations(sizes, 2)}
    unit = 1 + (limit + max(sizes)) / subsets.MAX_BITS
    nearest = max((total for total in sums if total <= limit), default=min(sums))
    assert nearest - 2 * unit <= got <= max(nearest, limit) + 2 * unit


def test_long_sums_may_be_rounded_down_to_the_limit() -> None:
    assert Shelf([0, 0, 98303, 98303]).subset(2, 196605) == [2, 3]


def test_a_shelf_gives_up_what_is_taken() -> None:
    shelf = Shelf([5, 7, 5, 5])
    shelf.take([3, 0])
    assert (len(shelf), shelf.nearest(5), shelf.nearest(4), shelf.nearest(9)) == (
        2,
        [2, 1],
        [2],
        [1],
    )
    shelf.take([1, 2])
    assert not shelf
    assert shelf.nearest(5) == []


@given(sizes=POOLS, data=st.data(), limit=st.integers(-1, 41))
@settings(deadline=None)
def test_of_those_that_fit_the_oldest_nearest_are_found(
    sizes: list[int], data: st.DataObject, limit: int
) -> None:
    fits = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    shelf = Shelf(sizes)
    taken = data.draw(st.sets(st.sampled_from(range(len(sizes)))))
    shelf.take(sorted(taken))
    left = [one for one in range(len(sizes)) if fits[one] and one not in taken]
    below = [one for one in left if sizes[one] <= limit]
    above = [one for one in left if sizes[one] > limit]
    largest = [max(below, key=sizes.__getitem__)] if below else []
    smallest = [min(above, key=sizes.__getitem__)] if above else []
    assert shelf.nearest_of(np.array(fits), limit) == largest + smallest


@given(
    work=st.integers(1, 4).flatmap(
        lambda steps: st.lists(
            st.lists(st.integers(0, 60), min_size=steps, max_size=steps), min_size=2, max_size=4
        )
    )
)
@settings(deadline=None)
def test_the_peak_of_f(work: list[list[int]]) -> None:
    loads = _Loads(np.array(work, dtype=np.float64), alpha=1.0, beta=3.0, discount=0.7)
    margins = loads.margins(0)
    values = [
        sum(
            0.7**step * (total - 3.0 * max(0.0, total - margin))
            for step, margin in enumerate(margins)
        )
        for total in range(70)
    ]
    assert [loads.value(margins, total) for total in range(70)] == pytest.approx(values)
    assert loads.value(margins, int(loads.peak(margins))) == pytest.approx(max(values))


@given(
    waiting=st.lists(st.tuples(st.integers(0, 900), st.sampled_from([1, 1, 1, 2, 5])), max_size=14),
    rows=st.lists(st.tuples(st.integers(0, 5000), st.integers(-2, 6)), min_size=1, max_size=5),
    fall=st.lists(st.floats(0, 1), min_size=5, max_size=5),
)
@settings(deadline=None)
def test_rounds_agree_with_an_outlook(
    waiting: list[tuple[int, int]], rows: list[tuple[int, int]], fall: list[float]
) -> None:
    workers = views(*zip(*rows, strict=True))
    loads = np.array([load for load, _ in rows], dtype=np.float64)
    steps = np.stack([loads, loads * fall[: len(rows)], loads * fall[-len(rows) :]], axis=1)
    seen = Outlook(steps, WorkProfile(), discount=0.8, tie_weight=0.1)
    pool = [request(i, size, slots=slots) for i, (size, slots) in enumerate(waiting)]
    assignment.assign(BalanceRoute(), [pool[:7], pool[7:]], workers, Known(seen))
    assert seen.work.tolist() == steps.tolist(), "the outlook is the caller's"
