"""The cluster moved by events, one at a time."""

from dataclasses import replace

import pytest
from msgspec import structs

from router.cluster import Cluster
from router.errors import ConfigError
from router.forecast import NO_CAP
from router.types import (
    DEFAULT_SLOTS,
    Arrived,
    Dispatch,
    Dispatched,
    Ended,
    Event,
    FeedStale,
    KvGroup,
    Outcome,
    Phase,
    PoolState,
    Progressed,
    PromptCounted,
    Request,
    Returned,
    Snapshot,
    SnapshotReceived,
    WorkerDown,
    WorkerSpec,
    WorkerUp,
    WorkerView,
)
from router.worker import UNBOUNDED, Worker
from tests.support.core import part, request, running, snapshot, token


def cluster_of(*specs: WorkerSpec) -> Cluster:
    cluster = Cluster(specs or (WorkerSpec("a", "http://a"), WorkerSpec("b", "http://b")))
    for spec in specs or (WorkerSpec("a", ""), WorkerSpec("b", "")):
        cluster.apply(WorkerUp(spec.id))
    return cluster


def send(cluster: Cluster, sent: Request, worker_id: str = "a") -> Worker:
    cluster.apply(Arrived(sent))
    cluster.apply(Dispatched(sent.id, worker_id))
    return cluster.worker(worker_id)


def request_of(group: str, number: int) -> Request:
    return replace(request(number), group=group)


def show(cluster: Cluster, *snapshots: Snapshot, worker_id: str = "a") -> list[bool]:
    return [cluster.apply(SnapshotReceived(worker_id, message, 1.0)) for message in snapshots]


def figures(worker: Worker) -> tuple[int, int, int]:
    return worker.load_tokens, worker.requests, worker.in_flight


def test_groups_and_workers_keep_the_order_of_their_configuration() -> None:
    specs = [WorkerSpec("x", "", "two"), WorkerSpec("b", "", "one"), WorkerSpec("a", "", "two")]
    cluster = Cluster(specs)
    assert list(cluster.groups) == ["two", "one"]
    assert list(cluster.groups["two"].workers) == ["x", "a"]
    assert cluster.group_of("b") is cluster.groups["one"]
    assert cluster.worker("a") is cluster.groups["two"].workers["a"]
    assert cluster.worker("a").spec is specs[2]


def test_two_workers_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two workers are called 'a'"):
        Cluster([WorkerSpec("a", "http://one"), WorkerSpec("a", "http://two")])


def test_only_live_workers_are_offered() -> None:
    cluster = Cluster([WorkerSpec("a", ""), WorkerSpec("b", "")])
    group = cluster.groups["default"]
    assert group.views(Dispatch.POOL) == []
    assert cluster.worker("a").down_reason == "not checked yet"
    cluster.apply(WorkerUp("b"))
    assert [view.id for view in group.views(Dispatch.POOL)] == ["b"]
    assert cluster.worker("b").down_reason is None
    cluster.apply(WorkerDown("b", "refused the connection"))
    assert group.live_workers() == []
    assert cluster.worker("b").down_reason == "refused the connection"


@pytest.mark.parametrize(
    ("configured", "reported", "slots"), [(4, 8, 4), (None, 8, 8), (None, None, DEFAULT_SLOTS)]
)
def test_slots_as_configured_else_as_reported(
    configured: int | None, reported: int | None, slots: int
) -> None:
    cluster = cluster_of(WorkerSpec("a", "", slots=configured))
    if reported is not None:
        show(cluster, snapshot("full", 1, slots=reported))
    worker = cluster.worker("a")
    assert (worker.slots, worker.free_slots) == (slots, slots)


def test_what_a_policy_sees() -> None:
    cluster = cluster_of(WorkerSpec("a", "", slots=4))
    send(cluster, request(1, 100, slots=3))
    group = cluster.groups["default"]
    assert group.views(Dispatch.POOL) == [WorkerView("a", 300, 3, 1)]
    assert group.views(Dispatch.INSTANT) == [WorkerView("a", 300, 3, UNBOUNDED)]
    send(cluster, request(2, 100, slots=3))
    assert group.views(Dispatch.POOL) == [WorkerView("a", 600, 6, 0)]
    assert cluster.worker("a").free_slots == 0


