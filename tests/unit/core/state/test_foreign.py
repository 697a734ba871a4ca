"""Late gauges: what they show beyond this router's own counts."""

from msgspec.structs import replace

from router.core.events import (
    Arrived,
    Dispatched,
    Ended,
    Event,
    FeedStale,
    GaugesReceived,
    SnapshotReceived,
    WorkerDown,
    WorkerUp,
)
from router.core.state.cluster import Cluster
from router.core.state.foreign_load import LATE_S, ForeignLoad, Gauges
from router.core.state.worker import Worker
from router.core.types import Dispatch, Outcome, StateSource, WorkerSpec
from tests.support.core import part, request, running, snapshot, token

BUSY = Gauges(running=3, waiting=2, kv_usage=0.5, kv_tokens=1000)


def figures(load: ForeignLoad) -> tuple[int, int]:
    return load.requests, load.load_tokens


def test_all_that_is_not_ones_own_is_somebody_elses() -> None:
    load = ForeignLoad()
    load.own_requests, load.own_tokens = 2, 120
    load.receive(BUSY, 0.0)
    assert figures(load) == (3, 380)
    load.clear()
    assert (figures(load), load.gauges) == ((0, 0), None)


def test_what_was_ones_own_a_moment_ago_is_not_taken_for_somebody_elses() -> None:
    load = ForeignLoad()
    load.own_requests, load.own_tokens = 5, 400
    load.receive(BUSY, 0.0)
    load.receive(BUSY, LATE_S)
    assert figures(load) == (0, 0)
    load.receive(BUSY, LATE_S + 1)
    assert figures(load) == (5, 500)


def test_kv_memory_that_nobody_uses_now_is_nobodys() -> None:
    load = ForeignLoad()
    load.receive(Gauges(running=0, kv_usage=0.2, kv_tokens=1000), 0.0)
    assert figures(load) == (0, 0)


def worker_of(*events: Event) -> Worker:
    cluster = Cluster([WorkerSpec("a", "", slots=8)])
    for event in (WorkerUp("a"), *events):
        cluster.apply(event)
    return cluster.worker("a")


SENT = (Arrived(request(1)), Dispatched(token(1), "a"))
READ = GaugesReceived("a", BUSY, 0.0)
SHOWN = SnapshotReceived("a", snapshot("full", 1, running(part(1), 100, 7)), 0.0)


def test_a_worker_counts_what_is_on_its_way_and_what_others_have_there() -> None:
    worker = worker_of(*SENT, READ)
    assert (worker.requests, worker.load_tokens, worker.free_slots) == (5, 500, 3)
    assert worker.source is StateSource.METRICS
    view = worker.view(Dispatch.POOL)
    assert (view.waiting, view.kv_usage, view.capacity) == (2, 0.5, 3)


def test_an_own_request_that_has_ended_is_not_somebody_elses() -> None:
    worker = worker_of(*SENT, Ended(token(1), Outcome.COMPLETED), READ)
    assert (worker.requests, worker.load_tokens) == (4, 400)


def test_gauges_that_cannot_be_read_and_workers_that_are_down() -> None:
    assert worker_of(*SENT).source is StateSource.OWN
    for end in (GaugesReceived("a", None, 1.0), WorkerDown("a", "gone")):
        worker = worker_of(*SENT, READ, end)
        assert (worker.source, worker.requests) == (StateSource.OWN, 1)


def test_snapshots_know_better_and_what_they_showed_is_not_somebody_elses() -> None:
    worker = worker_of(*SENT, READ, SHOWN)
    assert (worker.source, worker.requests, worker.load_tokens) == (StateSource.SNAPSHOTS, 1, 107)
    worker = worker_of(*SENT, SHOWN, READ)
    assert (worker.source, worker.requests) == (StateSource.SNAPSHOTS, 1)
    worker = worker_of(*SENT, SHOWN, FeedStale("a"), GaugesReceived("a", Gauges(3), 1.0))
    assert (worker.source, worker.requests) == (StateSource.METRICS, 3)


def test_what_snapshots_showed_of_others_hides_nothing_when_they_stop() -> None:
    others = [running(f"cmpl-other-{number}") for number in range(6)]
    crowded = SnapshotReceived("a", snapshot("full", 1, *others), 0.0)
    own = (*SENT, Ended(token(1), Outcome.COMPLETED))
    worker = worker_of(crowded, *own, FeedStale("a"), GaugesReceived("a", BUSY, 1.0))
    assert (worker.foreign.requests, worker.foreign.load_tokens) == (5, 500)


def test_late_gauges_may_show_what_was_ones_own_before_a_spell_of_snapshots() -> None:
    spell = (SnapshotReceived("a", snapshot("full", 1), 1.0), FeedStale("a"))
    for read_s, others in ((2.0, 4), (LATE_S + 2, 5)):
        own = (*SENT, Ended(token(1), Outcome.COMPLETED))
        worker = worker_of(*own, *spell, GaugesReceived("a", BUSY, read_s))
        assert worker.foreign.requests == others


def queued(waiting: int, routed: int | None, *running_ids: str) -> SnapshotReceived:
    rows = (running(each) for each in running_ids)
    told = replace(snapshot("full", 1, *rows, waiting=waiting), waiting_routed=routed)
    return SnapshotReceived("a", told, 0.0)


def test_what_others_have_queued_and_what_is_on_its_way_add_up() -> None:
    sent = [
        event
        for number in (1, 2, 3)
        for event in (Arrived(request(number)), Dispatched(token(number), "a"))
    ]
    assert worker_of(queued(3, 0), *sent).requests == 6
    assert worker_of(*sent, queued(3, 0)).requests == 6, "the snapshot is older than they"
    assert worker_of(*sent, queued(6, 3)).requests == 6, "they queue there too"
    assert worker_of(*sent, queued(3, 2, part(1))).requests == 1 + 2 + 1
    assert worker_of(*sent, queued(2, 9)).requests == 3, "it has been let in since"
    assert worker_of(*sent, queued(3, None)).requests == 3, "an older plug-in does not tell"
