"""BF-IO on instances small enough to solve by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from router.core.forecast.forecast import Outlook, WorkProfile
from router.core.kv_blocks import KvBlocks
from router.core.policies.bfio.policy import BfIo
from router.core.policies.bfio.solver import UNLIMITED
from router.core.policies.policy_protocol import Known
from router.core.rounds import assignment as rounds
from router.core.types import Assignment, Request, WorkerView
from tests.support.core import pairs, request, requests, views

CONSTANT = WorkProfile(growth=0)


def outlook(work: Sequence[Sequence[float]], mu: float = 0.0, lead_tokens: float = 0.0) -> Outlook:
    """Requests do not grow, and every step counts alike."""
    return Outlook(np.array(work, dtype=np.float64), CONSTANT, 1.0, mu, lead_tokens)


def choices(
    waiting: Sequence[Request],
    workers: Sequence[WorkerView],
    mu: float = 0.1,
    ahead: Outlook | None = None,
) -> dict[int, str]:
    """Worker by the request's index in the pool."""
    return dict(pairs(BfIo(mu).assign(waiting, workers, Known(ahead)), waiting))


@pytest.mark.parametrize(
    ("sizes", "workers", "expected"),
    [
        pytest.param([50, 10, 40], views([100, 60]), {1: "a", 0: "b"}, id="fill up to the peak"),
        pytest.param([90, 42, 39], views([100, 60], [0, 1]), {2: "b"}, id="never over it for less"),
        pytest.param([90, 41, 50], views([100, 60], [0, 1]), {1: "b"}, id="the least over it"),
        pytest.param([5, 3, 9], views([0, 0], [0, 0]), {}, id="no slot"),
        pytest.param([5, 3, 9], views([0, 0], [-2, 0]), {}, id="overrun already"),
        pytest.param([5], views([9, 0], [1, -1]), {0: "a"}, id="never to one that is overrun"),
        pytest.param([], views([0, 5]), {}, id="nobody waits"),
        pytest.param([0, 0], views([0, 0], [2, 0]), {0: "a", 1: "a"}, id="empty prompts"),
        pytest.param([30, 10, 20], views([5], 2), {0: "a", 1: "a"}, id="a worker alone: by age"),
    ],
)
def test_choices(sizes: list[int], workers: list[WorkerView], expected: dict[int, str]) -> None:
    assert choices(requests(sizes), workers) == expected


def test_the_older_among_equals() -> None:
    assert set(choices(requests([7, 7, 7, 7]), views([0, 0]))) == {0, 1}


def test_all_get_in_and_are_spread_to_the_token() -> None:
    waiting = requests([8, 7, 6, 5, 4])
    chosen = choices(waiting, views([0, 0], 3))
    together = {frozenset(i for i in chosen if chosen[i] == worker) for worker in "ab"}
    assert together == {frozenset({0, 1}), frozenset({2, 3, 4})}


def test_the_quadratic_term_keeps_the_others_close() -> None:
    """124 lifts the peak, for 2 tokens less of idle work: the paper's program takes it."""
    waiting, workers = requests([50, 50, 124]), views([0, 0, 100], [1, 1, 0])
    assert 2 in choices(waiting, workers, mu=0.0)
    assert set(choices(waiting, workers, mu=0.1)) == {0, 1}


def test_the_quadratic_term_decides_where_the_paper_does_not() -> None:
    policy = BfIo(1e-9)
    done = policy.assign(requests([10, 10]), views([0, 0, 100], [2, 2, 0]))
    assert {assignment.worker_id for assignment in done} == {"a", "b"}


@pytest.mark.parametrize(("steps", "chosen"), [(1, 0), (3, 1)])
def test_who_fits_now_may_be_the_peak_of_the_next_steps(steps: int, chosen: int) -> None:
    work = [[0, 0, 0][:steps], [100, 0, 0][:steps]]
    found = choices(requests([100, 10]), views([0, 100], [1, 0]), ahead=outlook(work))
    assert found == {chosen: "a"}