def test_a_lockstep_group_is_up_when_all_its_workers_are() -> None:
    specs = [WorkerSpec("a", "", "g"), WorkerSpec("b", "", "g"), WorkerSpec("c", "", "free")]
    cluster = Cluster(specs, lockstep={"g"})
    cluster.apply(WorkerUp("a"))
    assert cluster.worker("a").down_reason == "in lockstep with b: not checked yet"
    cluster.apply(WorkerUp("b"))
    cluster.apply(WorkerUp("c"))
    group = cluster.groups["g"]
    assert [worker.spec.id for worker in group.live_workers()] == ["a", "b"]
    sent = send(cluster, request_of("g", 1))
    show(cluster, snapshot("full", 1, running(part(1), 100, 7)))

    cluster.apply(WorkerDown("b", "gone"))
    assert group.live_workers() == []
    assert [cluster.worker(i).down_reason for i in "abc"] == [
        "in lockstep with b: gone",
        "gone",
        None,
    ]
    assert (sent.feed, sent.load_tokens) == (None, 107)
    cluster.apply(WorkerDown("a", "gone too"))
    cluster.apply(WorkerUp("b"))
    assert cluster.worker("b").down_reason == "in lockstep with a: gone too"
    cluster.apply(WorkerUp("a"))
    assert [worker.spec.id for worker in group.live_workers()] == ["a", "b"]


def test_a_request_from_arrival_to_end() -> None:
    cluster, sent = cluster_of(), request(1)
    group = cluster.groups["default"]
    assert cluster.phase(sent.id) is Phase.ENDED
    cluster.apply(Arrived(sent))
    assert (cluster.phase(sent.id), group.waiting) == (Phase.READY, 1)
    cluster.apply(Dispatched(sent.id, "a"))
    assert (cluster.phase(sent.id), group.waiting) == (Phase.DECODING, 0)
    cluster.apply(Returned(sent.id, sent := sent.again()))
    assert (cluster.phase(sent.id), group.waiting) == (Phase.READY, 1)
    cluster.apply(Dispatched(sent.id, "b"))
    assert [figures(cluster.worker(i)) for i in "ab"] == [(0, 0, 0), (100, 1, 1)]
    cluster.apply(Ended(sent.id, Outcome.COMPLETED))
    assert (cluster.phase(sent.id), group.waiting) == (Phase.ENDED, 0)
    assert figures(cluster.worker("b")) == (0, 0, 0)


def test_a_request_that_comes_back_to_its_worker_is_counted_anew() -> None:
    cluster = cluster_of()
    worker = send(cluster, first := request(1, 100))
    show(cluster, snapshot("full", 1, running(part(1), 100, 7)))
    cluster.apply(Returned(first.id, second := first.again()))
    cluster.apply(Dispatched(second.id, "a"))
    assert figures(worker) == (207, 2, 1), "the engine has not dropped the first attempt yet"
    show(cluster, snapshot("delta", 2, finished=(part(1),)))
    assert figures(worker) == (100, 1, 1)
    assert [second.id, second.again().id] == [f"{token(1)}r1", f"{token(1)}r2"]


def test_a_request_may_end_while_it_waits() -> None:
    cluster, sent = cluster_of(), request(1)
    cluster.apply(Arrived(sent))
    cluster.apply(Ended(sent.id, Outcome.EXPIRED))
    assert cluster.groups["default"].waiting == 0
    assert cluster.phase(sent.id) is Phase.ENDED


def test_without_a_feed_the_routers_own_counts_hold() -> None:
    cluster = cluster_of()
    worker = send(cluster, request(1, 100))
    cluster.apply(Progressed(token(1), 7))
    assert figures(worker) == (107, 1, 1)
    cluster.apply(Progressed(token(1), 9))
    assert figures(worker) == (109, 1, 1)


