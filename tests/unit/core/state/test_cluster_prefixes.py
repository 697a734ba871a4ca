"""A live group answers what its workers have cached of a prompt."""

import dataclasses
from collections.abc import Sequence

import pytest
from msgspec import structs

from router.core.events import (
    Arrived,
    Began,
    CacheTold,
    Carried,
    Dispatched,
    Ended,
    FeedStale,
    GaugesReceived,
    Progressed,
    PromptCounted,
    Refused,
    SnapshotReceived,
    WorkerDown,
    WorkerUp,
)
from router.core.prefix.hit_totals import HitTotals
from router.core.prefix.ids import chain, seed
from router.core.prefix.sessions import session_content
from router.core.prefix.text_chunks import seed as text_seed
from router.core.prefix.text_chunks import text_content
from router.core.state.cluster import Cluster
from router.core.state.foreign_load import Gauges
from router.core.types import (
    Content,
    Dispatch,
    Outcome,
    Request,
    RunningRequest,
    Snapshot,
    WorkerSpec,
)
from tests.support.clusters import begin, cluster_of, send, show
from tests.support.core import part, snapshot, token

PIECES = chain(range(160), seed())


def wants_content(cluster: Cluster) -> bool:
    """Whether its group asks for the content of requests."""
    return cluster.groups["default"].asks_for_content


def asks(number: int, slots: int = 1) -> Request:
    return Request(token(number), "default", 160, slots, content=Content(pieces=PIECES))


def told(message: Snapshot, pieces: int = 0, removed: int = 0) -> Snapshot:
    """It stores the first pieces, and removes the last ones."""
    gone = PIECES[len(PIECES) - 8 * removed :]
    return structs.replace(
        message, cache_block=16, blocks_stored=PIECES[: 8 * pieces], blocks_removed=gone
    )


def shown(number: int, cached: int, index: int = 0) -> RunningRequest:
    return RunningRequest(part(number, index), 160, 1, cached)


def hits(cluster: Cluster, request: Request | None = None) -> Sequence[int] | None:
    known = cluster.groups["default"].hits
    return None if known is None else list(known(request or asks(1)))


def test_hits_are_those_of_the_snapshots() -> None:
    cluster = cluster_of()
    show(cluster, snapshot("full", 1))
    assert hits(cluster) is None, "it tells nothing of its cache"
    show(cluster, told(snapshot("full", 2), 4))
    assert hits(cluster) == [64, 0]
    show(cluster, told(snapshot("full", 1), 10), worker_id="b")
    show(cluster, told(snapshot("delta", 2), removed=4), worker_id="b")
    show(cluster, told(snapshot("delta", 1), 10), worker_id="b")
    assert hits(cluster) == [64, 96], "a late message counts no more"


def test_deltas_alone_say_nothing() -> None:
    cluster = cluster_of()
    show(cluster, told(snapshot("delta", 1), 4))
    assert hits(cluster) is None


def test_after_a_gap_blocks_count_as_they_are_known_until_a_full_snapshot() -> None:
    cluster = cluster_of()
    show(cluster, told(snapshot("full", 1), 4), told(snapshot("delta", 3), 6))
    assert cluster.worker("a").full_wanted
    assert hits(cluster) == [96, 0], "what later messages tell still counts"
    show(cluster, told(snapshot("full", 3), 2))
    assert hits(cluster) == [32, 0]


def test_a_new_run_of_the_engine_has_an_empty_cache() -> None:
    cluster = cluster_of()
    show(cluster, told(snapshot("full", 1), 4), snapshot("delta", 1, epoch="e2"))
    assert hits(cluster) is None
    show(cluster, told(snapshot("full", 2, epoch="e2"), 1))
    assert hits(cluster) == [16, 0]


def test_nothing_is_known_of_a_worker_that_is_down() -> None:
    cluster = cluster_of()
    show(cluster, told(snapshot("full", 1), 4))
    show(cluster, told(snapshot("full", 1), 2), worker_id="b")
    cluster.apply(WorkerDown("a", "gone"))
    assert hits(cluster) == [32]
    cluster.apply(WorkerUp("a"))
    assert hits(cluster) == [0, 32]


def test_a_silent_worker_keeps_what_it_has_told() -> None:
    cluster = cluster_of()
    show(cluster, told(snapshot("full", 1), 4))
    cluster.apply(FeedStale("a"))
    assert hits(cluster) == [64, 0]
    show(cluster, told(snapshot("delta", 5), 6))
    assert hits(cluster) == [96, 0], "and goes on"
    cluster.apply(FeedStale("a"))
    show(cluster, told(snapshot("full", 6), 2))
    assert hits(cluster) == [32, 0]
    cluster.apply(FeedStale("a"))
    show(cluster, told(snapshot("delta", 1, epoch="e2"), 4))
    assert hits(cluster) is None, "its engine has started anew"


