"""What a recorder makes of a cluster's events."""

from array import array
from dataclasses import replace

from msgspec import UNSET, structs

from router.core.energy.joules import PowerLevels
from router.core.events import (
    Arrived,
    Began,
    Ended,
    FeedStale,
    Progressed,
    PromptCounted,
    Returned,
    WorkerUp,
)
from router.core.prefix.ids import chain, seed
from router.core.prefix.text_chunks import text_content
from router.core.state.cluster import Cluster
from router.core.types import Content, KvGroup, Outcome, PromptChain, Snapshot, WorkerSpec
from router.recording.lines import (
    PolicyLine,
    RecordedWorker,
    Recording,
    RequestLine,
    StepLine,
    read,
)
from router.recording.recorder import Listener, Recorder, Setting
from tests.support.clusters import cluster_of, send, show
from tests.support.core import part, request, running, snapshot, token

KV = (KvGroup(16, 10, 100),)


class Recorded:
    """A cluster of workers a and b, its recorder and one listener; time is what the test says."""

    def __init__(self, *specs: WorkerSpec) -> None:
        self.now_s = 100.0
        self.cluster: Cluster = cluster_of(*specs)
        setting = Setting("serve", "bfio", "pool", PowerLevels(1.0, 2.0, 3.0))
        self.recorder = Recorder(self.cluster, setting, lambda: self.now_s, 5e8)
        self.listener = self.recorder.listen()
        self.taken = b""

    def end(self, number: int, outcome: Outcome = Outcome.COMPLETED) -> RequestLine:
        self.cluster.apply(Ended(token(number), outcome))
        return self.read().requests[-1]

    def restart(self) -> None:
        self.listener, self.taken = self.recorder.listen(), b""

    def read(self) -> Recording:
        self.taken += self.listener.take()
        return read(self.taken.splitlines(keepends=True), "test")


def caching(message: Snapshot, *chains: PromptChain, size: int = 16) -> Snapshot:
    return structs.replace(told(message), cache_block=size, chains=chains)


def told(message: Snapshot) -> Snapshot:
    return structs.replace(message, kv_groups=KV)


def test_the_header_says_what_is_known_of_the_workers_and_later_lines_the_rest() -> None:
    recorded = Recorded(WorkerSpec("a", "http://a", rank=3), WorkerSpec("b", "http://b", slots=7))
    header = recorded.read().header
    assert (header.source, header.policy, header.dispatch) == ("serve", "bfio", "pool")
    assert (header.started_unix_s, header.power_levels) == (5e8, (1.0, 2.0, 3.0))
    assert header.groups["default"].lockstep is False
    workers = RecordedWorker("a", 3), RecordedWorker("b", None, 7)
    assert header.groups["default"].workers == workers
    for worker in "aba":
        recorded.now_s += 2.0
        show(
            recorded.cluster,
            told(snapshot("full", 1 + int(recorded.now_s), slots=9, step_s=0.5)),
            worker_id=worker,
        )
    workers = RecordedWorker("a", 3, 9, 1600), RecordedWorker("b", None, 7, 1600)
    assert recorded.read().header.groups["default"].workers == workers
    together = structs.replace(told(snapshot("full", 200, slots=9, step_s=0.5)), ranks=2)
    show(recorded.cluster, together, worker_id="a")
    recorded.now_s += 2.0
    show(recorded.cluster, structs.replace(together, sequence=201, step=201), worker_id="b")
    assert recorded.read().header.groups["default"].lockstep is True
    late = read(recorded.recorder.listen().take().splitlines(keepends=True), "late")
    assert late.header.groups["default"].workers == workers


def test_a_request_by_the_counts_of_its_engine() -> None:
    recorded = Recorded()
    send(recorded.cluster, request(1, 100, arrival=100.5))
    recorded.now_s = 101.0
    show(recorded.cluster, snapshot("full", 1, running(part(1), 98, 1)))
    recorded.cluster.apply(Began(token(1), "a", recorded.now_s))
    show(recorded.cluster, snapshot("delta", 2), snapshot("delta", 3, finished=(part(1),)))
    recorded.now_s = 102.0
    assert recorded.end(1) == RequestLine(
        0, "default", 0.5, 0.0, 1.0, 2.0, "a", 98, 3, "completed", 1
    )