def test_a_dispatch_counts_until_a_snapshot_shows_it_and_then_once() -> None:
    cluster = cluster_of()
    show(cluster, snapshot("full", 1, running("theirs", 50, 5)))
    worker = send(cluster, request(1, 100))
    assert figures(worker) == (155, 2, 1)
    show(cluster, snapshot("delta", 2))
    assert figures(worker) == (156, 2, 1), "a snapshot older than the dispatch"
    show(cluster, snapshot("delta", 3, running(part(1), 98, 1)))
    assert figures(worker) == (57 + 99, 2, 1), "the engine counts its own tokens"
    cluster.apply(Progressed(token(1), 40))
    assert figures(worker) == (57 + 99, 2, 1)


def test_a_request_that_the_engine_has_finished_counts_no_more() -> None:
    cluster = cluster_of()
    worker = send(cluster, request(1, 100))
    show(cluster, snapshot("full", 1, running(part(1))), snapshot("delta", 2, finished=(part(1),)))
    assert figures(worker) == (0, 0, 1)
    cluster.apply(Ended(token(1), Outcome.COMPLETED))
    assert figures(worker) == (0, 0, 0)


def test_parts_of_a_wide_request_come_and_go_one_by_one() -> None:
    cluster = cluster_of()
    worker = send(cluster, request(1, 100, slots=3))
    assert figures(worker) == (300, 3, 1)
    show(cluster, snapshot("full", 1, running(part(1, 0), 100, 1)))
    assert figures(worker) == (301, 3, 1)
    show(cluster, snapshot("delta", 2, running(part(1, 1), 100, 1), finished=(part(1, 0),)))
    assert figures(worker) == (201, 2, 1)
    show(cluster, snapshot("delta", 3, preempted=(part(1, 1),)))
    assert figures(worker) == (200, 2, 1), "a preempted part waits in the engine again"


def test_a_queue_in_the_engine_counts_as_requests() -> None:
    cluster = cluster_of(WorkerSpec("a", "", slots=8))
    show(cluster, snapshot("full", 1, running("theirs"), waiting=3))
    worker = send(cluster, request(1, 100))
    assert (worker.requests, worker.free_slots) == (4, 4), "it may be one of those that wait"
    for number in range(2, 6):
        send(cluster, request(number, 100))
    assert (worker.requests, worker.free_slots) == (6, 2)


@pytest.mark.parametrize("outcome", Outcome)
def test_a_late_snapshot_cannot_revive_a_complete_request(outcome: Outcome) -> None:
    cluster = cluster_of()
    worker = send(cluster, request(1, 100))
    show(cluster, snapshot("full", 1, running(part(1), 100, 4)))
    cluster.apply(Ended(token(1), outcome))
    gone = outcome is Outcome.COMPLETED
    assert worker.load_tokens == (0 if gone else 104), "aborted, it runs until the engine knows"
    show(cluster, snapshot("delta", 2, running(part(1), 100, 6)))
    assert worker.load_tokens == (0 if gone else 106)
    show(cluster, snapshot("delta", 3, finished=(part(1),)))
    assert figures(worker) == (0, 0, 0)


@pytest.mark.parametrize(
    "late",
    [
        Progressed(token(1), 5),
        Returned(token(1), request(1).again()),
        Ended(token(1), Outcome.FAILED),
        Dispatched(token(1), "a"),
    ],
)
def test_events_after_the_end_are_ignored(late: Event) -> None:
    cluster = cluster_of()
    send(cluster, request(1))
    cluster.apply(Ended(token(1), Outcome.COMPLETED))
    assert cluster.apply(late) is False
    assert figures(cluster.worker("a")) == (0, 0, 0)
    assert cluster.groups["default"].waiting == 0


def test_progress_of_a_request_that_was_returned_is_ignored() -> None:
    cluster = cluster_of()
    send(cluster, request(1, 100))
    cluster.apply(Returned(token(1), again := request(1, 100).again()))
    for attempt in (token(1), again.id):
        cluster.apply(Progressed(attempt, 5))
        cluster.apply(PromptCounted(attempt, 5))
    cluster.apply(Dispatched(again.id, "b"))
    assert cluster.worker("b").load_tokens == 100