@pytest.mark.parametrize(("discount", "chosen"), [(1.0, 1), (0.1, 0)])
def test_later_steps_count_less(discount: float, chosen: int) -> None:
    ahead = Outlook(np.array([[0.0, 0, 0], [100, 0, 0]]), CONSTANT, discount, 0.0)
    assert choices(requests([100, 10]), views([0, 100], [1, 0]), ahead=ahead) == {chosen: "a"}


@pytest.mark.parametrize(("lead_tokens", "chosen"), [(0.0, 0), (30.0, 1)])
def test_a_worker_that_can_be_filled_is_left_lower(lead_tokens: float, chosen: int) -> None:
    ahead = outlook([[0], [100]], lead_tokens=lead_tokens)
    assert choices(requests([100, 70]), views([0, 100], [1, 0]), ahead=ahead) == {chosen: "a"}


def test_wide_requests_are_placed_first_and_never_traded() -> None:
    waiting = [request(0, 10), request(1, 20, slots=2), request(2, 70), request(3, 5)]
    done = BfIo(0.1).assign(waiting, views([0, 50], [1, 2]))
    assert pairs(done, waiting) == [(1, "b"), (2, "a")]


def test_a_wide_request_goes_where_the_objective_grows_least() -> None:
    waiting, workers = [request(0, 30, slots=2)], views([0, 50], 2)
    assert choices(waiting, workers, ahead=outlook([[0], [50]])) == {0: "a"}
    assert choices(waiting, workers, ahead=outlook([[0, 200], [50, 0]])) == {0: "b"}


def test_wide_requests_overrun_and_then_wait() -> None:
    waiting = [request(0, 10, slots=3), request(1, 10, slots=2), request(2, 10, slots=2)]
    done = BfIo(0.1).assign(waiting, views([0, 0]))
    assert pairs(done, waiting) == [(0, "a"), (1, "b")]


def test_the_last_decision_can_be_looked_at() -> None:
    policy = BfIo(0.1)
    assert policy.last is None
    waiting = requests([50, 10, 40])
    done = policy.assign(waiting, views([100, 60]))
    assert policy.last is not None
    instance, solution = policy.last.instance, policy.last.solution
    assert solution.places.tolist() == [1, 0, -1], "workers are numbered as in the views"
    assert pairs(done, waiting) == [(0, "b"), (1, "a")]
    assert solution.objective == instance.objective(solution.places) == 0.0


def test_without_an_outlook_the_present_loads_count() -> None:
    policy = BfIo(0.1)
    policy.assign(requests([50, 10]), views([100, 60], [1, 2]))
    assert policy.last is not None
    instance = policy.last.instance
    assert instance.loads.tolist() == [[100], [60]]
    assert instance.candidates.tolist() == [[50], [10]]
    assert instance.capacity.tolist() == [1, 2]
    assert (instance.weights.tolist(), instance.tie_weight) == ([1.0], 0.1)


def test_an_outlook_weighs_steps_and_ties() -> None:
    policy = BfIo(0.1)
    work = np.array([[7.0, 8.0], [5.0, 6.0]])
    ahead = Outlook(work, WorkProfile(), 0.5, 3.0)
    policy.assign(requests([50]), views([100, 60], [0, 2]), Known(ahead))
    assert policy.last is not None
    instance = policy.last.instance
    assert instance.loads.tolist() == [[7, 8], [5, 6]]
    assert instance.candidates.tolist() == [[50, 51]]
    assert (instance.weights.tolist(), instance.tie_weight) == ([1.0, 0.5], 3.0)


def test_a_worker_alone_has_nothing_to_solve() -> None:
    policy = BfIo(0.1)
    policy.assign(requests([50]), views([100, 60], 1))
    assert policy.last is not None
    policy.assign(requests([50]), views([100], 1))
    assert policy.last is None


