from __future__ import annotations

from collections import Counter, deque

import msgspec
from hypothesis import event, example, given
from hypothesis import strategies as st

from engine_patches.plugin.compat import admissions, gained
from engine_patches.plugin.state import Changes, EngineState, Step
from engine_patches.stream.rows import PlacedRow
from router.core.state.feed import Feed
from router.core.types import FREE_PLACE, RunningRequest, Snapshot
from tests.support.core import part, snapshot
from tests.support.plugin_engine import FakeScheduler, Request, SchedulerOutput

ALL = False, False


class Engine:
    """A scheduler, the plug-in's state beside it, and two who read what that says.

    ``unread``: whether it cannot be read which requests enter, and what each gains.
    """

    def __init__(
        self,
        ahead: int,
        drafts: int = 0,
        slots: int = 4,
        unread: tuple[bool, bool] = ALL,
    ) -> None:
        self.scheduler = FakeScheduler(drafts=drafts, slots=slots)
        self.unread_entries, self.unread_tokens = unread
        self.state = EngineState(lists_all=any(unread))
        self.reader: dict[str, PlacedRow] = {}
        self.feed = Feed()
        self.finished: Counter[str] = Counter()
        self.submitted: set[str] = set()
        self.deltas = 0
        self._ahead = ahead
        self._queue: deque[SchedulerOutput] = deque()
        self.feed.apply(snapshot("full", 0), 0.0)

    def submit(self, id_: str, prompt: int, cached: int) -> None:
        if id_ not in self.submitted:
            self.submitted.add(id_)
            request = Request(id_, prompt, cached)
            self.scheduler.add_request(request)
            self.state.arrived(request)

    def abort(self, id_: str) -> None:
        if id_ in self.scheduler.requests:
            self.scheduler.finish_requests([id_])

    def step(self, finish: set[str], preempt: set[str], accepted: int = 0) -> None:
        """In decode the first request keeps so many drafts, the others one more each, in turns."""
        output = self.scheduler.schedule(preempt=preempt)
        self.state.flushed(output.finished_req_ids)
        for id_, cached in () if self.unread_entries else admissions(output):
            self.state.admitted(id_, cached)
        self._queue.append(output)
        if len(self._queue) > self._ahead:
            self._update(self._queue.popleft(), finish, accepted)

    def drain(self) -> None:
        while self._queue:
            self._update(self._queue.popleft(), set())

    def _update(self, output: SchedulerOutput, finish: set[str], accepted: int = 0) -> None:
        most = self.scheduler.drafts + 1
        ids = enumerate(output.num_scheduled_tokens)
        kept = {id_: (80 * accepted + number) % most for number, id_ in ids}
        results = self.scheduler.update_from_output(output, finish, kept)
        scheduler = self.scheduler
        got = gained(results, output.num_scheduled_tokens, drafts=scheduler.drafts > 0)
        step = Step(
            scheduler.running,
            None if self.unread_tokens else got,
            scheduler.requests,
            scheduler.finished_req_ids,
            output.num_scheduled_tokens,
            [later.num_scheduled_tokens for later in self._queue],
        )
        if output.total_num_scheduled_tokens or self.state.changed(step):
            changes = self.state.advance(step)
            assert 0 <= changes.prefill_tokens <= output.total_num_scheduled_tokens
            most = output.total_num_scheduled_tokens - changes.prefill_tokens
            assert self.unread_tokens or 0 <= changes.decode_tokens <= most
            self._read(changes)
        self._compare()

    def _read(self, changes: Changes) -> None:
        self.deltas += 1
        told = {row[0]: row for row in changes.rows}
        gains = dict(enumerate(changes.growths)) if changes.growths else dict.fromkeys(range(99), 1)
        assert FREE_PLACE not in {gains[row[-1]] for row in self.reader.values()}
        grown = {i: (i, r[1], r[2] + gains[r[-1]], *r[3:]) for i, r in self.reader.items()}
        gone = (*changes.finished, *changes.preempted)
        after = {**grown, **told}
        self.reader = {id_: row for id_, row in after.items() if id_ not in gone}
        self.finished.update(changes.finished)
        self.feed.apply(self._delta(changes), 0.0)

    def _delta(self, changes: Changes) -> Snapshot:
        rows = [RunningRequest(*row) for row in changes.rows]
        finished, preempted = changes.finished, changes.preempted
        delta = snapshot("delta", self.deltas, *rows, finished=finished, preempted=preempted)
        if not changes.growths:
            return delta
        return msgspec.structs.replace(delta, kind="growth", growths=changes.growths)

    def _compare(self) -> None:
        truth = {
            one.request_id: (
                one.request_id,
                one.num_prompt_tokens,
                one.num_output_tokens,
                0 if self.unread_entries else one.cached_tokens,
                one.prefill_left,
                None,
            )
            for one in self.scheduler.running
        }
        assert {id_: row[:-1] for id_, row in self.reader.items()} == truth
        assert {row[0]: row for row in self.state.rows()} == self.reader
        places = {row[-1] for row in self.reader.values()}
        assert len(places) == len(truth)
        assert not self.feed.full_wanted
        assert self.state.running == self.feed.running == len(truth)
        assert self.feed.load_tokens == sum(one.num_tokens for one in self.scheduler.running)
        assert self.feed.resident_tokens == self.feed.load_tokens - sum(
            one.prefill_left for one in self.scheduler.running
        )


