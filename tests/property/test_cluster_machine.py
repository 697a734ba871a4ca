"""The cluster before engines that restart, over a stream that loses, repeats and delays.

Two workers report snapshots, the third does not; each is drained now and then, leaves when nothing
is left on it, and comes back. The model knows the truth; the cluster only hears events. Whatever
happens, a request on its way counts in full; once every message has arrived and each engine has
sent a full snapshot, the cluster's figures are the engines', and no sum ever falls.
"""

from collections.abc import Sequence

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from router.core.events import (
    Arrived,
    Dispatched,
    Ended,
    FeedStale,
    Progressed,
    Returned,
    SnapshotReceived,
    WorkerDown,
    WorkerUp,
)
from router.core.forecast.end_signals import SurvivalSignal
from router.core.forecast.forecast import WorkProfile
from router.core.forecast.look_ahead import LookAhead
from router.core.state.cluster import Cluster
from router.core.state.worker import Worker
from router.core.types import Dispatch, Outcome, Request, Snapshot, WorkerSpec
from tests.support.cluster_model import Sent, Wire
from tests.support.clusters import Phase, phase
from tests.support.core import request
from tests.support.engine_model import EngineModel

SLOTS = 3
HORIZON = 3
PROFILE = WorkProfile(prefill_beta=0.5, prefill_chunk=20)
FED = ("a", "b")
WORKERS = (*FED, "c")
"""c has no snapshots."""


PICK = st.integers(0, 99)
SLOTS_OF = st.sampled_from([1, 1, 3])
GAINS = st.sampled_from([(1,), (1,), (2,), (1, 2, 3), (0,), (3, 1, 0, 5)])
"""Tokens of those in decode: one each, or as drafts are accepted."""
some_wait = precondition(lambda self: self.pool)
some_are_sent = precondition(lambda self: self.alive)
some_have_left = precondition(lambda self: self.left)