@pytest.mark.parametrize("lost", [FeedStale("a"), WorkerDown("a", "no answer")])
def test_when_the_feed_is_lost_the_routers_own_counts_go_on(lost: Event) -> None:
    cluster = cluster_of()
    worker = send(cluster, request(1, 100))
    show(cluster, snapshot("full", 1, running(part(1), 98, 20), running("theirs", 500)))
    show(cluster, snapshot("delta", 4))
    cluster.apply(lost)
    assert (worker.feed, worker.gaps) == (None, 2)
    assert figures(worker) == (100 + 21, 1, 1)
    assert worker.live is isinstance(lost, FeedStale)
    cluster.apply(Progressed(token(1), 30))
    assert figures(worker) == (130, 1, 1)
    cluster.apply(Ended(token(1), Outcome.COMPLETED))
    assert figures(worker) == (0, 0, 0)


def test_losing_no_feed_changes_nothing() -> None:
    cluster = cluster_of()
    worker = send(cluster, request(1, 100))
    cluster.apply(FeedStale("a"))
    assert (figures(worker), worker.gaps) == ((100, 1, 1), 0)


def test_a_feed_that_comes_back_counts_again() -> None:
    cluster = cluster_of()
    worker = send(cluster, request(1, 100))
    show(cluster, snapshot("full", 1, running(part(1), 98, 20)))
    cluster.apply(FeedStale("a"))
    show(cluster, snapshot("delta", 9))
    assert figures(worker) == (120, 1, 1), "a delta does not show it: own count"
    show(cluster, snapshot("full", 9, running(part(1), 98, 28)))
    assert figures(worker) == (126, 1, 1)


def test_steps_of_live_workers_are_summed_by_the_state_of_the_pool() -> None:
    cluster = cluster_of()
    group = cluster.groups["default"]
    assert show(cluster, snapshot("full", 1, running("x", 90))) == [True], "b has no feed"
    assert show(cluster, snapshot("full", 1, running("y", 50)), worker_id="b") == [False]
    cluster.apply(Arrived(request(1)))
    assert show(cluster, snapshot("delta", 2), snapshot("delta", 2)) == [False, False]
    assert show(cluster, snapshot("delta", 2), worker_id="b") == [True]
    empty, waiting = group.totals[PoolState.EMPTY], group.totals[PoolState.WAITING]
    assert (empty.steps, empty.load_tokens, empty.worker_steps) == (1, 90, 1)
    assert (waiting.steps, waiting.imbalance_tokens, waiting.load_tokens) == (1, 40, 142)


def test_a_worker_that_is_down_does_not_count_in_steps() -> None:
    cluster = cluster_of()
    cluster.apply(WorkerDown("b", "drained"))
    assert show(cluster, snapshot("full", 1, running("y", 50)), worker_id="b") == [False]
    assert show(cluster, snapshot("full", 1, running("x", 90))) == [True]
    assert cluster.groups["default"].totals[PoolState.EMPTY].imbalance_tokens == 0


def test_a_restarted_engine_leaves_its_steps_behind() -> None:
    cluster = cluster_of(WorkerSpec("a", ""))
    show(cluster, snapshot("full", 900, running("x", 90)))
    assert show(cluster, snapshot("full", 1, running("y", 5), epoch="e2")) == [True]
    assert cluster.groups["default"].totals[PoolState.EMPTY].steps == 2
    assert cluster.worker("a").load_tokens == 5


def foreseen(cluster: Cluster) -> set[tuple[int, ...]]:
    """Worker, prompt, generated tokens, cap and prompt tokens not computed, of all that run."""
    seen = cluster.groups["default"].running()
    columns = (
        seen.worker,
        seen.prompt_tokens,
        seen.generated_tokens,
        seen.max_tokens,
        seen.prefill_left,
    )
    return set(zip(*(column.tolist() for column in columns), strict=True))