def test_an_end_that_comes_before_the_snapshot_of_the_last_step() -> None:
    recorded = Recorded()
    send(recorded.cluster, request(1))
    show(recorded.cluster, snapshot("full", 1, running(part(1), 98, 1)))
    assert recorded.end(1).output_tokens == 2
    send(recorded.cluster, request(2))
    show(recorded.cluster, snapshot("delta", 2, running(part(2), 98, 1)))
    assert recorded.end(2, Outcome.ABORTED).output_tokens == 1


def test_the_parts_of_a_request_are_counted_together_and_preempted_ones_once() -> None:
    recorded = Recorded()
    send(recorded.cluster, request(1, slots=2))
    both = running(part(1, 0), 98, 1), running(part(1, 1), 98, 1)
    show(recorded.cluster, snapshot("full", 1, *both))
    show(recorded.cluster, snapshot("delta", 2, preempted=(part(1, 1),)))
    show(recorded.cluster, snapshot("delta", 3, running(part(1, 1), 98, 2)))
    show(recorded.cluster, snapshot("delta", 4, finished=(part(1, 0), part(1, 1))))
    line = recorded.end(1)
    assert (line.prompt_tokens, line.output_tokens, line.slots) == (98, 4 + 3, 2)


def test_a_request_that_ends_before_any_snapshot_shows_it() -> None:
    recorded = Recorded()
    show(recorded.cluster, snapshot("full", 1))
    send(recorded.cluster, request(1, 100))
    recorded.cluster.apply(Progressed(token(1), 2))
    line = recorded.end(1)
    assert (line.prompt_tokens, line.output_tokens) == (100, 2)


def test_a_request_by_the_routers_own_counts() -> None:
    recorded = Recorded()
    send(recorded.cluster, request(1, 100))
    recorded.cluster.apply(PromptCounted(token(1), 90))
    recorded.cluster.apply(Progressed(token(1), 7))
    line = recorded.end(1)
    assert (line.prompt_tokens, line.output_tokens, line.worker) == (90, 7, "a")


def test_parts_that_a_feed_showed_ended_are_not_counted_once_more_by_the_stream() -> None:
    recorded = Recorded()
    send(recorded.cluster, request(1, slots=2))
    both = running(part(1, 0), 98, 1), running(part(1, 1), 98, 1)
    show(recorded.cluster, snapshot("full", 1, *both))
    show(recorded.cluster, snapshot("delta", 2, finished=(part(1, 0),)))
    recorded.cluster.apply(FeedStale("a"))
    recorded.cluster.apply(Progressed(token(1), 5))
    assert recorded.end(1).output_tokens == 5


def test_a_whole_answer_by_what_it_says_itself() -> None:
    recorded = Recorded()
    send(recorded.cluster, request(1, 100))
    recorded.cluster.apply(PromptCounted(token(1), 90, 12))
    line = recorded.end(1)
    assert (line.prompt_tokens, line.output_tokens) == (90, 12)


def test_a_request_that_never_left_the_pool_and_one_that_came_back_to_it() -> None:
    recorded = Recorded()
    recorded.cluster.apply(Arrived(request(1, 100, arrival=100.0)))
    line = recorded.end(1, Outcome.EXPIRED)
    assert (line.worker, line.dispatched_s, line.prompt_tokens) == (None, None, 100)
    again = request(2).again()
    send(recorded.cluster, request(2))
    recorded.cluster.apply(Returned(token(2), again))
    recorded.now_s = 101.0
    send(recorded.cluster, again, "b")
    recorded.cluster.apply(Ended(again.id, Outcome.COMPLETED))
    line = recorded.read().requests[-1]
    assert (line.request, line.worker, line.dispatched_s) == (1, "b", 1.0)
    send(recorded.cluster, request(3))
    recorded.cluster.apply(Returned(token(3), request(3).again()))
    recorded.cluster.apply(Ended(request(3).again().id, Outcome.EXPIRED))
    line = recorded.read().requests[-1]
    assert (line.worker, line.dispatched_s) == (None, None)


def test_an_observer_does_not_know_of_lockstep() -> None:
    recorder = Recorder(cluster_of(), Setting("observe"), lambda: 0.0, 0.0)
    header = read(recorder.listen().take().splitlines(keepends=True), "test").header
    assert header.groups["default"].lockstep is None


def test_what_was_known_of_requests_is_forgotten_when_nobody_listens() -> None:
    recorded = Recorded()
    send(recorded.cluster, request(1))
    recorded.recorder.leave(recorded.listener)
    recorded.listener = recorded.recorder.listen()
    assert recorded.end(1).dispatched_s is None