def test_what_a_worker_tells_before_it_is_up_counts_once_it_is() -> None:
    cluster = Cluster([WorkerSpec("a", "")])
    show(cluster, told(snapshot("full", 1), 4))
    cluster.apply(WorkerUp("a"))
    assert hits(cluster) == [64]
    cluster.leave("a")
    assert hits(cluster) is None


def test_hits_follow_workers_that_come_and_go() -> None:
    cluster = cluster_of()
    show(cluster, told(snapshot("full", 1), 4), worker_id="b")
    assert hits(cluster) == [0, 64]
    cluster.join(WorkerSpec("c", ""))
    cluster.apply(WorkerUp("c"))
    assert hits(cluster) == [0, 64, 0]
    cluster.leave("a")
    assert hits(cluster) == [64, 0]


def test_given_hits_go_before_those_of_snapshots() -> None:
    cluster = cluster_of()
    show(cluster, told(snapshot("full", 1), 4))
    cluster.groups["default"].prefix_hits = lambda _: [1, 2]
    assert hits(cluster) == [1, 2]


def test_predictions_stand_beside_what_engines_found() -> None:
    cluster = cluster_of()
    group = cluster.groups["default"]
    show(cluster, told(snapshot("full", 1), 4))
    sent = [asks(1), asks(2, slots=2), asks(3)]
    for request in sent:
        send(cluster, request)
    send(cluster, asks(4), "b")  # a guess: it has sent nothing yet
    assert [view.pending_prompt_tokens for view in group.views(Dispatch.POOL)] == [
        4 * (160 - 64),
        160,
    ]
    show(cluster, told(snapshot("delta", 2, shown(1, 64), shown(2, 16), shown(2, 144, 1))))
    show(cluster, snapshot("full", 1, shown(4, 144)), worker_id="b")
    assert group.hit_totals == HitTotals(3, 1, 480, 128, 224, 192)
    show(cluster, told(snapshot("delta", 3, preempted=(part(1),))))
    show(cluster, told(snapshot("delta", 4, shown(1, 144))))
    assert group.hit_totals == HitTotals(3, 1, 480, 128, 224, 192), "each request once"


def test_answers_are_forgotten_when_a_request_is_sent_or_leaves() -> None:
    cluster = cluster_of()
    prefixes = cluster.groups["default"].prefixes
    show(cluster, told(snapshot("full", 1), 4))
    for number in (1, 2):
        cluster.apply(Arrived(asks(number)))
        hits(cluster, asks(number))
    assert len(prefixes._answers) == 2
    cluster.apply(Dispatched(token(1), "a"))
    assert len(prefixes._answers) == 1
    cluster.apply(Ended(token(2), Outcome.ABORTED))
    assert len(prefixes._answers) == 0


def test_prefill_workers_tell_their_own_group() -> None:
    cluster = cluster_of(WorkerSpec("d", "", role="decode"), WorkerSpec("p", "", role="prefill"))
    cluster.apply(
        SnapshotReceived("p", told(snapshot("full", 1), 4), 1.0),
    )
    stage = cluster.groups["default/prefill"].hits
    assert stage is not None
    assert list(stage(asks(1))) == [64]
    assert hits(cluster) == [0]
    assert hits(cluster, dataclasses.replace(asks(1), computed=True)) == [160]


def test_content_is_asked_for_where_caches_are_told_or_guessed() -> None:
    cluster = cluster_of()
    assert wants_content(cluster), "what nobody tells is guessed"
    for worker in "ab":
        show(cluster, snapshot("full", 1), worker_id=worker)
    assert not wants_content(cluster), "engines with the plug-in would tell"
    show(cluster, told(snapshot("full", 2), 3))
    assert wants_content(cluster)
    cluster.apply(WorkerDown("b", "gone"))
    cluster.apply(WorkerUp("b"))
    show(cluster, told(snapshot("delta", 3)), snapshot("delta", 4))
    assert wants_content(cluster), "nothing is known of a new engine"
    show(cluster, snapshot("full", 1), worker_id="b")
    assert not wants_content(cluster), "one that can tell no more is not guessed either"


def test_content_is_asked_for_by_prefill_workers_too() -> None:
    cluster = Cluster([WorkerSpec("d", "d", role="decode"), WorkerSpec("p", "p", role="prefill")])
    cluster.apply(WorkerUp("d"))
    assert not wants_content(cluster), "a decode worker computes no prompt"
    cluster.apply(WorkerUp("p"))
    assert wants_content(cluster)


