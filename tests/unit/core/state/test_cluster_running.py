"""Who runs, who left and how far they came, as the look-ahead and the learning see it."""

from dataclasses import replace

import pytest

from router.core.events import Ended, FeedStale, Progressed, Returned, WorkerDown
from router.core.forecast.forecast import NO_CAP
from router.core.state.cluster import Cluster
from router.core.types import Outcome, WorkerSpec
from tests.support.clusters import cluster_of, send, show
from tests.support.core import part, request, running, snapshot, token


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


def test_the_look_ahead_may_ask_for_some_workers_alone() -> None:
    cluster = cluster_of()
    send(cluster, request(1, 100))
    send(cluster, request(2, 30), "b")
    group = cluster.groups["default"]
    show(cluster, snapshot("full", 1, running(part(2), 30, 1, 5)), worker_id="b")
    some = group.running([1])
    assert (some.worker.tolist(), some.prompt_tokens.tolist()) == ([0], [30])
    turned = group.running([1, 0])
    assert dict(zip(turned.worker.tolist(), turned.prompt_tokens.tolist(), strict=True)) == {
        0: 30,
        1: 100,
    }


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


def test_who_leaves_of_another_routers_requests_is_believed() -> None:
    cluster = cluster_of()
    show(cluster, snapshot("full", 1, running(part(1), 100, 5)))
    show(cluster, snapshot("delta", 2, finished=(part(1),)))
    assert left(cluster) == [(6, True)]


def test_of_many_aborted_requests_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.core.state.worker._MOST_ABORTED", 1)
    cluster = cluster_of()
    for number in (1, 2):
        send(cluster, request(number))
    show(cluster, snapshot("full", 1, *(running(part(i), 100, 5) for i in (1, 2))))
    for number in (1, 2):
        cluster.apply(Ended(token(number), Outcome.ABORTED))
    show(cluster, snapshot("delta", 2, finished=(part(1), part(2))))
    assert left(cluster) == [(6, True), (6, False)]


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


def test_a_full_snapshot_counts_those_that_ended_in_its_step() -> None:
    cluster = cluster_of(WorkerSpec("a", "", slots=4))
    send(cluster, request(2))
    show(cluster, snapshot("full", 1, running(part(1)), running(part(2), 100, 9)))
    show(cluster, snapshot("full", 2, running(part(1), 100, 1), finished=(part(2),)))
    feed = cluster.worker("a").feed
    assert feed is not None
    assert (feed.step_running, feed.step_load_tokens, feed.load_tokens) == (2, 211, 101)
    assert left(cluster) == [(10, True)]