def left(cluster: Cluster) -> list[tuple[int, bool]]:
    """Generated tokens of those that left, and whether they completed."""
    departures = cluster.groups["default"].departures
    found = [(each.generated_tokens, each.completed) for each in departures]
    departures.clear()
    return found


def test_the_look_ahead_finds_who_runs_and_who_is_on_the_way() -> None:
    cluster = cluster_of()
    send(cluster, request(1, 100, slots=2))
    send(cluster, replace(request(2, 30), max_tokens=8), "b")
    assert foreseen(cluster) == {(0, 100, 0, NO_CAP, 100), (1, 30, 0, 8, 30)}
    assert len(cluster.groups["default"].running()) == 3
    show(cluster, snapshot("full", 1, running(part(1), 100, 3)))
    assert foreseen(cluster) == {
        (0, 100, 3, NO_CAP, 0),
        (0, 100, 0, NO_CAP, 100),
        (1, 30, 0, 8, 30),
    }
    show(cluster, snapshot("full", 1, running(part(2), 30, 1, 5)), worker_id="b")
    assert (1, 30, 1, 8, 5) in foreseen(cluster)
    cluster.apply(WorkerDown("a", "gone"))
    assert foreseen(cluster) == {(0, 30, 1, 8, 5)}


def test_an_id_stays_with_its_request() -> None:
    cluster = cluster_of()
    send(cluster, request(1))
    (number,) = cluster.groups["default"].running().id.tolist()
    show(cluster, snapshot("delta", 1, running(part(1))), snapshot("full", 2, running(part(1))))
    assert cluster.groups["default"].running().id.tolist() == [number]
    show(cluster, snapshot("delta", 3, finished=(part(1),)))
    assert [each.id for each in cluster.groups["default"].departures] == [number]


def test_who_leaves_by_itself_completed_and_who_was_aborted_did_not() -> None:
    cluster = cluster_of()
    for number in (1, 2, 3):
        send(cluster, request(number))
    show(cluster, snapshot("full", 1, *(running(part(i), 100, 5) for i in (1, 2, 3, 9))))
    cluster.apply(Ended(token(2), Outcome.ABORTED))
    cluster.apply(Ended(token(3), Outcome.COMPLETED))
    assert left(cluster) == [(5, True)]
    show(cluster, snapshot("delta", 2, finished=(part(1), part(2), "somebody-else")))
    assert left(cluster) == [(6, True), (6, False)]
    show(cluster, snapshot("full", 5))
    assert left(cluster) == [(7, False)]  # the foreign one, which went unseen


def test_own_counts_know_who_leaves_too() -> None:
    cluster = cluster_of()
    send(cluster, request(1))
    cluster.apply(Progressed(token(1), 7))
    cluster.apply(Ended(token(1), Outcome.COMPLETED))
    assert left(cluster) == [(7, True)]


def test_the_tokens_of_a_wide_request_are_divided_among_its_parts() -> None:
    cluster = cluster_of()
    worker = send(cluster, request(1, 100, slots=4))
    cluster.apply(Progressed(token(1), 81))
    seen = cluster.groups["default"].running()
    assert seen.generated_tokens.tolist() == [20, 20, 20, 21]
    assert seen.tokens.sum() == worker.load_tokens
    assert len(set(seen.id.tolist())) == 4
    assert cluster.groups["default"].running().id.tolist() == seen.id.tolist()
    cluster.apply(Ended(token(1), Outcome.COMPLETED))
    departures = cluster.groups["default"].departures
    assert [each.id for each in departures] == seen.id.tolist()
    assert left(cluster) == [(20, True), (20, True), (20, True), (21, True)]


