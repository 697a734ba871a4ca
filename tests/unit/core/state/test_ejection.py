"""Workers that fail requests, as their group sees them."""

from collections.abc import Iterable

import pytest

from router.core.events import (
    Arrived,
    Dispatched,
    Ended,
    EngineFailed,
    SnapshotReceived,
    WorkerDown,
    WorkerUp,
)
from router.core.state.breaker import BreakerSettings
from router.core.state.cluster import Cluster
from router.core.state.group import Group
from router.core.types import Dispatch, Outcome, WorkerSpec
from tests.support.core import request, snapshot, token

SETTINGS = BreakerSettings(breaker_failures=2, breaker_open_s=5, breaker_trials=1, slow_start_s=8)


def cluster(workers: Iterable[str], *, lockstep: bool = False) -> Cluster:
    specs = [WorkerSpec(i, f"http://{i}", slots=8) for i in workers]
    made = Cluster(specs, ("default",) if lockstep else (), breakers=SETTINGS)
    for spec in specs:
        made.apply(WorkerUp(spec.id))
    return made


def capacities(group: Group, now: float) -> list[int]:
    group.review(now)
    return [view.capacity for view in group.views(Dispatch.POOL)]


def fail(
    group: Group, worker: str, now: float = 0.0, *, times: int = SETTINGS.breaker_failures
) -> None:
    for _ in range(times):
        group.failed(worker, "x", now, suspect=False)


def test_an_ejected_worker_is_given_nothing_and_is_live_all_the_same() -> None:
    group = cluster("abc").groups["default"]
    fail(group, "b")
    assert capacities(group, 1) == [8, 0, 8]
    assert (group.askable, group.ejections) == ({"a", "c"}, 1)
    assert group.workers["b"].live


def test_trials_come_first_and_then_its_slots_grow() -> None:
    made = cluster("ab")
    group = made.groups["default"]
    fail(group, "b")
    assert capacities(group, 5) == [8, 1]
    made.apply(Arrived(request(1)))
    made.apply(Dispatched(token(1), "b"))
    assert capacities(group, 5) == [8, 0]
    group.workers["b"].breaker.succeeded(token(1), 6)
    assert capacities(group, 6) == [8, 0]  # the trial is still there
    made.apply(Ended(token(1), Outcome.COMPLETED))
    assert [capacities(group, at)[1] for at in (6, 10, 13, 14)] == [1, 4, 7, 8]
    assert not group.review(15)


def test_a_trial_whose_client_left_makes_room_for_another() -> None:
    made = cluster("ab")
    group = made.groups["default"]
    fail(group, "b")
    capacities(group, 5)
    made.apply(Arrived(request(1)))
    made.apply(Dispatched(token(1), "b"))
    made.apply(Ended(token(1), Outcome.ABORTED))
    assert capacities(group, 6) == [8, 1]


def test_no_more_than_half_of_the_live_workers_are_ejected() -> None:
    made = cluster("abcde")
    group = made.groups["default"]
    made.apply(WorkerDown("e", "gone"))
    for worker in "abc":
        fail(group, worker)
    assert capacities(group, 1) == [0, 0, 8, 8]
    assert group.ejections == 2


def test_all_that_breaks_with_a_worker_that_goes_down_is_one_failure() -> None:
    made = cluster("ab")
    group = made.groups["default"]
    fail(group, "b", times=1)
    made.apply(WorkerDown("b", "one connection broke"))
    fail(group, "b", times=20)
    made.apply(WorkerUp("b"))
    assert capacities(group, 1) == [8, 8]


def test_an_ejected_rank_does_not_take_its_lockstep_group_down() -> None:
    group = cluster("ab", lockstep=True).groups["default"]
    fail(group, "b")
    assert capacities(group, 1) == [8, 0]
    assert all(worker.live for worker in group.workers.values())


def test_the_last_worker_that_is_left_is_used_however_it_fails() -> None:
    made = cluster("ab")
    group = made.groups["default"]
    fail(group, "b")
    made.apply(WorkerDown("a", "gone"))
    assert capacities(group, 1) == [8]
    assert group.askable == {"b"}


def test_an_engine_that_was_gone_starts_slowly() -> None:
    made = cluster("ab")
    group = made.groups["default"]
    group.watched("b").rose(0)
    made.apply(WorkerDown("b", "gone"))
    made.apply(EngineFailed("b"))
    made.apply(WorkerUp("b"))
    group.watched("b").rose(100)
    assert [capacities(group, at)[1] for at in (100, 104, 108)] == [1, 4, 8]


def test_who_asks_for_a_rest_is_left_alone_and_can_be_waited_for() -> None:
    group = cluster("ab").groups["default"]
    group.watched("a").rest(0, 2)
    assert capacities(group, 1) == [0, 8]
    assert group.askable == {"a", "b"}
    assert capacities(group, 2) == [8, 8]


@pytest.mark.parametrize(("failures", "capacity"), [(0, 1), (SETTINGS.breaker_failures, 0)])
def test_prefill_workers_are_ejected_alike(failures: int, capacity: int) -> None:
    made = Cluster(
        [
            WorkerSpec("d", "http://d"),
            *(WorkerSpec(i, f"http://{i}", role="prefill") for i in "pq"),
        ],
        breakers=SETTINGS,
    )
    for worker in "dpq":
        made.apply(WorkerUp(worker))
    group = made.groups["default/prefill"]
    fail(group, "p", times=failures)
    assert capacities(group, 1) == [capacity, 1]


def test_slots_of_an_ejected_worker_do_not_stand_open_for_those_who_wait() -> None:
    """Else they would be taken for a slot bubble, and healthy workers be overcommitted."""
    made = cluster("ab")
    group = made.groups["default"]
    worker = group.workers["b"]
    assert worker.open_slots(3) == 5
    fail(group, "b")
    assert worker.open_slots(3) == 0
    made.apply(SnapshotReceived("b", snapshot("full", 1), 1.0))
    assert worker.feed is not None


def test_a_worker_that_leaves_is_forgotten() -> None:
    made = cluster("ab")
    group = made.groups["default"]
    fail(group, "b")
    made.leave("b")
    assert not group.review(1)
    assert group.ejections == 1