def test_a_guess_counts_until_the_worker_tells() -> None:
    cluster = cluster_of()
    group = cluster.groups["default"]
    assert hits(cluster) is None
    send(cluster, asks(1), "a")
    assert hits(cluster) is None, "it is still to be computed"
    cluster.apply(Began(token(1), "a", 0.0))
    assert hits(cluster) == [128, 0]
    assert group.shown.prompts
    send(cluster, asks(2), "a")
    assert group.prefixes.guessed_tokens == 128
    assert group.views(Dispatch.POOL)[0].pending_prompt_tokens == 32
    assert (group.prefixes.guessed, group.prefixes.told) == (1, False)
    show(cluster, told(snapshot("full", 1), 4), worker_id="b")
    assert hits(cluster) == [128, 64], "of each what is known of it"
    show(cluster, told(snapshot("full", 1), 2))
    assert hits(cluster) == [32, 64]
    send(cluster, asks(3), "a")
    assert hits(cluster) == [32, 64]
    assert (group.prefixes.guessed, group.prefixes.guessed_tokens) == (0, 128)


def test_an_engine_with_the_plug_in_that_tells_no_blocks_caches_none() -> None:
    cluster = cluster_of()
    send(cluster, asks(1))
    show(cluster, snapshot("full", 1))
    assert hits(cluster) is None
    send(cluster, asks(2))
    assert hits(cluster) is None
    cluster.apply(FeedStale("a"))
    send(cluster, asks(3))
    assert hits(cluster) is None


def test_what_a_gateway_takes_to_a_worker_counts_at_once() -> None:
    cluster = cluster_of()
    cluster.apply(Carried(token(1), 0.0))
    send(cluster, asks(1), "a")
    cluster.apply(Carried(token(1), 0.0))
    assert hits(cluster) == [128, 0]


def test_a_refused_prompt_is_not_cached() -> None:
    cluster = cluster_of()
    send(cluster, asks(1), "a")
    cluster.apply(Began(token(1), "a", 0.0, good=False))
    cluster.apply(Ended(token(1), Outcome.COMPLETED))
    assert hits(cluster) is None


def test_a_session_has_no_refused_turn() -> None:
    cluster = cluster_of()
    hidden = session_content("alice", b"chat")
    turns = [Request(token(i), "default", 160, content=hidden) for i in range(2)]
    send(cluster, turns[0], "a")
    cluster.apply(Refused(token(0), "a"))
    cluster.apply(Began(token(0), "a", 0.0, good=False))
    cluster.apply(Ended(token(0), Outcome.COMPLETED))
    assert hits(cluster, turns[1]) is None


def test_a_worker_that_is_down_is_guessed_anew() -> None:
    cluster = cluster_of()
    begin(cluster, asks(1))
    begin(cluster, asks(2), "b")
    cluster.apply(WorkerDown("a", "gone"))
    cluster.apply(WorkerUp("a"))
    assert hits(cluster) == [0, 128]


def test_a_session_has_its_answer_too() -> None:
    cluster = cluster_of()
    hidden = session_content("alice", b"chat")
    turns = [Request(token(i), "default", 160, content=hidden) for i in range(3)]
    later = Request(token(9), "default", 5000, content=hidden)
    begin(cluster, turns[0])
    assert hits(cluster, later) == [160, 0]
    cluster.apply(Progressed(token(0), 40))
    cluster.apply(Ended(token(0), Outcome.COMPLETED))
    assert hits(cluster, later) == [200, 0]
    begin(cluster, turns[1])
    cluster.apply(Progressed(token(1), 90))
    cluster.apply(Ended(token(1), Outcome.ABORTED))
    assert hits(cluster, later) == [160, 0], "how much of the answer it has kept is not known"


def test_a_session_goes_on_with_one_of_several_answers() -> None:
    cluster = cluster_of()
    hidden = session_content("alice", b"chat")
    later = Request(token(9), "default", 5000, content=hidden)
    send(cluster, Request(token(0), "default", 160, slots=4, content=hidden))
    cluster.apply(Progressed(token(0), 160))
    cluster.apply(Ended(token(0), Outcome.COMPLETED))
    assert hits(cluster, later) == [200, 0]


def test_an_answer_that_ends_on_a_worker_that_is_down_tells_nothing_of_its_next_engine() -> None:
    cluster = cluster_of()
    hidden = session_content("alice", b"chat")
    send(cluster, Request(token(0), "default", 160, content=hidden))
    cluster.apply(WorkerDown("a", "gone"))
    cluster.apply(Ended(token(0), Outcome.COMPLETED))
    cluster.apply(WorkerUp("a"))
    assert hits(cluster, Request(token(9), "default", 5000, content=hidden)) in (None, [0, 0])


