"""BF-IO on instances small enough to solve by hand."""

from collections.abc import Sequence
from fractions import Fraction

import pytest

from router.policies.bfio import BfIo, _Item, _Loads, _Search, _Shelf
from router.policies.room import Room
from router.types import WorkerView
from tests.support.core import pairs, request, requests, views


def solve(sizes: Sequence[int], workers: Sequence[WorkerView], mu: float = 0.1) -> dict[int, str]:
    waiting = requests(sizes)
    return dict(pairs(BfIo(mu).assign(waiting, workers), waiting))


@pytest.mark.parametrize(
    ("sizes", "workers", "expected"),
    [
        pytest.param([50, 10, 40], views([100, 60]), {1: "a", 0: "b"}, id="fill up to the peak"),
        pytest.param([90, 42, 39], views([100, 60], [0, 1]), {2: "b"}, id="never over it for less"),
        pytest.param([90, 41, 50], views([100, 60], [0, 1]), {1: "b"}, id="the least over it"),
        pytest.param([5, 3, 9], views([0, 0], [0, 0]), {}, id="no slot"),
        pytest.param([], views([0, 5]), {}, id="nobody waits"),
        pytest.param([7, 7, 7], views([0, 0]), {0: "a", 1: "b"}, id="the older among equals"),
        pytest.param([0, 0], views([0, 0], [2, 0]), {0: "a", 1: "a"}, id="empty prompts"),
        pytest.param(
            [8, 7, 6, 5, 4], views([0, 0], 3), {0: "b", 1: "b", 2: "a", 3: "a", 4: "a"}, id="all in"
        ),
        pytest.param([30, 10, 20], views([5], 2), {0: "a", 1: "a"}, id="a worker alone: by age"),
    ],
)
def test_choices(sizes: list[int], workers: list[WorkerView], expected: dict[int, str]) -> None:
    assert solve(sizes, workers) == expected


def test_ties_of_the_paper_are_broken_by_the_quadratic_term() -> None:
    sizes, workers = [10, 40, 90], views([0, 50, 100], [1, 1, 0])
    without, strict = solve(sizes, workers, mu=0.0), solve(sizes, workers)
    assert without == {1: "b", 2: "a"}
    assert strict == {1: "b", 2: "a"}
    assert solve([10, 60], views([0, 0, 100, 100], [1, 0, 0, 0]), mu=1e-9) == {1: "a"}


def test_a_wide_request_is_placed_where_it_costs_least_and_never_traded() -> None:
    waiting = [request(0, 10), request(1, 20, slots=2), request(2, 70), request(3, 5)]
    done = BfIo(0.1).assign(waiting, views([0, 50], [1, 2]))
    assert pairs(done, waiting)[0] == (1, "b")
    assert sorted(pairs(done, waiting)) == [(1, "b"), (2, "a")]


def test_wide_requests_overrun_and_then_wait() -> None:
    waiting = [request(0, 10, slots=3), request(1, 10, slots=2), request(2, 10, slots=2)]
    done = BfIo(0.1).assign(waiting, views([0, 0]))
    assert pairs(done, waiting) == [(0, "a"), (1, "b")]


@pytest.mark.parametrize("mu", [0.0, 1e-6, 0.1, 7.0])
@pytest.mark.parametrize("loads", [[0, 0], [3, 1, 2], [10**6, 10**6 + 1, 10**6 - 1] * 80])
def test_the_objective_is_the_papers_with_the_tie_break(loads: list[int], mu: float) -> None:
    mean = Fraction(sum(loads), len(loads))
    spread = sum((load - mean) ** 2 for load in loads)
    exact = len(loads) * max(loads) - sum(loads) + Fraction(mu) * spread
    kept = _Loads(loads, mu)
    assert kept.cost() == pytest.approx(float(exact), rel=1e-12)
    before = kept.cost()
    assert kept.cost_after(1, 5, max(loads)) != before
    assert kept.tokens == loads
    kept.change(1, 5)
    kept.change(1, -5)
    assert kept.cost() == before


@pytest.mark.parametrize("mu", [0.0, 1e-3, 0.1])
def test_the_ideal_size_costs_least(mu: float) -> None:
    loads = _Loads([700, 1000, 300], mu)
    ideal = loads.ideal_size(2, 1000)
    costs = [loads.cost_after(2, size, 1000) for size in range(1500)]
    assert abs(costs.index(min(costs)) - ideal) <= 1
    assert ideal <= 700, "never over the peak"


