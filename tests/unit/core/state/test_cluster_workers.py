"""Workers that come, are drained and leave while a cluster is used."""

from dataclasses import replace

import pytest

from router.core.errors import ConfigError
from router.core.events import (
    Arrived,
    Dispatched,
    Ended,
    EngineFailed,
    FeedStale,
    Prefilled,
    SnapshotReceived,
    WorkerDown,
    WorkerUp,
)
from router.core.state.cluster import Cluster
from router.core.types import ASLEEP, PAUSED, Dispatch, Outcome, WorkerSpec
from tests.support.core import part, request, running, snapshot, token


def cluster_of(*specs: WorkerSpec, lockstep: tuple[str, ...] = ()) -> Cluster:
    cluster = Cluster(specs, lockstep)
    for spec in specs:
        cluster.apply(WorkerUp(spec.id))
    return cluster


def spec(name: str, **fields: object) -> WorkerSpec:
    return WorkerSpec(name, f"http://{name}", **{"slots": 4, **fields})  # type: ignore[arg-type]


def test_a_newcomer_is_down_until_it_is_said_to_be_up() -> None:
    cluster = cluster_of(spec("a"))
    cluster.join(spec("b"))
    assert [w.spec.id for w in cluster.groups["default"].live_workers()] == ["a"]
    cluster.apply(WorkerUp("b"))
    assert [w.spec.id for w in cluster.groups["default"].live_workers()] == ["a", "b"]


def test_a_worker_is_known_from_its_coming_to_its_going() -> None:
    cluster = cluster_of(WorkerSpec("a", "http://a"), WorkerSpec("b", "http://b"))
    assert cluster.worker("b").spec.id == "b"
    cluster.leave("b")
    assert [*cluster.groups["default"].workers] == ["a"]
    with pytest.raises(KeyError):
        cluster.worker("b")


def test_two_workers_of_one_id_are_refused() -> None:
    with pytest.raises(ConfigError, match="two workers are called 'a'"):
        cluster_of(spec("a")).join(spec("a", group="other"))


def test_who_would_compute_prompts_for_nobody_is_refused_and_who_has_somebody_is_not() -> None:
    cluster = cluster_of(spec("a"))
    with pytest.raises(ConfigError, match="group 'other', which has no worker that decodes"):
        cluster.join(spec("p", group="other", role="prefill"))
    cluster.join(spec("p", role="prefill"))
    assert cluster.prefill_group("default") is cluster.group_of("p")
    assert cluster.group_of("p").serves is cluster.group_of("a")


def test_a_drained_worker_is_shown_with_its_load_and_takes_nothing() -> None:
    cluster = cluster_of(spec("a"), spec("b"))
    cluster.worker("a").drain(draining=True)
    for dispatch in Dispatch:
        views = {view.id: view for view in cluster.groups["default"].views(dispatch)}
        assert views["a"].capacity == 0
        assert views["b"].capacity > 0
    assert cluster.groups["default"].serving
    cluster.apply(WorkerDown("b", "gone"))
    assert not cluster.groups["default"].serving


def test_a_prefill_worker_is_empty_when_its_kv_has_been_fetched() -> None:
    cluster = cluster_of(spec("a"), spec("p", role="prefill"))
    worker = cluster.worker("p")
    prefill = replace(request(1), group="default/prefill")
    cluster.apply(Arrived(prefill))
    cluster.apply(Dispatched(prefill.id, "p"))
    assert not worker.empty
    ready = request(2)
    cluster.apply(Prefilled(prefill.id, ready, 60.0))
    assert (worker.in_flight, worker.empty) == (0, False)
    cluster.apply(EngineFailed("p"))
    assert worker.empty
    cluster.apply(Ended(ready.id, Outcome.ABORTED))


def test_what_a_worker_has_added_to_the_sums_stays_when_it_leaves() -> None:
    cluster = cluster_of(spec("a"), spec("b"))
    group = cluster.groups["default"]
    cluster.apply(SnapshotReceived("a", snapshot("full", 1, running(part(1))), 0.0))
    cluster.apply(SnapshotReceived("a", snapshot("delta", 4, preempted=(part(1),)), 0.0))
    sums = group.gaps, group.preemptions, group.every_step
    assert sums[0] > 0
    cluster.leave("a")
    assert (group.gaps, group.preemptions, group.every_step) == sums
    assert list(group.workers) == ["b"]
    assert not len(group.running().id)


