"""The dispatcher: events of proxy and engines come in, assignments of requests go out.

The proxy's requests use ``interface.DispatchPort``, those with separate prefill and decode workers
also what is here for them.
"""

import asyncio
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import chain

from router.core import events as ev
from router.core.clock import Clock
from router.core.errors import NoWorkerError, PolicyError
from router.core.policies.baselines import PerRequest
from router.core.policies.prompts import least_prefill
from router.core.queue.fair_share import FairShare, Weight, equal
from router.core.queue.pool import Pool
from router.core.rounds.decider import Decider
from router.core.rounds.overcommit import Overcommit
from router.core.state.cluster import Cluster
from router.core.state.group import Group
from router.core.state.short_misses import sooner_at
from router.core.state.worker import Worker
from router.core.stats import TokenStats
from router.core.step_time import StepBudget, StepTime
from router.core.targets import Targets, Verdict
from router.core.types import Dispatch, Outcome, Request, WorkerSpec
from router.dispatch.group_queue import (
    DispatchSettings,
    GroupQueue,
    Incoming,
    NothingIncoming,
    PrefillQueue,
    Shared,
)
from router.dispatch.interface import Again, Deciding, Waiter
from router.dispatch.lines import Lines
from router.dispatch.lockstep_log import LockstepLog
from router.replicas.leading import Leading

log = logging.getLogger(__name__)

_TICK_S = 0.25


