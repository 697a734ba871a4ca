"""A round checks what a policy says before anybody acts on it."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from router.core.errors import PolicyError
from router.core.kv_blocks import KvBlocks
from router.core.policies.baselines import PerRequest, fcfs
from router.core.policies.policy_protocol import NOTHING, Known, Policy
from router.core.queue.pool import Pool
from router.core.queue.tier import Tier
from router.core.rounds import assignment
from router.core.rounds.assignment import receive
from router.core.types import Assignment, Request, WorkerView
from tests.support.core import pairs, request, requests, token, views


class Scripted(Policy):
    """A policy that answers as it is told and keeps what it was asked."""

    def __init__(self, *answers: Sequence[tuple[int, str]]) -> None:
        self._answers = iter(answers)
        self.asked: list[tuple[int, list[WorkerView]]] = []

    def assign(
        self,
        waiting: Sequence[Request],
        workers: Sequence[WorkerView],
        known: Known = NOTHING,
    ) -> Sequence[Assignment]:
        self.asked.append((len(waiting), list(workers)))
        return [Assignment(token(number), worker) for number, worker in next(self._answers)]


def test_requests_change_the_worker_that_receives_them() -> None:
    worker = WorkerView("a", 1000, 4, 3)
    assert receive(worker, [request(1, 50, slots=2)]) == WorkerView(
        "a", 1100, 6, 1, pending_prompt_tokens=100
    )
    assert receive(worker, requests([5, 6]), cached_tokens=4) == WorkerView(
        "a", 1011, 6, 1, pending_prompt_tokens=7
    )
    assert receive(worker, []) is worker
    limited = msgspec.structs.replace(worker, admissible_tokens=60)
    assert receive(limited, requests([50])).admissible_tokens == 10
    assert receive(limited, requests([70])).admissible_tokens == 0
    in_blocks = msgspec.structs.replace(worker, admissible_blocks=5, kv=KvBlocks.plain(16))
    assert receive(in_blocks, requests([40])).room == 2
    assert receive(in_blocks, requests([90])).room == 0


def test_tiers_are_served_one_after_the_other_from_what_the_last_left() -> None:
    waiting = requests([10, 20, 30])
    policy = Scripted([(0, "b")], [(2, "a"), (1, "b")])
    done = assignment.assign(policy, [waiting[:1], waiting[1:]], views([0, 5], 2))
    assert pairs(done, waiting) == [(0, "b"), (2, "a"), (1, "b")]
    first, second = views([0, 15], [2, 1], [0, 1])
    assert policy.asked == [
        (1, views([0, 5], 2, [0, 0])),
        (2, [first, msgspec.structs.replace(second, pending_prompt_tokens=10)]),
    ]


class Budgeted(PerRequest):
    """Keeps the share of its budget that it has for each tier."""

    solves = True

    def __init__(self) -> None:
        super().__init__(fcfs)
        self.shares: list[float] = []

    def assign(
        self,
        waiting: Sequence[Request],
        workers: Sequence[WorkerView],
        known: Known = NOTHING,
    ) -> Sequence[Assignment]:
        self.shares.append(self.share)
        return super().assign(waiting, workers, known)


@pytest.mark.parametrize(
    ("capacity", "shares"),
    [([2, 2], [0.25, 0.5, 0.25]), ([9, 0], [0.2, 0.4, 0.4]), ([3, -1], [1 / 3, 2 / 3])],
)
def test_tiers_share_a_budget_by_the_slots_that_they_fill(
    capacity: list[int], shares: list[float]
) -> None:
    waiting = [request(0), request(1, slots=2), request(2), request(3)]
    policy = Budgeted()
    assignment.assign(policy, [waiting[:1], waiting[1:2], waiting[2:]], views([0, 0], capacity))
    assert policy.shares == pytest.approx(shares)


def test_a_tier_alone_has_the_whole_budget() -> None:
    policy = Budgeted()
    assignment.assign(policy, [requests([10])], views([0], 9))
    assert policy.shares == [1.0]


def test_no_tier_is_asked_for_once_capacity_is_used_up() -> None:
    waiting = requests([10, 20, 30])
    policy = Scripted([(0, "a")])
    assert len(assignment.assign(policy, [[one] for one in waiting], views([0]))) == 1
    assert len(policy.asked) == 1


@pytest.mark.parametrize("workers", [[], views([0, 0], 0), views([0], -2)])
def test_without_capacity_no_policy_is_asked(workers: list[WorkerView]) -> None:
    policy = Scripted()
    assert assignment.assign(policy, [requests([10])], workers) == []
    assert policy.asked == []


def test_nobody_waits() -> None:
    assert assignment.assign(PerRequest(fcfs), [], views([0])) == []


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([(0, "a"), (0, "b")], "es-0+0 is assigned twice, or does not wait"),
        ([(7, "a")], "es-0+7 is assigned twice, or does not wait"),
        ([(0, "c")], "c is not a live worker of the group"),
        ([(0, "a"), (1, "a")], "a was given more requests than it has free slots"),
        ([(0, "a")], "1 requests are held back"),
        ([], "2 requests are held back"),
        ([(2, "a"), (0, "a")], "a was given more requests than it has free slots"),
    ],
)
def test_a_broken_contract_is_an_error(answer: list[tuple[int, str]], message: str) -> None:
    waiting = [request(0), request(1), request(2, slots=3)]
    tier = waiting if answer and answer[0][0] == 2 else waiting[:2]
    with pytest.raises(PolicyError, match=message):
        assignment.assign(Scripted(answer), [tier], views([0, 0]))


def test_the_last_request_of_a_worker_may_be_wider_than_what_is_left() -> None:
    policy = Scripted([(0, "a"), (1, "b")])
    assert len(assignment.assign(policy, [[request(0, slots=3), request(1)]], views([0, 0]))) == 2


def test_a_broken_contract_in_a_later_tier_is_found_too() -> None:
    policy = Scripted([(0, "a")], [(1, "a")])
    with pytest.raises(PolicyError, match="more requests than it has"):
        assignment.assign(policy, [[request(0)], [request(1)]], views([0, 0]))


@pytest.mark.parametrize(
    ("loads", "capacity", "gap"),
    [
        ([500, 300, 900], [1, 1, 1], 600),
        ([500, 300, 900], [1, 0, 1], 400),
        ([500, 300, 900], [0, 0, 1], 0),
        ([500, 300], [0, 0], 0),
    ],
)
def test_the_gap_is_between_the_fullest_and_the_least_loaded_open_worker(
    loads: list[int], capacity: list[int], gap: int
) -> None:
    assert assignment.gap_tokens(views(loads, capacity)) == gap


def in_memory(rooms: Sequence[int | None], requests: Sequence[int], slots: int) -> list[WorkerView]:
    """Workers with so many free slots, and so much room for prompts."""
    plain = views([0] * len(rooms), slots, list(requests))
    return [
        msgspec.structs.replace(one, admissible_tokens=room)
        for one, room in zip(plain, rooms, strict=True)
    ]


@pytest.mark.parametrize(
    ("rooms", "running", "answer"),
    [
        ([60, 60], 1, [(0, "a"), (1, "b"), (2, "b")]),
        ([100, 0], 1, [(0, "a"), (1, "a"), (2, "a")]),
        ([None, 10], 1, [(0, "a"), (1, "a"), (2, "a")]),
        ([10, 10], 0, [(0, "a"), (1, "b")]),
        ([10, 60], 0, [(0, "a"), (1, "b"), (2, "b")]),
        ([10, 10], 1, []),
    ],
)
def test_answers_within_memory_are_taken(
    rooms: list[int | None], running: int, answer: list[tuple[int, str]]
) -> None:
    """One that runs nothing takes a single request, whatever it needs."""
    waiting = requests([50, 30, 20])
    done = assignment.assign(Scripted(answer), [waiting], in_memory(rooms, [running] * 2, 3))
    assert pairs(done, waiting) == answer


@pytest.mark.parametrize(
    ("rooms", "running", "answer", "message"),
    [
        ([60, 60], 1, [(0, "a"), (2, "a"), (1, "b")], "a was given more than its memory"),
        ([60, 60], 0, [(0, "a"), (2, "a"), (1, "b")], "a was given more than its memory"),
        ([60, 10], 1, [(0, "b")], "b was given more than its memory"),
        ([60, 60], 1, [(0, "a"), (1, "b")], "1 requests are held back"),
        ([60, None], 1, [(0, "a")], "2 requests are held back"),
        ([30, 19], 1, [], "2 requests are held back"),
        ([10, 10], 0, [(0, "a")], "2 requests are held back"),
    ],
)
def test_answers_beyond_memory_and_free_memory_unused_are_errors(
    rooms: list[int | None], running: int, answer: list[tuple[int, str]], message: str
) -> None:
    workers = in_memory(rooms, [running] * 2, 3)
    with pytest.raises(PolicyError, match=message):
        assignment.assign(Scripted(answer), [requests([50, 30, 20])], workers)


def test_memory_is_checked_in_each_workers_own_units() -> None:
    blocks = KvBlocks.plain(16)
    workers = in_memory([None, 40], [1, 1], 3)
    workers[0] = msgspec.structs.replace(workers[0], kv=blocks, admissible_blocks=4)
    waiting = requests([50, 40])
    done = assignment.assign(Scripted([(0, "a"), (1, "b")]), [waiting], workers)
    assert len(done) == 2
    with pytest.raises(PolicyError, match="a was given more than its memory"):
        assignment.assign(Scripted([(0, "a"), (1, "a")]), [waiting], workers)
    with pytest.raises(PolicyError, match="1 requests are held back"):
        assignment.assign(Scripted([(0, "a")]), [waiting], workers)


def test_nobody_is_asked_while_no_memory_is_free() -> None:
    workers = in_memory([10, 10], [3, 3], 3)
    tiers = [requests([500]), requests([40, 300]), requests([30])]
    assert assignment.assign(Scripted(), tiers, workers) == []
    blocks = KvBlocks.plain(16)
    counted = [msgspec.structs.replace(one, kv=blocks, admissible_blocks=1) for one in workers]
    assert assignment.assign(Scripted(), tiers, counted) == []
    mixed = [workers[0], counted[1]]
    assert assignment.assign(Scripted(), tiers, mixed) == []
    last = [request(0, 500), request(1, 16)]
    policy = Scripted([(1, "b")])
    assert pairs(assignment.assign(policy, [last], mixed), last) == [(1, "b")]


def test_a_tier_that_lacks_memory_is_asked_for_once_with_its_whole_share() -> None:
    policy = Budgeted()
    tiers = [requests([50, 30, 20]), requests([45, 25])]
    assignment.assign(policy, tiers, in_memory([60, 40, 99], [1] * 3, 3))
    assert policy.shares == pytest.approx([0.6, 0.4])


def test_the_roomiest_worker_is_kept_for_an_urgent_request_that_fits_nowhere() -> None:
    waiting = requests([500, 40, 30])
    policy = Scripted([(1, "b"), (2, "b")])
    workers = in_memory([200, 100], [3, 3], 3)
    done = assignment.assign(policy, [waiting[:1], waiting[1:]], workers)
    assert pairs(done, waiting) == [(1, "b"), (2, "b")]
    assert [worker.capacity for worker in policy.asked[0][1]] == [0, 3]


@pytest.mark.parametrize("room", [600, 100])
def test_a_late_request_precedes_its_tier_or_has_a_worker_kept(room: int) -> None:
    waiting = requests([500, 40, 30])
    first, then = [(0, "a")] if room == 600 else [], [(1, "b"), (2, "b")]
    policy = Scripted(*filter(None, [first, then]))
    workers = in_memory([room, 90], [3, 3], 3)
    done = assignment.assign(policy, [waiting], workers, late_since=0.0)
    assert pairs(done, waiting) == first + then
    assert [asked for asked, _ in policy.asked] == ([1, 2] if first else [2])


def test_a_late_request_alone_that_fits_nowhere_leaves_nobody_to_ask_for() -> None:
    waiting, policy = requests([500]), Scripted()
    workers = in_memory([100, 90], [3, 3], 3)
    assert not assignment.assign(policy, [waiting], workers, late_since=0.0)


def test_it_is_kept_only_where_the_urgent_request_may_go() -> None:
    urgent = replace(request(1, 500), lacks=frozenset("b"))
    waiting = [request(2, 40), request(3, 30)]
    workers = in_memory([100, 200], [3, 3], 3)
    tiers = [Tier.of([urgent], lacks=urgent.lacks), Tier.of(waiting)]
    done = assignment.assign(PerRequest(fcfs), tiers, workers, late_since=0.0)
    assert [worker_id for _, worker_id in done] == ["b", "b"]


# those that workers have failed


def pooled(*waiting: Request) -> Pool:
    pool = Pool(100)
    for one in waiting:
        pool.add(one)
    return pool


def sent(pool: Pool, workers: Sequence[WorkerView], askable: str) -> dict[int, str]:
    """Who goes to the first free worker, if these may be asked."""
    tiers = pool.tiers(0.0, 100, 0)
    made = assignment.assign(PerRequest(fcfs), tiers, workers, askable=set(askable))
    return {int(request_id.lstrip("es-")): worker_id for request_id, worker_id in made}


def test_who_was_failed_by_a_worker_goes_elsewhere_and_first() -> None:
    pool = pooled(request(1, 10), replace(request(2, 10, arrival=9), avoid=frozenset("a")))
    assert sent(pool, [WorkerView("a", 0, 1, 1), WorkerView("b", 9, 1, 1)], "ab") == {
        2: "b",
        1: "a",
    }


def test_it_waits_for_another_worker_that_is_full_and_holds_nobody_up() -> None:
    pool = pooled(request(1, 10), replace(request(2, 10), avoid=frozenset("a")))
    assert sent(pool, [WorkerView("a", 0, 1, 2), WorkerView("b", 9, 1, 0)], "ab") == {1: "a"}


@pytest.mark.parametrize("askable", ["a", ""])
def test_where_no_other_worker_is_left_the_same_one_has_it(askable: str) -> None:
    pool = pooled(replace(request(2, 10), avoid=frozenset("a")))
    assert sent(pool, [WorkerView("a", 0, 1, 2), WorkerView("b", 9, 1, 0)], askable) == {2: "a"}


# those whose model only some workers serve


def test_a_request_goes_to_a_worker_that_serves_its_model_and_before_its_peers() -> None:
    pool = pooled(request(1, 10), replace(request(2, 10, arrival=9), lacks=frozenset("a")))
    both = [WorkerView("a", 0, 1, 1), WorkerView("b", 9, 1, 1)]
    assert sent(pool, both, "") == {2: "b", 1: "a"}
    assert [list(tier.lacks) for tier in pool.tiers(0.0, 100, 0)] == [["a"], []]
    pool.remove(token(2))
    assert [tier.lacks for tier in pool.tiers(0.0, 100, 0)] == [frozenset()]


@pytest.mark.parametrize("avoid", ["", "b"])
def test_it_waits_for_such_a_worker_and_holds_nobody_up(avoid: str) -> None:
    choosy = replace(request(2, 10), avoid=frozenset(avoid), lacks=frozenset("a"))
    workers = [WorkerView("a", 0, 1, 2), WorkerView("b", 9, 1, 0)]
    assert sent(pooled(request(1, 10), choosy), workers, "ab") == {1: "a"}


def test_of_those_that_serve_it_it_avoids_who_has_failed_it() -> None:
    choosy = replace(request(2, 10), avoid=frozenset("b"), lacks=frozenset("a"))
    workers = [WorkerView(worker, 0, 1, 2) for worker in "abc"]
    assert sent(pooled(choosy), workers, "abc") == {2: "c"}
    assert sent(pooled(choosy), workers, "ab") == {2: "b"}


def test_memory_counts_for_those_who_avoid_a_worker_too() -> None:
    """The second does not fit, and a place is kept for it at the worker that it may go to."""
    waiting = [replace(request(i, 60), avoid=frozenset("a")) for i in (1, 2)]
    room = msgspec.structs.replace(WorkerView("b", 9, 1, 4), admissible_tokens=100)
    pool = pooled(*waiting, request(3, 20))
    assert sent(pool, [WorkerView("a", 0, 1, 4), room], "ab") == {1: "b", 3: "a"}