def test_a_place_in_the_table_of_running_requests_is_used_again() -> None:
    cluster = cluster_of(spec("a"))
    group = cluster.groups["default"]
    for number in range(2, 20):
        cluster.join(spec(f"w{number}"))
        cluster.apply(WorkerUp(f"w{number}"))
        shown = snapshot("full", 1, running(part(number), 50, 3))
        cluster.apply(SnapshotReceived(f"w{number}", shown, 0.0))
        assert group.running().prompt_tokens.tolist() == [50]
        assert group.running().generated_tokens.tolist() == [3]
        cluster.leave(f"w{number}")
    assert len(group._table.ticks) == 2


def test_others_of_a_step_do_not_wait_for_one_that_has_left() -> None:
    cluster = cluster_of(spec("a"), spec("b"))
    for worker in "ab":
        shown = snapshot("full", 1, running(part(ord(worker)), 50, 3))
        cluster.apply(SnapshotReceived(worker, shown, 0.0))
    cluster.leave("b")
    assert cluster.apply(SnapshotReceived("a", snapshot("delta", 2, step_s=0.1), 0.0))


def test_a_bad_newcomer_takes_no_lockstep_group_down() -> None:
    cluster = cluster_of(spec("a"), spec("b"), lockstep=("default",))
    cluster.join(spec("c"))
    cluster.apply(WorkerDown("c", "no answer"))
    assert [cluster.worker(i).live for i in "abc"] == [True, True, False]
    cluster.apply(WorkerUp("c"))
    cluster.apply(WorkerDown("c", "no answer"))
    assert [cluster.worker(i).live for i in "abc"] == [False, False, False]
    cluster.leave("c")
    assert [cluster.worker(i).live for i in "ab"] == [True, True]


def test_lockstep_may_be_said_later_and_again() -> None:
    cluster = cluster_of(spec("a"), spec("b"))
    cluster.apply(WorkerDown("b", "no answer"))
    for _ in range(2):
        cluster.set_lockstep(("default",))
        assert cluster.worker("a").down_reason == "in lockstep with b: no answer"
    for _ in range(2):
        cluster.set_lockstep(())
        assert cluster.worker("a").live


def test_a_worker_may_get_other_slots() -> None:
    cluster = cluster_of(spec("a"))
    cluster.amend(spec("a", slots=9))
    assert cluster.worker("a").slots == 9


def test_a_group_is_dissolved_when_nobody_is_left_and_nobody_waits() -> None:
    cluster = cluster_of(spec("a"), spec("p", role="prefill"))
    cluster.apply(Arrived(request(1)))
    cluster.leave("a")
    assert not cluster.dissolve("default")
    cluster.apply(Ended(token(1), Outcome.EXPIRED))
    assert not cluster.dissolve("default")
    cluster.leave("p")
    assert cluster.prefill_group("default") is None
    assert not cluster.dissolve("default/prefill")
    assert cluster.dissolve("default")
    assert not cluster.groups
    cluster.join(spec("a"))
    assert list(cluster.groups) == ["default"]


def test_a_worker_that_leaves_stale_leaves_nothing() -> None:
    cluster = cluster_of(spec("a"), spec("b"))
    cluster.apply(SnapshotReceived("a", snapshot("full", 1, running("theirs")), 0.0))
    cluster.apply(FeedStale("a"))
    cluster.leave("a")
    cluster.join(spec("a"))
    cluster.apply(WorkerUp("a"))
    assert cluster.worker("a").load_tokens == 0


def test_a_group_is_paused_while_one_of_its_engines_is_expected_to_go_on() -> None:
    cluster = cluster_of(spec("a"), spec("b"))
    group = cluster.groups["default"]
    for reason, paused in ((PAUSED, True), (ASLEEP, False), ("gone", False)):
        cluster.apply(WorkerDown("a", reason))
        assert group.paused is paused
    assert group.serving