class ClusterMachine(RuleBasedStateMachine):
    """See above."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster([WorkerSpec(i, "", slots=SLOTS) for i in WORKERS])
        self.engines = {i: EngineModel(f"{i}-0", SLOTS) for i in WORKERS}
        self.wires = {i: Wire() for i in FED}
        self.pool: list[Request] = []
        self.alive: list[Sent] = []
        self.left: list[Sent] = []
        self.numbers = 0
        self.gone: set[str] = set()
        self.sums = (0, 0, 0, 0)
        self.plain = True
        self.signal = SurvivalSignal(PROFILE)
        self.look_ahead = LookAhead(self.signal, PROFILE, HORIZON)
        for worker in WORKERS:
            self.cluster.apply(WorkerUp(worker))

    @property
    def there(self) -> list[str]:
        return [worker for worker in WORKERS if worker not in self.gone]

    @property
    def taking(self) -> list[str]:
        return [i for i in self.there if not self.cluster.worker(i).draining]

    @initialize(wide=st.sampled_from(WORKERS), prompts=st.lists(st.integers(1, 90), min_size=4))
    def begin_busy(self, wide: str, prompts: list[int]) -> None:
        for worker, prompt in zip(WORKERS * 2, prompts, strict=False):
            self.send(worker, [prompt], 3 if worker == wide else 1)
            self.step(worker, set(), set())

    # requests

    @rule(prompt=st.integers(1, 90), slots=SLOTS_OF)
    def arrive(self, prompt: int, slots: int) -> None:
        self.numbers += 1
        self.pool.append(request(self.numbers, prompt, slots=slots))
        self.cluster.apply(Arrived(self.pool[-1]))

    @some_wait
    @rule(
        pick=PICK,
        worker=st.sampled_from(WORKERS),
        error=st.sampled_from([0, 0, 7]),
        at_once=st.booleans(),
    )
    def dispatch(self, pick: int, worker: str, error: int, at_once: bool) -> None:
        """To that worker, or another one where it takes none."""
        if worker not in self.taking:
            if not self.taking:
                return
            worker = self.taking[pick % len(self.taking)]
        one = self.pool.pop(pick % len(self.pool))
        self.alive.append(Sent(one, worker, one.prompt_tokens + error))
        self.cluster.apply(Dispatched(one.id, worker))
        if at_once:
            self._reach(self.alive[-1])

    @rule(
        worker=st.sampled_from(WORKERS),
        prompts=st.lists(st.integers(1, 90), max_size=3),
        slots=SLOTS_OF,
    )
    def send(self, worker: str, prompts: list[int], slots: int) -> None:
        """Several that reach the engine, as they mostly do."""
        for prompt in prompts:
            self.arrive(prompt, slots)
            self.dispatch(-1, worker, 0, at_once=True)

    @some_wait
    @rule(pick=PICK, outcome=st.sampled_from([Outcome.EXPIRED, Outcome.ABORTED]))
    def give_up_waiting(self, pick: int, outcome: Outcome) -> None:
        self.cluster.apply(Ended(self.pool.pop(pick % len(self.pool)).id, outcome))

    @some_are_sent
    @rule(pick=PICK)
    def reach_the_engine(self, pick: int) -> None:
        self._reach(self._pick(pick))

    @some_are_sent
    @rule(pick=PICK)
    def fail_to_reach_the_engine(self, pick: int) -> None:
        if (sent := self._pick(pick)).on_its_way:
            self.alive.remove(sent)
            self.pool.append(sent.request.again())
            self.cluster.apply(Returned(sent.request.id, self.pool[-1]))

    @some_are_sent
    @rule(pick=PICK)
    def stream_tokens(self, pick: int) -> None:
        sent = self._pick(pick)
        generated = self._generated(sent)
        sent.all_heard &= self.cluster.worker(sent.worker).feed is not None
        self.cluster.apply(Progressed(sent.request.id, generated))

    @some_are_sent
    @rule(pick=PICK)
    def complete(self, pick: int) -> None:
        """The engine has finished it, whether or not a snapshot has said so."""
        sent = self._pick(pick)
        if not sent.on_its_way:
            self._abort_in_engine(sent)
            self._end(sent, Outcome.COMPLETED)
            if self.cluster.worker(sent.worker).feed is not None:
                self.wires[sent.worker].complete.add(sent.request.id)

    @some_are_sent
    @rule(pick=PICK, at_once=st.booleans())
    def leave(self, pick: int, at_once: bool) -> None:
        """The client leaves; the engine hears of it at once, or later."""
        sent = self._pick(pick)
        self._end(sent, Outcome.ABORTED)
        self.left.append(sent)
        if at_once:
            self._abort_in_engine(sent)

    @some_have_left
    @rule(pick=PICK)
    def hear_of_one_that_left(self, pick: int) -> None:
        sent = self.left.pop(pick % len(self.left))
        self._abort_in_engine(sent)
        self.cluster.apply(Progressed(sent.request.id, 3))
        self.cluster.apply(Ended(sent.request.id, Outcome.FAILED))

    # engines

    @rule(
        worker=st.sampled_from(WORKERS),
        finish=st.sets(st.integers(0, 7), max_size=3),
        preempt=st.sets(st.integers(0, 3), max_size=1),
        gains=GAINS,
    )
    def step(
        self, worker: str, finish: set[int], preempt: set[int], gains: Sequence[int] = (1,)
    ) -> None:
        engine = self.engines[worker]
        chosen = dict(enumerate(engine.running))
        self._step(
            worker,
            {chosen[i] for i in finish & chosen.keys()},
            {chosen[i] for i in preempt & chosen.keys()},
            gains,
        )

    @rule(worker=st.sampled_from(WORKERS), number=st.integers(0, 3), prompt=st.integers(1, 90))
    def serve_somebody_else(self, worker: str, number: int, prompt: int) -> None:
        if f"theirs-{number}" not in self.engines[worker].ids:
            self.engines[worker].submit(f"theirs-{number}", prompt)

    @rule(worker=st.sampled_from(WORKERS))
    def restart(self, worker: str) -> None:
        """All that the engine had is lost, with what was under way on its stream."""
        old = self.engines[worker]
        self.engines[worker] = EngineModel(f"{old.epoch}+", SLOTS)
        if worker in FED:
            self.wires[worker] = Wire()
        for sent in [one for one in self.alive if one.worker == worker and not one.on_its_way]:
            self._end(sent, Outcome.FAILED)

    # the stream

    @rule(worker=st.sampled_from(FED), finish=st.lists(st.integers(0, 3), max_size=4), gains=GAINS)
    def step_and_deliver(self, worker: str, finish: list[int], gains: Sequence[int]) -> None:
        """Several steps without trouble, as they mostly are."""
        for index in finish:
            self.step(worker, {index}, set(), gains)
        while self.wires[worker].under_way:
            self.deliver(worker)

    @rule(worker=st.sampled_from(FED))
    def deliver(self, worker: str) -> None:
        if self.wires[worker].under_way:
            self._receive(worker, self.wires[worker].under_way.pop(0))

    @rule(worker=st.sampled_from(FED))
    def lose(self, worker: str) -> None:
        if self.wires[worker].under_way:
            self.wires[worker].under_way.pop(0)
            self._miss(worker)

    @rule(worker=st.sampled_from(FED), pick=PICK)
    def repeat(self, worker: str, pick: int) -> None:
        if sent := self.wires[worker].sent:
            message = sent[pick % len(sent)]
            self._receive(worker, message)
            if message in self.wires[worker].under_way:
                self._miss(worker)

    @rule(worker=st.sampled_from(FED), at_once=st.booleans())
    def ask_for_all(self, worker: str, at_once: bool) -> None:
        full = self.engines[worker].full()
        if at_once:
            self._receive(worker, full)
            self._miss(worker)
        else:
            self.wires[worker].send(full)

    @rule(worker=st.sampled_from(WORKERS), down=st.booleans(), up=st.booleans())
    def lose_the_feed(self, worker: str, down: bool, up: bool) -> None:
        if worker in self.gone:
            return
        self.cluster.apply(WorkerDown(worker, "no answer") if down else FeedStale(worker))
        self._forget(worker)
        if up:
            self.cluster.apply(WorkerUp(worker))

    # workers that come and go

    @rule(worker=st.sampled_from(WORKERS), draining=st.booleans())
    def drain(self, worker: str, draining: bool) -> None:
        if worker in self.there:
            self.cluster.worker(worker).drain(draining=draining)

    @rule(worker=st.sampled_from(WORKERS))
    def go(self, worker: str) -> None:
        """If nothing of the router's is left there; its engine runs on, for others."""
        if worker in self.there and self.cluster.worker(worker).empty:
            self.cluster.leave(worker)
            self.gone.add(worker)
            self._forget(worker)

    @rule(worker=st.sampled_from(WORKERS), up=st.booleans())
    def come(self, worker: str, up: bool) -> None:
        if worker in self.gone:
            self.gone.remove(worker)
            self.cluster.join(WorkerSpec(worker, "", slots=SLOTS))
            if up:
                self.cluster.apply(WorkerUp(worker))

    # what holds

    @rule()
    def settle(self) -> None:
        """Everything arrives, then each engine sends all that it has."""
        for sent in self.alive:
            self._reach(sent)
        for worker in FED:
            if worker in self.there:
                self._settle(worker)

    @invariant()
    def what_is_kept_of_the_outlook_still_holds(self) -> None:
        group = self.cluster.groups["default"]
        workers = len(group.live_workers())
        versions = [worker.rows.version for worker in group.live_workers()]
        kept = self.look_ahead.renewed(versions, group.running, SLOTS)
        anew = LookAhead(self.signal, PROFILE, HORIZON).outlook(group.running(), workers, SLOTS)
        assert np.array_equal(kept.work, anew.work)

    @invariant()
    def no_sum_falls(self) -> None:
        group = self.cluster.groups["default"]
        steps = group.every_step
        before, self.sums = self.sums, (steps.steps, steps.entered, group.gaps, group.preemptions)
        assert all(now >= then for now, then in zip(self.sums, before, strict=True))

    @invariant()
    def growth_is_one_until_a_step_brings_more_or_less(self) -> None:
        growth = self.cluster.groups["default"].growth
        assert growth == 1.0 if self.plain else 0.0 <= growth <= 5.0

    @invariant()
    def those_who_are_there_are_listed_and_who_is_drained_is_given_none(self) -> None:
        group = self.cluster.groups["default"]
        assert sorted(group.workers) == self.there
        assert group.serving == any(group.workers[i].live for i in self.taking)
        shut = {view.id for view in group.views(Dispatch.INSTANT) if not view.capacity}
        assert shut == {i for i in set(self.there) - set(self.taking) if group.workers[i].live}

    @invariant()
    def every_request_is_where_the_model_has_it(self) -> None:
        assert self.cluster.groups["default"].line.waiting == len(self.pool)
        for worker in self.there:
            mine = [sent for sent in self.alive if sent.worker == worker]
            assert self.cluster.worker(worker).in_flight == len(mine)
        for sent in self.alive:
            assert phase(self.cluster, sent.request.id) is Phase.DECODING

    @invariant()
    def what_is_on_its_way_counts_in_full(self) -> None:
        for worker in self.there:
            state = self.cluster.worker(worker)
            under_way = [sent for sent in self.alive if sent.worker == worker and sent.on_its_way]
            shown = state.feed.load_tokens if state.feed else 0
            assert state.load_tokens >= shown + sum(sent.whole_tokens for sent in under_way)
            running = state.feed.running if state.feed else 0
            assert state.requests >= running + sum(sent.request.slots for sent in under_way)

    @invariant()
    def what_is_complete_is_gone(self) -> None:
        for worker in set(self.there) & set(FED):
            wire = self.wires[worker]
            feed = self.cluster.worker(worker).feed
            assert feed is None or not wire.complete & feed.running_by_token.keys()

    @invariant()
    def no_figure_is_negative(self) -> None:
        for worker in self.there:
            state = self.cluster.worker(worker)
            assert 0 <= state.free_slots <= SLOTS
            assert state.free_slots == max(0, SLOTS - state.requests)
            assert min(state.load_tokens, state.requests, state.gaps) >= 0
            if state.feed:
                assert state.feed.load_tokens >= state.feed.resident_tokens >= 0
        for view in self.cluster.groups["default"].views(Dispatch.POOL):
            assert 0 <= view.capacity <= SLOTS
        for totals in self.cluster.groups["default"].totals.values():
            assert totals.imbalance_tokens >= 0
            assert totals.steps <= totals.worker_steps
            assert totals.max_load_tokens <= totals.load_tokens

    def teardown(self) -> None:
        """When all has ended everywhere, nothing is left."""
        self.settle()
        for sent in [*self.alive]:
            self._end(sent, Outcome.ABORTED)
        for worker in WORKERS:
            for engine_id in self.engines[worker].ids:
                self.engines[worker].abort(engine_id)
        for worker in FED:
            self.come(worker, up=True)
            self._settle(worker)
        for worker in self.there:
            state = self.cluster.worker(worker)
            assert (state.load_tokens, state.requests, state.in_flight) == (0, 0, 0)
            assert state.free_slots == SLOTS

    # the model

    def _generated(self, sent: Sent) -> int:
        engine = self.engines[sent.worker]
        parts = (engine.running.get(i) or engine.waiting.get(i) for i in sent.parts)
        return sum(one.generated_tokens for one in parts if one is not None)

    def _miss(self, worker: str) -> None:
        """What the stream said, or will say, may have passed the router by."""
        for sent in self.alive:
            sent.all_heard = sent.all_heard and sent.worker != worker

    def _forget(self, worker: str) -> None:
        self._miss(worker)
        if worker in FED:
            self.wires[worker].complete.clear()

    def _pick(self, pick: int) -> Sent:
        return self.alive[pick % len(self.alive)]

    def _reach(self, sent: Sent) -> None:
        if sent.on_its_way:
            sent.on_its_way = False
            for engine_id in sent.parts:
                self.engines[sent.worker].submit(engine_id, sent.exact_tokens)

    def _end(self, sent: Sent, outcome: Outcome) -> None:
        self.alive.remove(sent)
        self.cluster.apply(Ended(sent.request.id, outcome))

    def _abort_in_engine(self, sent: Sent) -> None:
        for engine_id in sent.parts:
            self.engines[sent.worker].abort(engine_id)

    def _step(
        self, worker: str, finish: set[str], preempt: set[str], gains: Sequence[int] = (1,)
    ) -> None:
        message = self.engines[worker].step(finish, preempt, gains)
        for sent in self.alive:
            sent.most_generated = max(sent.most_generated, self._generated(sent))
        if worker in FED:
            self.wires[worker].send(message)

    def _receive(self, worker: str, message: Snapshot) -> None:
        if worker in self.gone:
            return
        self.plain &= message.kind != "growth"
        self.cluster.apply(SnapshotReceived(worker, message, 0.0))

    def _settle(self, worker: str) -> None:
        wire, engine = self.wires[worker], self.engines[worker]
        self._step(worker, set(), set())
        for message in (*wire.under_way, engine.full()):
            self._receive(worker, message)
        wire.under_way.clear()
        self._compare(self.cluster.worker(worker), engine)

    def _compare(self, state: Worker, engine: EngineModel) -> None:
        """Equal, but for parts that finished unheard or wait again: these count at most in full."""
        mine = [sent for sent in self.alive if sent.worker == state.spec.id]
        queued = sum(
            sent.request.prompt_tokens for sent in mine for i in sent.parts if i in engine.waiting
        )
        ended = [
            (sent, len(set(sent.parts) - set(engine.ids))) for sent in mine if not sent.all_heard
        ]
        unheard = sum(sent.request.prompt_tokens * parts for sent, parts in ended)
        noted = sum(
            sent.most_generated
            for sent in mine
            if not (sent.all_heard or set(sent.parts) <= engine.running.keys())
        )
        truth = engine.load_tokens + queued
        assert truth <= state.load_tokens <= truth + unheard + noted
        assert state.feed is not None
        assert state.feed.load_tokens == engine.load_tokens
        assert (
            len(engine.ids) <= state.requests <= len(engine.ids) + sum(parts for _, parts in ended)
        )


TestClusterMachine = ClusterMachine.TestCase
TestClusterMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