def test_each_part_that_is_shown_takes_over_an_id() -> None:
    cluster = cluster_of()
    send(cluster, request(1, 100, slots=3))
    numbers = cluster.groups["default"].running().id.tolist()
    show(cluster, snapshot("full", 1, running(part(1, 0)), running(part(1, 1))))
    assert sorted(cluster.groups["default"].running().id.tolist()) == numbers
    show(cluster, snapshot("delta", 2, finished=(part(1, 0),)))
    cluster.apply(FeedStale("a"))
    cluster.groups["default"].departures.clear()
    cluster.apply(Ended(token(1), Outcome.ABORTED))
    assert left(cluster) == [(0, False), (1, False)], "one of the three had ended before"


def own_steps(cluster: Cluster, step_tokens: float = 1.0) -> int:
    return cluster.groups["default"].own_steps(step_tokens)


def test_own_steps_are_tokens_by_those_that_decode() -> None:
    cluster = cluster_of()
    send(cluster, request(1))
    send(cluster, request(2, slots=3), "b")
    send(cluster, request(3))
    assert own_steps(cluster) == 0
    cluster.apply(Progressed(token(1), 4))
    assert own_steps(cluster) == 4, "the others have not begun"
    cluster.apply(Progressed(token(2), 3))
    cluster.apply(Progressed(token(2), 3))
    assert own_steps(cluster) == 0
    cluster.apply(Progressed(token(1), 5))
    assert own_steps(cluster) == 1, "a token for each of four"
    cluster.apply(Returned(token(2), request(2, slots=3).again()))
    cluster.apply(Ended(token(3), Outcome.ABORTED))
    cluster.apply(Progressed(token(1), 8))
    assert own_steps(cluster, 2.0) == 1
    cluster.apply(Progressed(token(1), 9))
    assert own_steps(cluster, 2.0) == 1, "what was left over counts"


def test_a_feed_s_steps_are_its_own() -> None:
    cluster = cluster_of()
    send(cluster, request(1))
    show(cluster, snapshot("full", 1, running(part(1), 100, 9)))
    cluster.apply(Progressed(token(1), 30))
    send(cluster, request(2), "b")
    cluster.apply(Progressed(token(2), 5))
    assert own_steps(cluster) == 0
    cluster.apply(FeedStale("a"))
    cluster.apply(Progressed(token(1), 8))
    assert own_steps(cluster) == 0, "fewer than the feed has told"
    cluster.apply(Progressed(token(1), 12))
    assert own_steps(cluster) == 2


def test_a_preempted_request_is_on_its_way_again() -> None:
    cluster = cluster_of()
    send(cluster, request(1))
    show(cluster, snapshot("full", 1, running(part(1), 100, 5)))
    show(cluster, snapshot("delta", 2, preempted=(part(1),)))
    first = cluster.groups["default"].running().id.tolist()
    assert foreseen(cluster) == {(0, 100, 0, NO_CAP, 100)}
    assert len(first) == 1


def test_over_commit_lets_requests_queue() -> None:
    cluster = cluster_of(WorkerSpec("a", "", slots=2))
    send(cluster, request(1))
    send(cluster, request(2))
    group = cluster.groups["default"]
    assert [view.capacity for view in group.views(Dispatch.POOL)] == [0]
    assert [view.capacity for view in group.views(Dispatch.POOL, 2)] == [2]


def test_a_view_tells_queue_and_memory() -> None:
    cluster = cluster_of()
    blocks = (KvGroup(16, 10, 40), KvGroup(16, 30, 40))
    show(cluster, structs.replace(snapshot("full", 1, waiting=3), kv_groups=blocks))
    view = cluster.groups["default"].views(Dispatch.POOL)[0]
    assert (view.waiting, view.kv_usage) == (3, 0.75)


def test_a_full_snapshot_counts_those_that_ended_in_its_step() -> None:
    cluster = cluster_of(WorkerSpec("a", "", slots=4))
    send(cluster, request(2))
    show(cluster, snapshot("full", 1, running(part(1)), running(part(2), 100, 9)))
    show(cluster, snapshot("full", 2, running(part(1), 100, 1), finished=(part(2),)))
    feed = cluster.worker("a").feed
    assert feed is not None
    assert (feed.step_running, feed.step_load_tokens, feed.load_tokens) == (2, 211, 101)
    assert left(cluster) == [(10, True)]