def test_a_worker_whose_stream_is_another_has_told_nothing() -> None:
    cluster = cluster_of()
    group = cluster.groups["default"]
    show(cluster, told(snapshot("full", 1), 4))
    spec = group.workers["a"].spec
    cluster.amend(dataclasses.replace(spec, slots=9))
    assert group.prefixes.tells("a")
    cluster.amend(dataclasses.replace(spec, kv_events="tcp://a:5557"))
    assert not group.prefixes.tells("a")


def test_the_engines_own_metrics_bound_a_guess() -> None:
    cluster = cluster_of()
    cluster.apply(GaugesReceived("a", Gauges(1, kv_tokens=100), 1.0))
    begin(cluster, asks(1), "a")
    assert hits(cluster) == [0, 0]
    begin(cluster, asks(2), "b")
    assert hits(cluster) == [0, 128]
    cluster.apply(GaugesReceived("b", Gauges(1, caches_prefixes=False), 1.0))
    cluster.apply(GaugesReceived("a", None, 1.0))
    assert hits(cluster) == [0, 0]
    begin(cluster, asks(3), "b")
    assert hits(cluster) == [0, 0], "it caches no prefix"
    cluster.apply(GaugesReceived("a", Gauges(1, caches_prefixes=False), 1.0))
    assert hits(cluster) is None
    assert not wants_content(cluster)


@pytest.mark.parametrize(("computed", "caches"), [(0, False), (160, True)])
def test_who_begins_a_request_without_a_prompt_token_computes_none(
    computed: int, caches: bool
) -> None:
    """Its prompts come from elsewhere, whatever it caches of them: they cost it nothing."""
    cluster = cluster_of()
    group = cluster.groups["default"]
    show(cluster, told(snapshot("full", 1), 4))
    show(cluster, snapshot("full", 1), worker_id="b")
    assert group.shown.prompts
    begun = structs.replace(
        told(snapshot("full", 2, shown(1, 0)), 4), scheduled_prefill_tokens=computed
    )
    for step, here in ((2, begun), (3, told(snapshot("full", 3, shown(1, 0)), 4))):
        show(cluster, here)
        show(cluster, snapshot("full", step), worker_id="b")
    assert group.every_step.entered == 1
    assert group.shown.prompts == caches


def test_kv_events_tell_the_cache_alone() -> None:
    cluster = cluster_of()
    cluster.apply(CacheTold("a", told(snapshot("full", 1), 4), 1.0))
    assert hits(cluster) == [64, 0]
    assert cluster.worker("a").feed is None


def test_texts_are_guessed_of_engines_that_publish_kv_events() -> None:
    """The events do not say of which text a block is."""
    cluster = cluster_of()
    group = cluster.groups["default"]
    text = text_content(text_seed({}), [b"x" * 512, b"y" * 512])
    texts = [Request(token(i), "default", 160, content=text) for i in range(1, 5)]
    begin(cluster, texts[0])
    cluster.apply(CacheTold("a", told(snapshot("full", 1), 4), 1.0))
    assert hits(cluster, texts[3]) == [159, 0], "its first blocks came of this very text"
    assert hits(cluster) == [64, 0], "token ids are told"
    begin(cluster, asks(9))
    assert group.prefixes.guessed_tokens == 0
    begin(cluster, texts[1])
    assert group.prefixes.guessed_tokens == 159
    show(cluster, told(snapshot("full", 1), 2), worker_id="b")
    begin(cluster, texts[2], "b")
    assert hits(cluster, texts[3]) == [159, 0], "the plug-in tells of texts as well"
    cleared = structs.replace(told(snapshot("delta", 2)), blocks_cleared=True)
    cluster.apply(CacheTold("a", cleared, 2.0))
    assert hits(cluster, texts[3]) == [0, 0]
    begin(cluster, Request(token(5), "default", 160, content=text))
    assert hits(cluster, texts[3]) == [159, 0]
    cluster.apply(CacheTold("a", told(snapshot("full", 1, epoch="events 2")), 3.0))
    assert hits(cluster, texts[3]) == [0, 0], "its engine has started anew"


def test_a_first_byte_is_that_of_a_computed_prompt() -> None:
    cluster = cluster_of()
    group = cluster.groups["default"]
    send(cluster, asks(1))
    assert group.views(Dispatch.POOL)[0].pending_prompt_tokens == 160
    cluster.apply(Began(token(1), "a", 1.0, good=False))
    assert group.views(Dispatch.POOL)[0].pending_prompt_tokens == 160
    cluster.apply(Began(token(1), "a", 1.0))
    assert group.views(Dispatch.POOL)[0].pending_prompt_tokens == 0
    cluster.apply(PromptCounted(token(1), 160, 30))
    assert cluster.worker("a").served(token(1), complete=True) == (160, 30)
