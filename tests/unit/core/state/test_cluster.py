"""The cluster moved by events: its workers and groups, and a request's life."""

from dataclasses import replace

import pytest
from msgspec import structs

from router.core.errors import ConfigError
from router.core.events import (
    Arrived,
    Dispatched,
    Ended,
    Event,
    Progressed,
    PromptCounted,
    Returned,
    WorkerDown,
    WorkerUp,
)
from router.core.state.cluster import Cluster
from router.core.state.lockstep import doubt, source
from router.core.state.worker import UNBOUNDED
from router.core.types import (
    DEFAULT_SLOTS,
    Dispatch,
    KvGroup,
    Outcome,
    Request,
    WorkerSpec,
    WorkerView,
)
from tests.support.clusters import Phase, cluster_of, figures, phase, send, show
from tests.support.core import part, request, running, snapshot, token


def request_of(group: str, number: int) -> Request:
    return replace(request(number), group=group)


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
    assert group.views(Dispatch.POOL) == [
        WorkerView("a", 300, 3, 1, slots=4, pending_prompt_tokens=300)
    ]
    assert group.views(Dispatch.INSTANT) == [
        WorkerView("a", 300, 3, UNBOUNDED, slots=4, pending_prompt_tokens=300)
    ]
    send(cluster, request(2, 100, slots=3))
    assert group.views(Dispatch.POOL) == [
        WorkerView("a", 600, 6, 0, slots=4, pending_prompt_tokens=600)
    ]
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


def tell(cluster: Cluster, ranks: int, *workers: str, step: int = 1, epoch: str = "e1") -> None:
    """Reports of engines that stand and fall together."""
    for worker_id in workers:
        told = snapshot("full", step, running(part(ord(worker_id)), 9, 1), epoch=epoch, step_s=0.1)
        show(cluster, structs.replace(told, ranks=ranks), worker_id=worker_id)


def pair(lockstep: tuple[str, ...] = ()) -> Cluster:
    cluster = Cluster([WorkerSpec(i, "", "g") for i in "ab"], lockstep)
    for worker_id in "ab":
        cluster.apply(WorkerUp(worker_id))
    return cluster


def test_a_group_is_in_lockstep_if_its_engines_tell_so() -> None:
    cluster = pair()
    group = cluster.groups["g"]
    assert (group.lockstep, source(group)) == (False, "nobody")
    tell(cluster, 2, "a")
    assert (group.lockstep, source(group)) == (True, "engines")
    cluster.apply(WorkerDown("a", "gone"))
    assert cluster.worker("b").down_reason == "in lockstep with a: gone"
    cluster.apply(WorkerUp("a"))
    assert len(group.live_workers()) == 2
    cluster.apply(WorkerDown("a", "gone"))
    tell(cluster, 1, "b", epoch="e2")
    assert not group.lockstep
    assert [worker.spec.id for worker in group.live_workers()] == ["b"]
    tell(cluster, 0, "b", epoch="e3")
    assert group.lockstep, "an engine that tells nothing denies nothing"
    assert not group.live_workers()


@pytest.mark.parametrize(("word", "lockstep"), [("g", True), ("g=no", False)])
def test_what_is_set_precedes_what_engines_tell(word: str, lockstep: bool) -> None:
    cluster = pair((word,))
    tell(cluster, 1 if lockstep else 2, "a", "b")
    group = cluster.groups["g"]
    assert (group.lockstep, source(group), doubt(group)) == (lockstep, "setting", "")
    cluster.set_lockstep(())
    assert (group.lockstep, source(group)) == (not lockstep, "engines")


def test_two_barriers_in_one_group_are_not_in_lockstep() -> None:
    cluster = Cluster([WorkerSpec(i, "", "g") for i in "abcd"])
    tell(cluster, 2, *"abcd")
    group = cluster.groups["g"]
    assert not group.lockstep
    assert doubt(group) == "2 ranks are in lockstep, and it has 4 workers: one group for each"


@pytest.mark.parametrize(
    ("lockstep", "ranks", "apart", "doubted"),
    [
        ((), 0, 0, "its workers step together; if none can alone, set --lockstep g"),
        ((), 1, 0, ""),
        (("g=no",), 0, 0, ""),
        ((), 0, 70, ""),
        (("g",), 0, 70, "it is in lockstep, but its workers do not step together"),
        ((), 2, 70, "it is in lockstep, but its workers do not step together"),
        ((), 2, 0, ""),
    ],
)
def test_steps_may_speak_against_what_is_known(
    lockstep: tuple[str, ...], ranks: int, apart: int, doubted: str
) -> None:
    cluster = pair(lockstep)
    group = cluster.groups["g"]
    for step in range(1, 600):
        tell(cluster, ranks, "a", step=step)
        tell(cluster, ranks, "b", step=step + apart)
        assert step > 200 or not doubt(group)
    assert doubt(group) == doubted


