"""The cluster's figures, from snapshots and without them."""

from dataclasses import replace
from typing import Literal

import pytest
from msgspec import structs

from router.core.events import Arrived, Ended, Event, FeedStale, Progressed, WorkerDown
from router.core.prefix.hit_totals import HitTotals
from router.core.state.cluster import Cluster
from router.core.types import Dispatch, Outcome, PoolState, WorkerSpec
from tests.support.clusters import cluster_of, figures, send, show
from tests.support.core import part, request, running, snapshot, token


def test_without_a_feed_the_routers_own_counts_hold() -> None:
    cluster = cluster_of()
    worker = send(cluster, request(1, 100))
    cluster.apply(Progressed(token(1), 7))
    assert figures(worker) == (107, 1, 1)
    cluster.apply(Progressed(token(1), 9))
    assert figures(worker) == (109, 1, 1)


def test_a_worker_of_which_nothing_has_come_wants_a_full_snapshot() -> None:
    cluster = cluster_of()
    assert cluster.worker("a").full_wanted
    show(cluster, snapshot("full", 1))
    assert not cluster.worker("a").full_wanted
    show(cluster, snapshot("delta", 3))
    assert cluster.worker("a").full_wanted


def test_only_a_live_worker_without_snapshots_wants_its_gauges_read() -> None:
    cluster = cluster_of()
    assert cluster.worker("a").gauges_wanted
    show(cluster, snapshot("full", 1))
    assert not cluster.worker("a").gauges_wanted
    cluster.apply(FeedStale("a"))
    assert cluster.worker("a").gauges_wanted
    cluster.apply(WorkerDown("a", "gone"))
    assert not cluster.worker("a").gauges_wanted


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


def pending(cluster: Cluster) -> list[int]:
    views = cluster.groups["default"].views(Dispatch.POOL)
    return [view.pending_prompt_tokens for view in views]


def test_prompt_tokens_are_pending_until_they_are_computed() -> None:
    cluster = cluster_of()
    show(cluster, snapshot("full", 1, running("theirs", 50, 0, prefill_left=20)))
    send(cluster, request(1, 100, slots=2))
    assert pending(cluster) == [20 + 200, 0]
    show(cluster, snapshot("delta", 2, running("theirs", 50, 1), running(part(1), 98, 0, 90)))
    assert pending(cluster) == [90 + 100, 0]
    show(cluster, snapshot("delta", 3, running(part(1), 98, 1), running(part(1, 1), 98, 1)))
    assert pending(cluster) == [0, 0]


def test_of_an_engines_queue_the_prompts_of_others_are_pending_beside_the_own() -> None:
    cluster = cluster_of()
    send(cluster, request(1, 100))
    queue = structs.replace(snapshot("full", 1, waiting=3), waiting_tokens=330, waiting_routed=1)
    show(cluster, queue)
    assert pending(cluster) == [100 + 220, 0]


def test_without_a_feed_a_prompt_is_pending_until_its_first_token() -> None:
    cluster = cluster_of()
    send(cluster, request(1, 100))
    send(cluster, request(2, 30))
    assert pending(cluster) == [130, 0]
    cluster.apply(Progressed(token(1), 1))
    assert pending(cluster) == [30, 0]


@pytest.mark.parametrize("role", ["both", "decode"])
def test_nobody_computes_a_prompt_that_he_fetches(role: Literal["both", "decode"]) -> None:
    cluster = cluster_of(
        WorkerSpec("a", "", role=role), WorkerSpec("b", ""), WorkerSpec("p", "", role="prefill")
    )
    group = cluster.groups["default"]
    assert group.hits is not None
    assert list(group.hits(request(2, 70))) == [0, 0]
    assert list(group.hits(replace(request(2, 70), computed=True))) == [70, 70]
    send(cluster, replace(request(1, 100), computed=True))
    assert pending(cluster) == [0, 0]
    send(cluster, request(3, 10))
    assert pending(cluster) == [10, 0], "it goes whole"
    theirs = structs.replace(snapshot("full", 1, waiting=2), waiting_tokens=220, waiting_routed=0)
    show(cluster, theirs)
    fetched = 220 if role == "both" else 0
    assert pending(cluster) == [10 + fetched, 0], "others' requests at a decode worker are fetched"
    assert cluster_of().groups["default"].hits is None


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


def test_an_engine_that_has_no_state_to_tell_is_known_by_own_counts() -> None:
    cluster = cluster_of()
    show(cluster, snapshot("full", 1, running("theirs", 50, 5)))
    blind = structs.replace(snapshot("full", 2), kind="stateless", unreported=("state", "power"))
    show(cluster, blind)
    worker = send(cluster, request(1, 100))
    assert figures(worker) == (100, 1, 1)
    assert (worker.feed, worker.unreported, worker.full_wanted) == (None, ("state", "power"), True)
    show(cluster, structs.replace(snapshot("full", 1, running("theirs", 50, 5)), epoch="next"))
    assert (figures(worker), worker.unreported) == ((155, 2, 1), ())


@pytest.mark.parametrize("lacking", [(), ("cached_tokens",)])
def test_only_engines_that_tell_prefixes_found_prove_predictions(lacking: tuple[str, ...]) -> None:
    cluster = cluster_of()
    show(cluster, structs.replace(snapshot("full", 1), unreported=lacking))
    worker = send(cluster, request(1, 100))
    (flight,) = worker._in_flight.values()
    flight.compared = False
    seen = snapshot("delta", 2, running(part(1), 100, 1))
    show(cluster, structs.replace(seen, unreported=lacking))
    assert (worker.hit_totals == HitTotals()) is bool(lacking)