class Dispatcher:
    """Owns cluster, queues and policies, all on one event loop; only they change the cluster."""

    def __init__(
        self,
        cluster: Cluster,
        deciding: Deciding,
        settings: DispatchSettings,
        clock: Clock,
        weight: Weight = equal,
        leading: Leading | None = None,
    ) -> None:
        self.cluster = cluster
        self._clock = clock
        self._deciding = deciding
        self._weight = weight
        self._prompt_rule: int | Targets | None = None
        self._lockstep_log = LockstepLog()
        self._lines = Lines(cluster, self._make_pool)
        self._home: Mapping[str, str] = {}  # group of each model
        self._shared = Shared(cluster, clock, settings, NothingIncoming(), leading or Leading())
        self.queues: dict[str, GroupQueue] = {}
        self._queue_of: dict[str, GroupQueue] = {}
        self.deciders: dict[str, Decider] = {}
        for group in cluster.groups.values():
            for worker_id in group.workers:
                self._open(worker_id)

    @property
    def waiting(self) -> bool:
        return any(queue.waiters for queue in self.queues.values())

    @property
    def under_way(self) -> tuple[int, int]:
        groups = self.cluster.groups.values()
        sent = sum(worker.in_flight for group in groups for worker in group.workers.values())
        return sum(decider.waiting for decider in self.deciders.values()), sent

    # Settings.

    def configure(self, settings: DispatchSettings) -> None:
        before, self._shared.settings = self._shared.settings, settings
        for queue in self.queues.values():
            queue.configure(settings, before)

    def decide_by(self, deciding: Deciding) -> None:
        """Use another policy from the next round on; the old one's learning is lost."""
        self._deciding = deciding
        for queue in self.queues.values():
            queue.decide_by(deciding)

    def fix_step_time(self, step_time: StepTime | None) -> None:
        if step_time != self.cluster.step_time:
            self.cluster.fix_step_time(step_time)
            for decider in self.deciders.values():
                decider.follow()

    def bound_prompts_by(self, rule: int | Targets | None) -> None:
        if rule != self._prompt_rule:
            self._prompt_rule = rule
            for queue in self.queues.values():
                queue.bound_prompts_by(rule)

    def prompt_budget(self, worker_id: str) -> StepBudget | None:
        if not self._shared.leading.decides:
            return None
        return self._queue_of[worker_id].prompts.of(worker_id)

    def read_before_rounds(self, incoming: Incoming) -> None:
        self._shared.incoming = incoming

    # Calls of the proxy.

    def submit(self, request: Request) -> Waiter:
        if (refusal := self._shared.leading.refusal) is not None:
            raise refusal
        queue = self.queues.get(request.group)
        if queue is None:
            raise NoWorkerError(f"group {request.group!r} has been removed")
        return queue.submit(request)

    def give_back(self, request: Request, *failed_by: str) -> Again:
        self._queue(request).stats.returned += 1
        next_ = self._next(request)
        assert next_ is not None
        again = replace(request.again(*failed_by), group=next_.group.name)
        return self._again(request, again)

    def may_ask_elsewhere(self, request: Request, asked: Set[str]) -> bool:
        queue = self._next(request)
        return queue is not None and bool(queue.decider.askable - asked) and queue.may_retry()

    def _next(self, request: Request) -> GroupQueue | None:
        """Where it would wait again: its group may have gone, or left the line of its model."""
        own, at = self.queues.get(request.group), self.cluster.at(request)
        queue = own if at is None else self.queues[at.name]
        home = self.queues.get(self._home.get(request.model, ""), queue)
        return own if any(own in each.joined for each in (queue, home) if each) else home

    def began(
        self, request: Request, worker_id: str, now_s: float, *, good: bool = True
    ) -> TokenStats:
        queue = self._queue_of.get(worker_id) or self._queue(request)
        queue.began(request, now_s)
        self.cluster.apply(ev.Began(request.id, worker_id, now_s, good))
        return queue.stats.tokens

    def end(self, request: Request, outcome: Outcome) -> None:
        if self.cluster.knows(request.id):
            self._queue(request).end(request, outcome)

    def judged(self, group: str, verdict: Verdict) -> None:
        if (queue := self.queues.get(group)) is not None:
            answers = queue.decode if isinstance(queue, PrefillQueue) else queue
            answers.stats.verdicts[verdict] += 1

    def move(self, request: Request, worker_id: str) -> None:
        """Count a request where it went by itself, instead of where it was sent."""
        now = self._clock()
        self.cluster.apply(ev.Returned(request.id, request, now))
        self.cluster.apply(ev.Dispatched(request.id, worker_id, now))

    def energy_j(self, request: Request) -> float | None:
        self._shared.incoming.read()
        return self.cluster.energy_j(request.id)

    # Requests with separate prefill and decode workers; most of these queue them again.

    def send_past(self, request: Request) -> Again | None:
        """Let a decode worker compute a newcomer's prompt, if that is sooner; None, without effect.

        It leaves at once, under its own id.
        """
        stage = self.queues.get(request.group)
        if not isinstance(stage, PrefillQueue) or stage.decode.waiters:
            return None
        if not self._shared.leading.decides:
            return None
        self._shared.incoming.read()
        worker_id = sooner_at(request, stage.decode.group)
        for group in (stage.group, stage.decode.group):  # it may enter neither under this id
            group.prefixes.forget(request.id)
        if worker_id is None:
            return None
        past = replace(request, group=stage.decode.group.name)
        stage.stats.passed += 1
        stage.decode.budget.earn(self._clock())
        return past, stage.decode.send(past, worker_id)

    def turned_away(self, request: Request, worker_id: str) -> Again | None:
        """Ask another prefill worker; None, without effect, if all refuse or no retry is left."""
        stage = self._stage(request.group)
        return self.give_back(request) if stage.refuse(worker_id) else None

    def hand_off(
        self, request: Request, prompt_tokens: int, kept_s: float | None, *, lost: bool = False
    ) -> Again:
        """Ask a decode worker, once the prompt is computed.

        ``kept_s``: lease on the KV, if any; ``lost``: no worker can fetch the KV.
        """
        stage, now = self._stage(request.group), self._clock()
        stage.observe_service(request.id, now)
        stage.stats.outcomes[Outcome.COMPLETED] += 1
        stage.stats.lost_prefills += lost
        ready = replace(
            request.again(),
            group=stage.decode.group.name,
            prompt_tokens=prompt_tokens,
            text_bytes=0,
            parts=0,
            exact=True,
            computed=not lost,
        )
        kept_until_s = None if kept_s is None else now + kept_s
        self.cluster.apply(ev.Prefilled(request.id, ready, kept_until_s, now))
        stage.wake()
        stage.decode.budget.earn(now)
        return ready, stage.decode.wait(ready, now)

    def prefill_again(self, request: Request, *failed_by: str) -> Again:
        """Ask a prefill worker again: the KV is gone."""
        queue = self.queues[request.group]
        stage = queue.prefills
        assert stage is not None
        stage.stats.repeated_prefills += request.computed
        queue.stats.returned += not request.computed  # it was sent past
        again = replace(request.again(*failed_by), group=stage.group.name, computed=False)
        return self._again(request, again)

    def serve_whole(self, request: Request) -> Again:
        stage = self._stage(request.group)
        whole = replace(request.again(), group=stage.decode.group.name, computed=False)
        if self.cluster.knows(request.id):
            waiter = self._again(request, whole)[1]
        else:  # the pool rejected it
            waiter = self.submit(whole)
        stage.stats.fallbacks += 1
        return whole, waiter

    def keeps(self, request: Request) -> bool:
        """Whether a prefill worker still keeps the KV."""
        return self.cluster.keeps(request.id)

    def _stage(self, name: str) -> PrefillQueue:
        queue = self.queues[name]
        assert isinstance(queue, PrefillQueue)
        return queue

    def _again(self, request: Request, again: Request) -> Again:
        queue, now = self._queue(request), self._clock()
        queue.sent_s.pop(request.id, None)
        self.cluster.apply(ev.Returned(request.id, again, now))
        queue.wake()
        return again, self.queues[again.group].wait(again, now)

    def _queue(self, request: Request) -> GroupQueue:
        """Of the group where it is."""
        group = self.cluster.at(request)
        return self.queues[request.group if group is None else group.name]

    # Events.

    def apply(self, event: ev.Event) -> None:
        frees_kv = isinstance(event, ev.Fetched) and self.cluster.keeps(event.request_id)
        step_complete = self.cluster.apply(event)
        match event:
            case ev.SnapshotReceived():
                queue = self._queue_of[event.worker_id]
                if step_complete:
                    queue.step_ended()
                queue.schedule(hurry=step_complete)
            case ev.GaugesReceived() | ev.FeedStale() | ev.EngineFailed():
                self._queue_of[event.worker_id].schedule(hurry=True)
            case ev.WorkerUp() | ev.WorkerDown():
                if isinstance(event, ev.WorkerUp):
                    self.cluster.group_of(event.worker_id).watched(event.worker_id).rose(
                        self._clock()
                    )
                self._note_change(*self.queues.values())
            case ev.Fetched() if frees_kv:  # a prefill worker has room
                for queue in self.queues.values():
                    queue.schedule(hurry=True)
            case _:
                pass

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                self.tick()
            except Exception:
                log.exception("timeouts could not be checked")

    def tick(self) -> None:
        now = self._clock()
        for queue in self.queues.values():
            try:
                queue.tick(now)
            except Exception:  # the other groups go on
                log.exception("group %s: its timeouts could not be checked", queue.group.name)
            self._lockstep_log.look(queue.group)
        for name, queue in list(self.queues.items()):
            if queue.dissolvable and self.cluster.dissolve(name):
                for gone in self.queues.keys() - self.cluster.groups.keys():
                    del self.queues[gone], self.deciders[gone]

    # Workers that come and go.

    def join(self, spec: WorkerSpec) -> None:
        self.cluster.join(spec)
        self._open(spec.id)

    def leave(self, worker_id: str) -> None:
        """Remove a worker; its group's requests keep waiting."""
        self.cluster.leave(worker_id)
        self._note_change(self._queue_of.pop(worker_id))

    def drain(self, worker_id: str, *, draining: bool) -> None:
        self.cluster.worker(worker_id).drain(draining=draining)
        self._note_change(self._queue_of[worker_id])

    def amend(self, spec: WorkerSpec) -> None:
        self.cluster.amend(spec)
        self._note_change(self._queue_of[spec.id])

    def share(self, lines: Sequence[Sequence[str]], home: Mapping[str, str]) -> None:
        """Requests for a group may go to all of its line from now on; ``home``: of each model."""
        self._home = home
        for names in lines:
            self._lines.draw([self.queues[name] for name in names], home)

    def set_lockstep(self, names: Collection[str]) -> None:
        self.cluster.set_lockstep(names)
        self._note_change(*self.queues.values())

    # Replicas: what a new leader knows, and what an old one leaves.

    def told_since(self, since_s: float) -> bool:
        """By full snapshots: of deltas, older ones may still be on their way, or unread."""
        for worker in self._workers():
            feed = worker.feed
            told = feed.full_s > since_s if feed else worker.spec.snapshots is None
            if worker.live and not told:
                return False
        return True

    @property
    def all_shown(self) -> bool:
        return not any(worker.live and worker.feed and worker.unseen for worker in self._workers())

    def lead(self) -> None:
        self._note_change(*self.queues.values())

    def _workers(self) -> Iterator[Worker]:
        return chain.from_iterable(group.workers.values() for group in self.cluster.groups.values())

    def _note_change(self, *queues: GroupQueue) -> None:
        for queue in queues:
            queue.note_change()

    def _open(self, worker_id: str) -> None:
        group = self.cluster.group_of(worker_id)
        if group.name not in self.queues:
            queue = self.queues[group.name] = self._make_queue(group)
            self.deciders[group.name] = queue.decider
        self._queue_of[worker_id] = self.queues[group.name]

    def _make_pool(self) -> Pool:
        settings = self._shared.settings
        return Pool(settings.pool_size, settings.starvation_s, settings.queue_timeout_s)

    def _make_queue(self, group: Group) -> GroupQueue:
        settings, answers = self._shared.settings, group.serves is None
        decider = Decider(
            group,
            self._make_pool(),
            self._deciding.policy() if answers else PerRequest(least_prefill),
            self._deciding.fallback(),
            settings.dispatch if answers else Dispatch.POOL,
            self._deciding.look_ahead() if answers else None,
            Overcommit(settings.overcommit),
            fair=FairShare(self._weight),
            on_policy_error=_log_policy_error,
        )
        decider.follow()
        if group.serves is None:
            queue = GroupQueue(self._shared, decider)
            queue.bound_prompts_by(self._prompt_rule)
            return queue
        return PrefillQueue(self._shared, decider, self.queues[group.serves.name])


def _log_policy_error(error: Exception) -> None:
    reason = "broke its contract" if isinstance(error, PolicyError) else "failed"
    log.error("the policy %s, this round is assigned by the fallback", reason, exc_info=error)
