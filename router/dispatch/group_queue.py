"""A group's waiting requests, the timing of its rounds, and the dispatch of requests."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from math import ceil
from typing import ClassVar, Protocol

from router.core.clock import Clock
from router.core.errors import (
    DisplacedError,
    EvenstepError,
    NoWorkerError,
    PoolFullError,
    QueueTimeoutError,
    TargetError,
)
from router.core.events import Arrived, Dispatched, Ended, FeedStale
from router.core.prompt_budget import PromptBudget
from router.core.queue.retry import RetryBudget
from router.core.rounds.decider import Decider
from router.core.rounds.overcommit import Overcommit
from router.core.state.cluster import Cluster
from router.core.state.first_token import expected_s
from router.core.state.group_budget import GroupBudget
from router.core.targets import Targets
from router.core.types import Dispatch, Outcome, Request
from router.dispatch.interface import Deciding, Waiter
from router.replicas.leading import Leading

log = logging.getLogger(__name__)

# A failed request takes its worker down until the next health check.
_GRACE_S = 1.0
# All workers may be replaced at once.
DISSOLVED_S = 60.0
# Ranks of a barrier report within this time of each other; a round waits for the last one.
_BARRIER_SKEW_S = 0.002
# A request is refused if its first token is expected after so many times its target: policies
# choose among those that wait, and some come sooner than expected. Found by simulation.
SURELY_LATE = 1.5


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """As ``router.config`` declares them."""

    dispatch: Dispatch
    pool_size: int
    starvation_s: float
    queue_timeout_s: float  # it starts again when a worker fails the request
    snapshot_stale_s: float
    overcommit: int | None
    retry_budget: float
    retry_min_per_s: float


class Incoming(Protocol):
    """Engine messages that are not applied yet."""

    def read(self) -> None:
        """Apply them; a decision follows."""

    def hasten(self) -> None:
        """Apply further ones soon; requests wait."""


class NothingIncoming:
    """No messages."""

    def read(self) -> None: ...

    def hasten(self) -> None: ...


@dataclass(slots=True)
class Shared:
    """What all queues of a dispatcher share; times are monotonic."""

    cluster: Cluster
    clock: Clock
    settings: DispatchSettings
    incoming: Incoming
    leading: Leading


@dataclass(frozen=True, slots=True)
class Waiting:
    """A waiting request; ``since_s``: its arrival, or its return from another worker."""

    worker: Waiter
    since_s: float

    def refuse(self, error: EvenstepError) -> None:
        if not self.worker.done():
            self.worker.set_exception(error)


class GroupQueue:
    """The queue of a group whose workers answer requests; all runs on one event loop.

    Queues of groups that serve the same models are ``joined``: what waits is common to them, and
    each group decides on it in rounds of its own.
    """

    lacking: ClassVar[str] = "slot became free"  # what an expired request did not get

    def __init__(self, shared: Shared, decider: Decider) -> None:
        self._shared = shared
        self.decider = decider
        self.group, self.pool, self.stats = decider.group, decider.pool, decider.stats
        settings = shared.settings
        self.budget = RetryBudget(settings.retry_budget, settings.retry_min_per_s)
        self.waiters: dict[str, Waiting] = {}
        self.joined: list[GroupQueue] = [self]
        self.prefills: PrefillQueue | None = None  # queue of the group's prefill stage
        self.deserted_s: float | None = shared.clock()  # None: a worker serves, or is paused
        self.sent_s: dict[str, float] = {}  # times of dispatch, until the first byte
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None
        self._hurried = self._newcomers = False
        self.prompts = GroupBudget(decider.group, None)  # prompt budgets of the group's workers

    # Settings.

    def configure(self, settings: DispatchSettings, before: DispatchSettings) -> None:
        self.budget.configure(settings.retry_budget, settings.retry_min_per_s)
        self.pool.configure(settings.pool_size, settings.starvation_s, settings.queue_timeout_s)
        if before.overcommit != settings.overcommit:
            self.decider.overcommit = Overcommit(settings.overcommit)
        self.decider.dispatch = settings.dispatch
        self.note_change()

    def decide_by(self, deciding: Deciding) -> None:
        self.decider.policy, self.decider.look_ahead = deciding.policy(), deciding.look_ahead()
        self.decider.follow()

    def bound_prompts_by(self, rule: int | Targets | None) -> None:
        budget = PromptBudget(rule) if isinstance(rule, Targets) else rule
        self.prompts = GroupBudget(self.group, budget)
        self.decider.follow()

    # Requests.

    def submit(self, request: Request) -> Waiter:
        """Queue a newcomer; errors as from ``DispatchPort.submit``."""
        if (deserted := self.deserted()) is not None:
            raise self._unserved(deserted)
        self._refuse_late(request)
        if self.pool.full:
            self.hold_round()
            if self.pool.full:
                self._make_place(request)
        self.budget.earn(self._shared.clock())
        self._shared.cluster.apply(Arrived(request))
        return self.wait(request, request.arrival_s)

    def wait(self, request: Request, since_s: float) -> Waiter:
        self.pool.add(request)
        self.decider.sharing.came(request)
        worker: Waiter = asyncio.get_running_loop().create_future()
        self.waiters[request.id] = Waiting(worker, since_s)
        self._newcomers = True
        self.schedule(hurry=True)
        return worker

    def send(self, request: Request, worker_id: str) -> Waiter:
        """Send a newcomer to a worker at once."""
        worker: Waiter = asyncio.get_running_loop().create_future()
        self._shared.cluster.apply(Arrived(request))
        self._sent(request, worker_id, Waiting(worker, request.arrival_s), self._shared.clock())
        return worker

    def began(self, request: Request, now_s: float) -> None:
        self.stats.ttft_s.observe(now_s - request.arrival_s)
        self.observe_service(request.id, now_s)

    def observe_service(self, request_id: str, now_s: float) -> None:
        sent_s = self.sent_s.pop(request_id, None)
        if sent_s is not None:
            self.stats.service_s.observe(now_s - sent_s)

    def end(self, request: Request, outcome: Outcome) -> None:
        if (waiter := self.waiters.pop(request.id, None)) is not None:
            self.pool.remove(request.id)
            waiter.worker.cancel()
        shared = self._shared
        shared.incoming.read()  # its last tokens must be counted before it ends
        self.stats.outcomes[outcome] += 1
        self.sent_s.pop(request.id, None)
        shared.cluster.apply(Ended(request.id, outcome, shared.clock()))
        self.wake()

    def may_retry(self) -> bool:
        within = self.budget.spend(self._shared.clock())
        self.stats.unreturned += not within
        return within

    def _refuse_late(self, newcomer: Request) -> None:
        """TargetError: its first token cannot come in time, by the learned costs."""
        if newcomer.targets is None or (wanted_s := newcomer.targets.ttft_s) is None:
            return
        slots, tokens = self.pool.ahead_of(newcomer)
        taking = [queue for queue in self.joined if queue.group.serving]
        parts = max(1, len(taking))  # groups take about as many each
        ahead = slots // parts, tokens[::parts]
        every = [expected_s(newcomer, q.group, q.decider.dispatch, *ahead) for q in taking]
        known = [each for each in every if each is not None]
        if len(known) < parts:
            return
        expected = min(known).seconds + self._shared.clock() - newcomer.arrival_s
        if expected > SURELY_LATE * wanted_s:
            target, alone_s = f"the target is {wanted_s:g} s", min(each.alone_s for each in known)
            if alone_s > wanted_s:
                said = f"the prompt alone takes about {alone_s:.2g} s, and {target}"
                raise TargetError(said, None)
            said = f"the first token would come in about {expected:.1f} s, and {target}"
            raise TargetError(said, ceil(expected - wanted_s))

    def _make_place(self, newcomer: Request) -> None:
        limit, weight = self._shared.settings.pool_size, self.decider.fair.weight
        displaced = self.pool.displaced_by(newcomer.tenant, weight)
        if displaced is None:
            self.stats.rejected += 1
            raise PoolFullError(limit, retry_after_s=1)
        self._give_up(displaced, Outcome.DISPLACED, DisplacedError(limit, retry_after_s=1))

    def _give_up(self, request: Request, outcome: Outcome, error: EvenstepError) -> None:
        waiter = self._take_out(request)
        self.end(request, outcome)
        waiter.refuse(error)

    def _take_out(self, request: Request) -> Waiting:
        self.pool.remove(request.id)
        return self.waiters.pop(request.id)

    # Rounds.

    def step_ended(self) -> None:
        self.decider.learn(step_complete=True)
        if self.prompts.step_ended():
            self.decider.refresh()

    def wake(self) -> None:
        self.schedule(hurry=True)
        if self.prefills is not None:
            self.prefills.schedule(hurry=True)

    def schedule(self, *, hurry: bool) -> None:
        """Schedule a round: next turn, or when all ranks should have reported."""
        if not self.waiters:
            return
        if self._timer is not None:
            if self._hurried or not hurry:
                return
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._hurried = hurry
        if hurry:
            self._timer = loop.call_soon(self.hold_round)
        else:
            self._timer = loop.call_later(_BARRIER_SKEW_S, self.hold_round)

    def hold_round(self) -> None:
        self._shared.incoming.read()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if not (self._newcomers and self.decider.sharing.looked_through(self.group, self.pool)):
            self._assign()
        if self._newcomers and len(self.joined) > 1:  # what the round has left to others
            called = self.decider.sharing.choosers(self.pool)
            for queue in self.joined:
                if queue is not self and queue.group.name in called:
                    queue.schedule(hurry=True)
        self._newcomers = False
        if self.waiters:
            self._shared.incoming.hasten()

    def _assign(self) -> None:
        if not self._shared.leading.decides:
            return
        now = self._shared.clock()
        assignments = self.decider.decide(now, self._shared.clock)
        for request_id, worker_id in assignments:
            request = self.pool[request_id]
            self._sent(request, worker_id, self._take_out(request), now)
        if assignments:
            self.decider.sharing.settle(self.group)
            # Prompts go out one a round, and the queue behind may have room again.
            if self.prefills is not None:
                self.prefills.schedule(hurry=True)

    def _sent(self, request: Request, worker_id: str, waiter: Waiting, now: float) -> None:
        cluster, stats = self._shared.cluster, self.stats
        cluster.apply(Dispatched(request.id, worker_id, now))
        self.sent_s[request.id] = now
        stats.assigned += 1
        stats.estimated += not request.exact
        stats.pool_wait_s.observe(now - waiter.since_s)
        if not waiter.worker.done():  # else its client has just left
            waiter.worker.set_result(cluster.worker(worker_id).spec)

    # Workers.

    @property
    def _served(self) -> bool:
        return self.group.serving or self.group.paused

    def note_change(self) -> None:
        self.decider.sharing.forget()
        if self._served:
            self.deserted_s = None
        elif self.deserted_s is None:
            self.deserted_s = self._shared.clock()
        self.schedule(hurry=True)

    @property
    def dissolvable(self) -> bool:
        if self.group.workers or self.deserted_s is None or len(self.joined) > 1:
            return False
        return self._shared.clock() - self.deserted_s >= DISSOLVED_S

    def deserted(self) -> GroupQueue | None:
        """A queue that requests here need, without workers for ``_GRACE_S`` seconds."""
        grace_s = self._shared.clock() - _GRACE_S
        every = (queue.deserted_s for queue in self.joined)
        return None if any(since_s is None or since_s > grace_s for since_s in every) else self

    def desertion(self) -> NoWorkerError:
        workers = [pair for queue in self.joined for pair in queue.group.workers.items()]
        states = ", ".join(f"{i}: {w.down_reason or 'draining'}" for i, w in workers)
        why = states or "all have been removed"
        return NoWorkerError(f"no worker of group {self.group.name!r} is up ({why})")

    def _unserved(self, deserted: GroupQueue) -> NoWorkerError:
        self.stats.unserved += 1
        return deserted.desertion()

    def _desert(self, request: Request, deserted: GroupQueue) -> None:
        self._give_up(request, Outcome.FAILED, deserted.desertion())

    # Time.

    def tick(self, now: float) -> None:
        self.decider.learn()
        self.decider.fair.see(now, self.group.held)
        for worker in self.group.live_workers():
            age_s = now - worker.feed.received_s if worker.feed else 0.0
            if age_s > self._shared.settings.snapshot_stale_s:
                log.warning("%s: no snapshot for %.1f s, own counts hold", worker.spec.id, age_s)
                self._shared.cluster.apply(FeedStale(worker.spec.id))
                self.schedule(hurry=True)
        self._expire(now)
        if self.waiters and (refusal := self._shared.leading.refusal) is not None:
            for request in list(self.pool):
                self._give_up(request, Outcome.FAILED, refusal)
        # By a snapshot too workers go down or come up: it tells which stand and fall together.
        if self._served != (self.deserted_s is None):
            self.note_change()
        # A partner's round may have left a request to it.
        if self.group.review(now) or len(self.joined) > 1:
            self.schedule(hurry=True)
        if self.waiters and (deserted := self.deserted()) is not None:
            for request in list(self.pool):
                self._desert(request, deserted)

    def _expire(self, now: float) -> None:
        for request in self.pool.expired(now):
            # A request that came back has waited only since its return.
            timeout_s = self.pool.timeout_of(request)
            if now - self.waiters[request.id].since_s >= timeout_s:
                own = timeout_s == request.queue_timeout_s
                error = QueueTimeoutError(f"no {self.lacking} within {timeout_s:g} s", own=own)
                self._give_up(request, Outcome.EXPIRED, error)


class PrefillQueue(GroupQueue):
    """The queue of a group's prefill stage; ``decode``: the group's own queue."""

    lacking = "prefill worker had room"

    def __init__(self, shared: Shared, decider: Decider, decode: GroupQueue) -> None:
        super().__init__(shared, decider)
        self.decode = decode
        self.prefills = decode.prefills = self

    def configure(self, settings: DispatchSettings, before: DispatchSettings) -> None:
        super().configure(replace(settings, dispatch=Dispatch.POOL), before)

    def decide_by(self, deciding: Deciding) -> None:
        """Keep the policy of prefill workers: fewest prompt tokens to compute."""

    def bound_prompts_by(self, rule: int | Targets | None) -> None:
        """Prefill workers make nobody wait."""

    def refuse(self, worker_id: str) -> bool:
        """Send a worker that refused a prompt no other until the next tick.

        False, without effect, if all others refuse too or no retry is left.
        """
        workers = self.group.prefill_workers
        if not any(w.takes and not w.refusing and w.spec.id != worker_id for w in workers):
            return False
        if not self.may_retry():
            return False
        for worker in workers:
            worker.refusing |= worker.spec.id == worker_id
        return True

    def _assign(self) -> None:
        prefilling = sum(worker.in_flight for worker in self.group.workers.values())
        if len(self.decode.waiters) + prefilling < self._shared.settings.pool_size:
            super()._assign()

    @property
    def dissolvable(self) -> bool:
        """It goes with the group's own queue."""
        return False

    def deserted(self) -> GroupQueue | None:
        return self.decode.deserted() or super().deserted()

    def _unserved(self, deserted: GroupQueue) -> NoWorkerError:
        return deserted.desertion()  # a worker may still serve the whole request

    def _desert(self, request: Request, deserted: GroupQueue) -> None:
        """A request stays known if a worker may still serve it whole."""
        if deserted is self:
            self._take_out(request).refuse(self.desertion())
        else:
            super()._desert(request, deserted)

    def tick(self, now: float) -> None:
        """Expired KV or the end of a refusal may make room."""
        for worker in self.group.prefill_workers:
            kept_tokens = worker.kept_tokens
            self.stats.expired_kv_tokens += worker.expire(now)
            if worker.kept_tokens < kept_tokens or worker.refusing:
                self.schedule(hurry=True)
            worker.refusing = False
        super().tick(now)
