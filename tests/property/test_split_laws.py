"""Laws of the hand-off under any order of arrivals, prefills, ends, failures and leavings."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs

from router.core.errors import NoWorkerError, PoolFullError
from router.core.events import EngineFailed, Fetched, SnapshotReceived, WorkerDown, WorkerUp
from router.core.policies.baselines import PerRequest, fcfs
from router.core.policies.policy_protocol import Policy
from router.core.state.cluster import Cluster
from router.core.state.prefill_worker import PrefillWorker
from router.core.types import Assignment, Dispatch, Outcome, Request, WorkerSpec, WorkerView
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.interface import Deciding
from tests.support.clusters import Phase, phase
from tests.support.core import request, snapshot
from tests.support.dispatching import dispatch_settings, play

STAGE = "default/prefill"
SPECS = [
    WorkerSpec("p", "http://p", role="prefill"),
    WorkerSpec("q", "http://q", role="prefill"),
    WorkerSpec("a", "http://a", slots=1),
    WorkerSpec("b", "http://b", role="decode", slots=2),
]
POOL_LIMIT = 4
KEPT_S = 5.0
PROMPT_TOKENS = 317  # as the engines count them; nobody estimates so

STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                *("submit", "submit", "go_on", "go_on", "go_on", "refuse", "fail", "leave"),
                *("up", "down", "fall", "tick", "slow"),
            ]
        ),
        st.integers(0, 9),
        st.booleans(),
    ),
    max_size=50,
)


class OnlyExact(Policy):
    """First come, first served; a size that is an estimate is no prefilled request's."""

    def __init__(self) -> None:
        self._policy = PerRequest(fcfs)
        self.whole: set[str] = set()
        self.past: set[str] = set()

    def assign(
        self, waiting: Sequence[Request], workers: Sequence[WorkerView], known: object = None
    ) -> Sequence[Assignment]:
        for each in waiting:
            assert each.exact == (each.prompt_tokens == PROMPT_TOKENS)
            assert each.exact or each.id in self.whole
        return self._policy.assign(waiting, workers)