def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    recorded = Recorded()
    send(recorded.cluster, request(1))
    recorded.cluster.apply(Returned(token(1), request(1).again()))
    send(recorded.cluster, request(1).again(), "b")
    recorded.cluster.apply(Ended(request(1).again().id, Outcome.COMPLETED))
    send(recorded.cluster, request(2))
    recorded.end(2, Outcome.ABORTED)
    assert not recorded.recorder._times


def test_requests_sent_before_anybody_listened_lack_the_times_of_before() -> None:
    recorded = Recorded()
    recorded.recorder.leave(recorded.listener)
    send(recorded.cluster, request(1, arrival=99.0))
    recorded.listener = recorded.recorder.listen()
    recorded.cluster.apply(Began(token(1), "a", recorded.now_s))
    header = recorded.listener.take()
    recorded.cluster.apply(Ended(token(1), Outcome.COMPLETED))
    recorded.listener.put(b"")
    lines = (header + recorded.listener.take()).splitlines(keepends=True)
    line = read(lines, "test").requests[-1]
    assert (line.arrival_s, line.dispatched_s, line.first_token_s) == (-1.0, None, None)


def test_steps_go_to_all_who_listen_and_to_nobody_else() -> None:
    recorded = Recorded()
    other = recorded.recorder.listen()
    other.take()
    recorded.cluster.apply(Arrived(request(9)))
    for worker, load in (("a", 98), ("b", 40)):
        show(recorded.cluster, snapshot("full", 1, running(part(1), load, 1)), worker_id=worker)
    for worker in "ab":
        message = snapshot("delta", 2, step_s=0.5, waiting=2)
        show(recorded.cluster, message, worker_id=worker)
    step = recorded.read().steps[-1]
    assert step == StepLine(
        2, "default", 0.0, 0.5, [100, 42], [1, 1], pool=1, queued=4, prompts=[0, 0], tokens=2
    )
    assert other.take()
    recorded.recorder.leave(other)
    recorded.recorder.leave(recorded.listener)
    assert not recorded.cluster.watchers
    assert recorded.cluster.groups["default"]._ledger.on_step is None
    for worker in "ab":
        show(recorded.cluster, snapshot("delta", 3, step_s=0.5), worker_id=worker)
    assert not other.take()
    assert recorded.read().steps[-1] == step


def test_the_first_step_of_a_late_listener_has_all_that_was_said_before() -> None:
    recorded = Recorded()
    recorded.recorder.leave(recorded.listener)
    for worker in "ab":
        first = snapshot("full", 1, running("x", 50, 1), waiting=2, power_w=300.0)
        show(recorded.cluster, first, worker_id=worker)
    recorded.listener = recorded.recorder.listen()
    show(recorded.cluster, snapshot("delta", 2), snapshot("delta", 3))
    (step,) = recorded.read().steps
    assert (step.loads, step.running, step.queued) == ([52, 51], [1, 1], 2)
    assert step.power_w == [None, 300.0]


def test_a_listener_that_is_not_read_keeps_no_more_than_its_room() -> None:
    listener = Listener(room_bytes=10)
    for line in (b"12345\n", b"1234567\n", b"12\n"):
        listener.put(line)
    assert listener.take() == b'12345\n12\n{"dropped":1}\n'
    assert listener.take() == b""


def test_workers_and_groups_that_come_and_go_meanwhile() -> None:
    recorded = Recorded()
    cluster = recorded.cluster
    full = Listener(0)
    recorded.recorder._listeners.append(full)

    cluster.leave("b")
    cluster.join(WorkerSpec("c", "http://c", rank=2))
    cluster.join(WorkerSpec("x", "http://x", group="other"))
    for worker in "cx":
        cluster.apply(WorkerUp(worker))
        show(cluster, snapshot("full", 1, running("theirs", 50, 1)), worker_id=worker)
        show(cluster, snapshot("delta", 2, step_s=0.5), worker_id=worker)
    cluster.join(WorkerSpec("b", "http://b"))
    cluster.leave("x")
    assert cluster.dissolve("other")
    late = recorded.recorder.listen()
    cluster.join(WorkerSpec("x", "http://x", group="other"))
    cluster.apply(WorkerUp("x"))
    show(cluster, snapshot("full", 7, running("theirs", 60, 1)), worker_id="x")
    show(cluster, snapshot("delta", 8, step_s=0.5), worker_id="x")

    recording = recorded.read()
    assert [worker.id for worker in recording.header.groups["default"].workers] == ["a", "b", "c"]
    assert [worker.id for worker in recording.header.groups["other"].workers] == ["x"]
    steps = {(step.group, step.step): step.loads for step in recording.steps if step.step_s}
    assert steps == {("default", 2): [None, None, 52], ("other", 2): [52], ("other", 8): [62]}
    later = read(late.take().splitlines(keepends=True), "late")
    assert later.header.groups == recording.header.groups
    assert [step.loads for step in later.steps if step.step_s] == [[62]]
    kept = full.take()
    assert b'{"worker":"c","group":"default",' in kept
    assert b'"dropped":' in kept