def test_a_request_is_where_it_was_sent_among_groups_with_one_line() -> None:
    cluster, sent = Cluster([WorkerSpec("a", "", "one"), WorkerSpec("b", "", "two")]), request(1)
    for worker in "ab":
        cluster.apply(WorkerUp(worker))
    one, two = cluster.groups["one"], cluster.groups["two"]
    one.line.merge(two.line)
    assert two.line.groups == [one, two]
    sent = replace(sent, group="one")
    assert cluster.at(sent) is one, "it goes by its route before it comes"
    cluster.apply(Arrived(sent))
    assert (cluster.at(sent), two.line.waiting) == (one, 1)
    cluster.apply(Dispatched(sent.id, "b"))
    assert (cluster.at(sent), one.line.waiting) == (two, 0)
    assert (sum(one.held.values()), sum(two.held.values())) == (0, 1)
    cluster.apply(Returned(sent.id, again := sent.again()))
    assert (cluster.at(again), two.line.waiting) == (one, 1)
    cluster.apply(Dispatched(again.id, "a"))
    cluster.apply(Ended(again.id, Outcome.COMPLETED))
    assert (cluster.at(again), one.line.waiting) == (one, 0)
    assert not one.held + two.held


def test_a_request_from_arrival_to_end() -> None:
    cluster, sent = cluster_of(), request(1)
    group = cluster.groups["default"]
    assert phase(cluster, sent.id) is Phase.ENDED
    cluster.apply(Arrived(sent))
    assert (phase(cluster, sent.id), group.line.waiting) == (Phase.READY, 1)
    cluster.apply(Dispatched(sent.id, "a"))
    assert (phase(cluster, sent.id), group.line.waiting) == (Phase.DECODING, 0)
    cluster.apply(Returned(sent.id, sent := sent.again()))
    assert (phase(cluster, sent.id), group.line.waiting) == (Phase.READY, 1)
    cluster.apply(Dispatched(sent.id, "b"))
    assert [figures(cluster.worker(i)) for i in "ab"] == [(0, 0, 0), (100, 1, 1)]
    cluster.apply(Ended(sent.id, Outcome.COMPLETED))
    assert (phase(cluster, sent.id), group.line.waiting) == (Phase.ENDED, 0)
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
    assert cluster.groups["default"].line.waiting == 0
    assert phase(cluster, sent.id) is Phase.ENDED


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
    assert cluster.groups["default"].line.waiting == 0


def test_progress_of_a_request_that_was_returned_is_ignored() -> None:
    cluster = cluster_of()
    send(cluster, request(1, 100))
    cluster.apply(Returned(token(1), again := request(1, 100).again()))
    for attempt in (token(1), again.id):
        cluster.apply(Progressed(attempt, 5))
        cluster.apply(PromptCounted(attempt, 5))
    cluster.apply(Dispatched(again.id, "b"))
    assert cluster.worker("b").load_tokens == 100


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


def test_a_view_tells_what_memory_still_lets_in() -> None:
    cluster = cluster_of()
    send(cluster, request(1, 30))
    send(cluster, request(2, 20))
    seen = snapshot("full", 1, running(part(1), 30, 5))
    show(cluster, structs.replace(seen, admissible_kv_tokens=100))
    group = cluster.groups["default"]
    assert [view.admissible_tokens for view in group.views(Dispatch.POOL)] == [80, None]
    assert [view.admissible_tokens for view in group.views(Dispatch.INSTANT)] == [None, None]
    send(cluster, request(3, 90))
    assert [view.admissible_tokens for view in group.views(Dispatch.POOL)] == [0, None]


def test_a_view_tells_what_memory_still_lets_in_in_blocks() -> None:
    cluster = cluster_of()
    send(cluster, request(1, 30))
    send(cluster, request(2, 20, slots=2))
    groups = KvGroup(16, 10, 90), KvGroup(16, 10, 90, "sliding", 8, most_entering=2, most_held=2)
    seen = structs.replace(snapshot("full", 1, running(part(1), 30, 5)), kv_groups=groups)
    show(cluster, structs.replace(seen, admissible_kv_tokens=900, admissible_blocks=50))
    view, other = cluster.groups["default"].views(Dispatch.POOL)
    assert (view.room, other.room) == (50 - 2 * (2 + 2), None)
    assert view.need(request(3, 160)) == 10 + 2
    assert view.need(request(3, 160, slots=3)) == 3 * (10 + 2)
    assert other.need(request(3, 160, slots=3)) == 480
    view, _ = cluster.groups["default"].views(Dispatch.INSTANT)
    assert (view.room, view.kv) == (None, None)