def test_the_shelf_offers_both_neighbours_of_a_size_the_older_among_equals() -> None:
    items = [_Item(one, one.load_tokens) for one in requests([30, 10, 30, 20, 20])]
    shelf = _Shelf(items)
    assert shelf.nearest(25) == [items[0], items[3]]
    assert shelf.nearest(30) == [items[0], items[3]]
    assert shelf.nearest(31) == [items[0]]
    assert shelf.nearest(-1) == [items[1]]
    shelf.take(items[2])
    assert shelf.largest() is items[0]
    shelf.take(items[0])
    assert (shelf.nearest(25), len(shelf)) == ([items[3]], 3)
    shelf.put(items[0])
    assert shelf.largest() is items[0]


def improved(
    loads: Sequence[int],
    capacity: Sequence[int],
    placed: Sequence[tuple[int, int]],
    shelf: Sequence[int] = (),
    mu: float = 0.1,
) -> tuple[list[tuple[int, int]], float, float]:
    """Improve a filling of (size, worker): the filling then, and J' before and after."""
    search = filled(loads, capacity, placed, shelf, mu)
    before = search._loads.cost()
    search.improve()
    return filling_of(search), before, search._loads.cost()


def filled(
    loads: Sequence[int],
    capacity: Sequence[int],
    placed: Sequence[tuple[int, int]],
    shelf: Sequence[int] = (),
    mu: float = 0.1,
) -> _Search:
    sizes = [size for size, _ in placed]
    items = [_Item(one, one.load_tokens) for one in requests([*sizes, *shelf])]
    search = _Search(Room(views(loads, capacity)), items, mu)
    for item, (_, worker) in zip(items, placed, strict=False):
        search._put(item, worker)
    return search


def filling_of(search: _Search) -> list[tuple[int, int]]:
    return [(item.size, item.worker) for item in search.placed]


@pytest.mark.parametrize(
    ("loads", "capacity", "placed", "shelf", "expected"),
    [
        pytest.param([0, 50], [1, 0], [(10, 0)], [45, 90], [(45, 0)], id="trade"),
        pytest.param([0, 0], [2, 2], [(10, 0), (11, 0)], [], [(10, 1), (11, 0)], id="move"),
        pytest.param(
            [0, 0],
            [2, 2],
            [(9, 0), (8, 0), (2, 1), (1, 1)],
            [],
            [(9, 1), (8, 0), (2, 0), (1, 1)],
            id="swap",
        ),
        pytest.param(
            [0, 10], [1, 1], [(12, 0), (1, 1)], [], [(12, 0), (1, 1)], id="nothing to mend"
        ),
    ],
)
def test_the_local_search_mends_a_poor_filling(
    loads: list[int],
    capacity: list[int],
    placed: list[tuple[int, int]],
    shelf: list[int],
    expected: list[tuple[int, int]],
) -> None:
    filling, before, after = improved(loads, capacity, placed, shelf)
    assert filling == expected
    assert (after < before) is (filling != placed)


def test_without_the_quadratic_term_only_the_peak_counts() -> None:
    placed = [(5, 0), (5, 1)]
    filling, before, after = improved([5, 5, 2], [1, 1, 1], placed, mu=0.0)
    assert (filling, before) == (placed, after), "two workers are at the peak: no move lowers it"
    assert improved([5, 0, 2], [2, 2, 1], placed, mu=0.0)[0] == [(5, 2), (5, 1)]


def test_a_move_fills_no_worker_beyond_its_slots() -> None:
    filling, _, _ = improved([0, 0, 0], [6, 1, 1], [(size, 0) for size in (10, 11, 12, 13)])
    assert sorted(worker for _, worker in filling) == [0, 0, 1, 2]


def test_a_move_frees_a_slot_for_the_next() -> None:
    search = filled([0, 0, 0], [2, 1, 2], [(10, 0), (10, 0), (30, 2), (25, 2)])
    assert search._move()
    assert filling_of(search) == [(10, 1), (10, 0), (30, 0), (25, 2)]
    assert search._capacity == [0, 0, 1]


def test_the_local_search_is_bounded() -> None:
    placed = [(2, 0)] * 200 + [(1, 1)] * 200
    filling, before, after = improved([0, 0], [200, 200], placed)
    assert 0 < after < before
    assert sum(1 for (_, old), (_, new) in zip(placed, filling, strict=True) if old != new) == 128