def test_another_policy_is_told_to_those_who_listen_and_stands_in_later_headers() -> None:
    recorded = Recorded()
    same = Setting("serve", "bfio", "pool", PowerLevels(2.0, 3.0, 4.0))
    recorded.recorder.change(same)
    recorded.now_s = 102.5
    recorded.recorder.change(Setting("serve", "jsq", "instant"))

    assert recorded.read().changes == (PolicyLine(2.5, "jsq", "instant"),)
    later = read(recorded.recorder.listen().take().splitlines(keepends=True), "later")
    assert (later.header.policy, later.header.dispatch, later.changes) == ("jsq", "instant", ())


def test_another_dispatch_of_the_same_policy_is_told() -> None:
    recorded = Recorded()
    recorded.recorder.change(Setting("serve", "bfio", "instant"))
    assert recorded.read().changes == (PolicyLine(0.0, "bfio", "instant"),)


def test_prompts_of_token_ids_have_numbered_blocks_and_no_ids() -> None:
    recorded = Recorded()
    show(recorded.cluster, caching(snapshot("full", 1)))
    recorded.now_s += 2.0
    show(recorded.cluster, structs.replace(snapshot("delta", 2, step_s=0.5), cache_block=16))
    pieces = chain(range(300), seed())
    for number, tokens in enumerate((range(200), range(300), range(63), range(1, 200))):
        content = Content(pieces=chain(tokens, seed()))
        send(recorded.cluster, replace(request(number, len(tokens)), content=content))
    lines = [recorded.end(number) for number in range(4)]
    assert [line.blocks for line in lines] == [[0, 3], [0, 4], [], [4, 3]]
    assert recorded.read().header.groups["default"].workers[0].block_tokens == 64
    assert not [id_ for id_ in array("Q", pieces) if str(id_).encode() in recorded.taken]


def test_texts_have_the_blocks_that_their_engine_tells() -> None:
    recorded = Recorded()
    show(recorded.cluster, caching(snapshot("full", 1), size=128))
    for number, blocks in enumerate(([9, 8, 7], [9, 8, 5, 4], None)):
        content = text_content(b"12345678", [b"a" * 2000, b"%d" % number * 2000])
        send(recorded.cluster, replace(request(number, 500), content=content))
        if blocks is not None:
            one = PromptChain(part(number), 0, array("Q", blocks).tobytes())
            show(recorded.cluster, caching(snapshot("delta", 2 + number), one, size=128))
    lines = [recorded.end(number) for number in range(3)]
    assert [line.blocks for line in lines] == [[0, 3], [0, 2, 3, 2], [0, 2]]


def test_without_a_cache_or_a_content_there_are_no_blocks() -> None:
    recorded = Recorded()
    content = Content(pieces=chain(range(200), seed()))
    show(recorded.cluster, told(snapshot("full", 1)))
    send(recorded.cluster, replace(request(1, 200), content=content))
    assert recorded.end(1).blocks is UNSET
    show(recorded.cluster, caching(snapshot("full", 2)))
    send(recorded.cluster, request(2, 200))
    assert recorded.end(2).blocks is UNSET
    recorded.cluster.apply(Arrived(replace(request(3, 200), content=content)))
    assert recorded.end(3).blocks is UNSET, "it was at no worker"


def test_numbers_begin_anew_when_nobody_has_listened() -> None:
    recorded = Recorded()
    show(recorded.cluster, caching(snapshot("full", 1)))
    for number, start in enumerate((0, 500)):
        content = Content(pieces=chain(range(start, start + 200), seed()))
        send(recorded.cluster, replace(request(number, 200), content=content))
        assert recorded.end(number).blocks == [0, 3]
        recorded.recorder.leave(recorded.listener)
        recorded.restart()