class Story:
    """What has become of each request; a task plays the part of the relay for it."""

    def __init__(self, policy: OnlyExact) -> None:
        self.policy = policy
        self.now_s = 100.0
        self.cluster = Cluster(SPECS)
        for each in self.cluster.groups["default/prefill"].prefill_workers:
            each.chunk_tokens = 200
        self.port = Dispatcher(
            self.cluster,
            Deciding(lambda: cast(Policy, policy), lambda: PerRequest(fcfs)),
            dispatch_settings(pool_size=POOL_LIMIT, queue_timeout_s=1000.0),
            lambda: self.now_s,
        )
        for spec in SPECS:
            self.port.apply(WorkerUp(spec.id))
        self.asked = self.refused = self.slow_steps = 0
        self.alive: dict[str, tuple[Request, asyncio.Future[WorkerSpec]]] = {}

    def take(self, step: str, number: int) -> None:
        match step:
            case "submit":
                self.submit(200 + 100 * number)
            case "up":
                self.port.apply(WorkerUp("pqab"[number % 4]))
            case "down" | "fall":
                self.port.apply(WorkerDown("pqab"[number % 4], "gone"))
                if step == "fall":
                    self.port.apply(EngineFailed("pqab"[number % 4]))
            case "tick":
                self.now_s += 1
                self.port.tick()
            case "slow":  # so that what fits on a decode worker is sooner there
                self.slow_steps += 1
                told = snapshot("full", self.slow_steps, step_s=float(number % 2))
                told = structs.replace(told, scheduled_prefill_tokens=1)
                self.port.apply(SnapshotReceived("pq"[number // 5], told, self.now_s))
            case _ if self.alive:
                self.touch(step, list(self.alive)[number % len(self.alive)])

    def submit(self, tokens: int) -> None:
        self.asked += 1
        new = request(self.asked, tokens, slots=1 + tokens % 3, arrival=self.now_s)
        asking = replace(new, group=STAGE)
        if (past := self.port.send_past(asking)) is not None:
            assert past[1].result().id in "ab"
            self.policy.past.add(past[0].id)
            self.keep(past)
            return
        try:
            self.alive[asking.id] = asking, self.port.submit(asking)
        except NoWorkerError:
            self.go_whole(asking)
        except PoolFullError:
            self.refused += 1

    def go_whole(self, asking: Request) -> None:
        """As the relay does when no prefill worker can be had."""
        try:
            whole, waiter = self.port.serve_whole(asking)
        except (NoWorkerError, PoolFullError):
            self.refused += 1
        else:
            self.policy.whole.add(whole.id)
            self.keep((whole, waiter))

    def touch(self, step: str, request_id: str) -> None:
        asking, waiter = self.alive.pop(request_id)
        if step == "leave":
            waiter.cancel()
            asyncio.get_running_loop().call_soon(self.port.end, asking, Outcome.ABORTED)
        elif not waiter.done():
            self.alive[request_id] = asking, waiter
        elif waiter.exception() is not None:
            if asking.group == STAGE:
                self.go_whole(asking)
            assert phase(self.cluster, asking.id) is Phase.ENDED
        elif asking.group == STAGE:
            self.prefill(step, asking, waiter.result().id)
        else:
            self.decode(step, asking, waiter)

    def prefill(self, step: str, asking: Request, worker_id: str) -> None:
        """What comes of a request at a prefill worker."""
        if step == "fail":
            self.keep(self.port.give_back(asking))
        elif step == "refuse":
            again = self.port.turned_away(asking, worker_id)
            if again is None:
                self.port.end(asking, Outcome.COMPLETED)
            else:
                self.keep(again)
        else:
            self.keep(self.port.hand_off(asking, PROMPT_TOKENS, KEPT_S))

    def decode(self, step: str, asking: Request, waiter: asyncio.Future[WorkerSpec]) -> None:
        """What comes of a request at a worker that decodes."""
        past, whole = asking.id in self.policy.past, asking.id in self.policy.whole
        if step == "fail" and whole:
            again = self.port.give_back(asking)
            self.policy.whole.add(again[0].id)
            self.keep(again)
        elif not whole and (step == "fail" or not (past or self.port.keeps(asking))):
            self.keep(self.port.prefill_again(asking))
        else:
            self.port.began(asking, waiter.result().id, self.now_s)
            kept = self.kept_tokens
            if step == "refuse":  # what it would have fetched stays until it expires
                self.port.end(asking, Outcome.COMPLETED)
                assert self.kept_tokens == kept
            else:
                self.port.apply(Fetched(asking.id))
                assert not self.port.keeps(asking)
                assert self.kept_tokens == kept - (0 if whole or past else PROMPT_TOKENS)
                self.port.end(asking, Outcome.COMPLETED)

    def keep(self, again: tuple[Request, asyncio.Future[WorkerSpec]]) -> None:
        self.alive[again[0].id] = again

    def check(self) -> None:
        phases = [phase(self.cluster, request_id) for request_id in self.alive]
        refused = sum(  # who will go whole, but has not yet
            waiter.done() and waiter.exception() is not None
            for request_id, (_, waiter) in self.alive.items()
            if phase(self.cluster, request_id) is Phase.ARRIVED
        )
        groups = self.cluster.groups
        waiting = {name: len(decider.pool) for name, decider in self.port.deciders.items()}
        assert waiting[STAGE] + refused == groups[STAGE].line.waiting == phases.count(Phase.ARRIVED)
        assert waiting["default"] == groups["default"].line.waiting == phases.count(Phase.READY)
        for name, one in ((STAGE, Phase.PREFILLING), ("default", Phase.DECODING)):
            in_flight = sum(worker.in_flight for worker in groups[name].workers.values())
            assert phases.count(one) == in_flight
        for name, group in groups.items():
            views = [worker.view(Dispatch.POOL) for worker in group.workers.values()]
            pending = sum(view.pending_prompt_tokens for view in views)
            assert pending == self.to_compute(name), "of prompts that nobody has computed"
        ready = len(self.port.deciders["default"].pool) + phases.count(Phase.PREFILLING)
        # A round sends a prompt to each of two workers.
        assert ready <= POOL_LIMIT + 1 + self.returned, "prefill workers were not held back"

    def to_compute(self, group: str) -> int:
        sent = [one for one, _ in self.alive.values() if one.group == group and self.is_sent(one)]
        if group == STAGE:
            return sum(one.prompt_tokens for one in sent)
        computes = self.policy.past | self.policy.whole
        return sum(one.load_tokens for one in sent if one.id in computes)

    def is_sent(self, asking: Request) -> bool:
        return phase(self.cluster, asking.id) in (Phase.PREFILLING, Phase.DECODING)

    @property
    def kept_tokens(self) -> int:
        return sum(worker.kept_tokens for worker in self.cluster.groups[STAGE].prefill_workers)

    @property
    def returned(self) -> int:
        """Those that had been let in may come back however full it is."""
        return sum(
            decider.stats.returned + decider.stats.repeated_prefills + decider.stats.fallbacks
            for decider in self.port.deciders.values()
        )

    def finish(self) -> None:
        for asking, _ in self.alive.values():
            self.port.end(asking, Outcome.ABORTED)
        self.now_s += KEPT_S
        self.port.tick()
        for group in self.cluster.groups.values():
            assert group.line.waiting == 0
            for worker in group.workers.values():
                assert (worker.in_flight, worker.load_tokens) == (0, 0)
                if isinstance(worker, PrefillWorker):
                    assert worker.kept_tokens == 0


@given(STEPS)
@example([("submit", 0, True), ("go_on", 0, True), ("fail", 0, True)])
@example([("slow", 1, True), ("slow", 6, True), ("submit", 0, True), ("fail", 0, True)])
def test_no_request_is_lost_and_none_is_placed_by_an_estimate(
    steps: list[tuple[str, int, bool]],
) -> None:
    story = play(lambda: Story(OnlyExact()), steps)
    assert not any(decider.stats.policy_errors for decider in story.port.deciders.values())