class Asked(BfIo):
    """Keeps the moves of each call."""

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self.calls: list[int] = []

    def assign(self, *asked: Any) -> Sequence[Assignment]:
        done = super().assign(*asked)
        assert self.last is not None
        self.calls.append(self.last.solution.moves)
        return done


@pytest.mark.parametrize("tiers", [1, 8, 16])
def test_the_tiers_of_a_round_share_the_budget(tiers: int) -> None:
    waiting = requests(np.random.default_rng(0).integers(10, 3000, 320).tolist())
    workers = views([9000 - 400 * i for i in range(12)], 20)
    policy = Asked(0.1, 6000)
    rounds.assign(policy, [waiting[i::tiers] for i in range(tiers)], workers)
    assert 5000 < sum(policy.calls) < 6500


@pytest.mark.parametrize(("tiers", "searches"), [(1, 1), (2, 2), (6, 5)])
def test_one_search_per_tier_shares_the_budget_where_memory_is_tight(
    tiers: int, searches: int
) -> None:
    """None where nobody fits, as for the request without patience, whose room is kept."""
    rng = np.random.default_rng(0)
    waiting = requests(rng.lognormal(6, 1.2, 30).astype(int).tolist())
    workers = [
        msgspec.structs.replace(worker, admissible_tokens=int(rng.integers(100, 1000)), requests=9)
        for worker in views([4800 - 400 * i for i in range(12)], 3)
    ]
    policy = Asked(0.1, 6000)
    late = request(99, 5000, arrival=-1)
    in_turn = [[late, *waiting[::tiers]], *(waiting[i::tiers] for i in range(1, tiers))]
    done = rounds.assign(policy, in_turn, workers, late_since=-1.0)
    assert len(done) > 12
    assert len(policy.calls) == searches
    assert sum(policy.calls) < 6500
    assert sum(policy.calls) == policy.spent, "as the metric has it"


def test_the_program_has_the_workers_memory_and_the_requests_needs() -> None:
    blocks = KvBlocks.plain(16)
    limited = {"kv": blocks, "admissible_blocks": 9}
    workers = views([50, 10, 70], 2, [1, 0, 1])
    workers[:2] = [msgspec.structs.replace(worker, **limited) for worker in workers[:2]]
    policy = BfIo(0.1)
    policy.assign(requests([40, 16, 200]), workers)
    assert policy.last is not None
    memory = policy.last.instance.memory
    assert memory is not None
    assert memory.room.tolist() == [9, 9, UNLIMITED]
    assert memory.need.tolist() == [3, 1, 13]
    assert memory.idle.tolist() == [False, True, False]


def test_requests_of_several_slots_take_memory_before_the_others() -> None:
    waiting = [request(0, 40, slots=2), request(1, 90, slots=2), request(2, 30)]
    workers = [
        msgspec.structs.replace(worker, admissible_tokens=room)
        for worker, room in zip(views([50, 10], 3, [1, 1]), [100, 110], strict=True)
    ]
    assert choices(waiting, workers) == {0: "b", 2: "a"}
    assert choices(waiting, [msgspec.structs.replace(workers[0], requests=0), workers[1]]) == {
        0: "b",
        1: "a",
        2: "b",
    }


def test_engines_that_count_memory_differently_are_served_one_by_one() -> None:
    workers = views([50, 10], 2, [1, 1])
    blocks = {"kv": KvBlocks.plain(16), "admissible_blocks": 3}
    workers[0] = msgspec.structs.replace(workers[0], **blocks)
    workers[1] = msgspec.structs.replace(workers[1], admissible_tokens=20)
    waiting = requests([40, 16, 16])
    policy = BfIo(0.1)
    assert pairs(rounds.assign(policy, [waiting], workers), waiting) == [(0, "a"), (1, "b")]
    assert policy.last is None