ids = st.sampled_from("abcdefgh")
some = st.sets(ids, max_size=3)
actions: st.SearchStrategy[tuple[object, ...]] = st.one_of(
    st.tuples(st.just("submit"), ids, st.integers(1, 30), st.integers(0, 12)),
    st.tuples(st.just("abort"), ids),
    st.tuples(st.just("step"), some, some, st.integers(0, 4)),
    st.tuples(st.just("step"), some, st.just(set()), st.integers(0, 4)),
    st.tuples(st.just("step"), st.just(set()), st.just(set())),
)


# One takes the other's slot, in a step that computed nothing.
SWAP = [
    ("step", set(), set()),
    ("step", set(), set()),
    ("submit", "b", 1, 0),
    ("step", set(), set()),
    ("submit", "a", 1, 0),
    ("step", set(), {"b"}),
]


# A token comes for a request that waits again.
LATE = [
    ("submit", "a", 1, 0),
    ("submit", "e", 1, 0),
    ("step", set(), set()),
    ("submit", "b", 1, 0),
    ("submit", "c", 1, 0),
    ("submit", "d", 1, 0),
    ("step", set(), {"a"}),
]


@example(SWAP, 2, 0, ALL)
@example(LATE, 1, 0, ALL)
@example(SWAP, 2, 0, (True, True))
@given(
    st.lists(actions, max_size=60),
    st.integers(0, 2),
    st.sampled_from([0, 0, 1, 4, 300]),
    st.sampled_from([ALL, ALL, ALL, (True, False), (False, True), (True, True)]),
)
def test_what_the_deltas_say_is_what_the_engine_has(
    history: list[tuple[object, ...]], ahead: int, drafts: int, unread: tuple[bool, bool]
) -> None:
    engine = Engine(ahead, drafts, unread=unread)
    for name, *arguments in history:
        getattr(engine, str(name))(*arguments)
    engine.drain()
    for _ in range(2):  # an end before a step is told by the step after it
        engine.step(set(), set())
        engine.drain()
    ended = engine.submitted - engine.scheduler.requests.keys()
    assert engine.finished == Counter(ended)
    assert engine.state._ended <= engine.scheduler.finished_req_ids
    waiting = engine.scheduler.waiting
    assert engine.state.waiting == len(waiting)
    uncounted = sum(one.num_tokens for one in waiting) - engine.state.waiting_tokens
    begun = sum(one.num_output_tokens > 0 for one in waiting)
    assert 0 <= uncounted <= begun * ahead * (drafts + 1), "of steps under way at the preemption"
    event(f"deltas: {min(engine.deltas, 20) // 5 * 5}+")


def test_beside_64_running_requests_one_may_enter_and_end_in_a_step() -> None:
    engine = Engine(0, drafts=2, slots=65)
    for number in range(64):
        engine.submit(f"r{number}", 4, 0)
    engine.step(set(), set())
    engine.submit("short", 4, 0)
    engine.step({"short"}, set())
    engine.step(set(), set(), accepted=1)
    assert engine.finished == Counter(["short"])


@given(st.integers(1, 40), st.integers(0, 30))
def test_a_step_of_requests_that_just_grow_says_nothing(prompt: int, steps: int) -> None:
    scheduler, state = FakeScheduler(chunk=100), EngineState()
    scheduler.add_request(Request("a", prompt))
    for number in range(steps):
        output = scheduler.schedule()
        tokens = output.num_scheduled_tokens
        got = gained(scheduler.update_from_output(output), tokens, drafts=False)
        if number == 0:
            for id_, cached in admissions(output):
                state.admitted(id_, cached)
        step = Step(scheduler.running, got, scheduler.requests, (), tokens)
        changes = state.advance(step)
        assert len(changes.rows) == (number == 0)
        assert changes.prefill_tokens == (prompt if number == 0 else 0)


def test_of_what_waits_those_that_routers_have_sent_are_told_apart() -> None:
    engine = Engine(0)
    for id_ in (part(1), part(2), "theirs"):
        engine.submit(id_, 10, 0)
    assert (engine.state.waiting_routed, engine.state.waiting_tokens) == (2, 30)
    engine.state.arrived(Request(part(1), 10))
    assert engine.state.waiting_routed == 2, "an id that comes again is still one request"
    engine.abort(part(1))
    engine.abort("theirs")
    engine.step(set(), set())
    assert engine.state.waiting_routed == 0
