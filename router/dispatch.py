"""The dispatcher: what proxy and engines say comes in, workers for those who wait go out.

The proxy speaks to it through ``port.DispatchPort`` alone, so that pool and policy can live in
another process than the connections.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Set
from dataclasses import replace

from router.access.shares import FairShare, Weight, equal
from router.clock import Clock
from router.cluster import Cluster
from router.decider import Decider
from router.errors import (
    DisplacedError,
    EvenstepError,
    NoWorkerError,
    PoolFullError,
    QueueTimeoutError,
)
from router.group import Group
from router.lane import DispatchSettings, Lane
from router.lanes import Lanes
from router.lookahead import LookAhead
from router.overcommit import Overcommit
from router.policy import Policy
from router.pool import Pool
from router.retry import RetryBudget
from router.stats import TokenStats
from router.types import (
    Arrived,
    Dispatch,
    Ended,
    Event,
    FeedStale,
    Fetched,
    Outcome,
    Phase,
    Prefilled,
    Progressed,
    PromptCounted,
    Request,
    Returned,
    SnapshotReceived,
    WorkerDown,
    WorkerSpec,
    WorkerUp,
    prefill_stage,
)

log = logging.getLogger(__name__)

_TICK_S = 0.25


class Dispatcher:
    """Owns cluster, pools and policies; everything runs on one event loop.

    Args:
        cluster: its state; changed here and in the lanes alone.
        make_policy: called once per group.
        fallback: stands in for a round in which the policy broke its contract, and chooses among
            prefill workers.
        settings: see ``DispatchSettings``.
        clock: seconds, monotonic.
        make_look_ahead: called once per group; None where the policy asks nothing of the future.
        weight: of a tenant's share, see ``access.shares``.
    """

    def __init__(
        self,
        cluster: Cluster,
        make_policy: Callable[[], Policy],
        fallback: Callable[[], Policy],
        settings: DispatchSettings,
        clock: Clock,
        make_look_ahead: Callable[[], LookAhead | None] = lambda: None,
        weight: Weight = equal,
    ) -> None:
        self.cluster = cluster
        self._clock = clock
        self._make_policy = make_policy
        self._fallback = fallback
        self._make_look_ahead = make_look_ahead
        self._weight = weight
        self.lanes = Lanes(cluster, self._make_lane, settings, clock)

    @property
    def deciders(self) -> Mapping[str, Decider]:
        """Who decides, per group, with pool and counters."""
        return self.lanes.deciders

    # settings

    def decide_by(
        self, make_policy: Callable[[], Policy], make_look_ahead: Callable[[], LookAhead | None]
    ) -> None:
        """Decide by another policy from the next round on; what the one before has learned goes."""
        self._make_policy, self._make_look_ahead = make_policy, make_look_ahead
        for lane in self.lanes:
            if lane.group.serves is None:
                lane.decider.policy = make_policy()
                lane.decider.look_ahead = make_look_ahead()

    # what the proxy says

    def submit(self, request: Request) -> asyncio.Future[WorkerSpec]:
        """See ``DispatchPort.submit``."""
        lane = self.lanes.get(request.group)
        if lane is None:
            raise NoWorkerError(f"group {request.group!r} has been removed")
        if (deserted := self.lanes.deserted(lane)) is not None:
            lane.stats.unserved += lane.group.serves is None  # else it may be served whole
            raise deserted.desertion()
        if lane.pool.full:
            self.lanes.hold_round(lane)
            if lane.pool.full:
                self._make_place(lane, request)
        lane.budget.earn(self._clock())
        self.cluster.apply(Arrived(request))
        return self.lanes.wait(lane, request, request.arrival_s)

    def _make_place(self, lane: Lane, newcomer: Request) -> None:
        """Of a full pool's tenants the one with the most waiting has a request less."""
        limit = self.lanes.settings.pool_limit
        displaced = lane.pool.displaced_by(newcomer.tenant, lane.decider.fair.weight)
        if displaced is None:
            lane.stats.rejected += 1
            raise PoolFullError(limit, retry_after_s=1)
        error = DisplacedError(limit, retry_after_s=1)
        self._give_up(lane, displaced, Outcome.DISPLACED, error)

    def withdraw(self, request: Request, outcome: Outcome = Outcome.ABORTED) -> None:
        """See ``DispatchPort.withdraw``."""
        lane = self.lanes.get(request.group)
        if lane is not None and lane.pool.remove(request.id) is not None:
            lane.waiters.pop(request.id).worker.cancel()
        self.end(request, outcome)

    def give_back(
        self, request: Request, *failed_by: str
    ) -> tuple[Request, asyncio.Future[WorkerSpec]]:
        """See ``DispatchPort.give_back``."""
        lane = self.lanes[request.group]
        lane.stats.returned += 1
        return self._again(request, request.again(*failed_by))

    def may_ask_elsewhere(self, group: str, asked: Set[str]) -> bool:
        """See ``DispatchPort.may_ask_elsewhere``."""
        others = self.lanes[group].group.askable - asked
        return bool(others) and self._may_retry(group)

    def _may_retry(self, group: str) -> bool:
        lane = self.lanes[group]
        within = lane.budget.spend(self._clock())
        lane.stats.unreturned += not within
        return within

    def turned_away(
        self, request: Request, worker_id: str
    ) -> tuple[Request, asyncio.Future[WorkerSpec]] | None:
        """See ``DispatchPort.turned_away``."""
        workers = self.lanes[request.group].group.prefill_workers
        if not any(w.takes and not w.refusing and w.spec.id != worker_id for w in workers):
            return None
        if not self._may_retry(request.group):
            return None
        for worker in workers:
            worker.refusing |= worker.spec.id == worker_id
        return self.give_back(request)

    def hand_off(
        self,
        request: Request,
        prompt_tokens: int,
        kept_s: float | None,
        *,
        lost: bool = False,
    ) -> tuple[Request, asyncio.Future[WorkerSpec]]:
        """See ``DispatchPort.hand_off``."""
        lane, now = self.lanes[request.group], self._clock()
        assert lane.group.serves is not None
        self._observe_service(lane, request, now)
        lane.stats.outcomes[Outcome.COMPLETED] += 1
        lane.stats.lost_prefills += lost
        ready = replace(
            request.again(),
            group=lane.group.serves.name,
            prompt_tokens=prompt_tokens,
            text_bytes=0,
            parts=0,
            exact=True,
        )
        self.apply(Prefilled(request.id, ready, None if kept_s is None else now + kept_s, now))
        behind = self.lanes[ready.group]
        behind.budget.earn(now)
        return ready, self.lanes.wait(behind, ready, now)

    def prefill_again(
        self, request: Request, *failed_by: str
    ) -> tuple[Request, asyncio.Future[WorkerSpec]]:
        """See ``DispatchPort.prefill_again``."""
        group = prefill_stage(request.group)
        self.lanes[group].stats.repeated_prefills += 1
        return self._again(request, replace(request.again(*failed_by), group=group))

    def serve_whole(self, request: Request) -> tuple[Request, asyncio.Future[WorkerSpec]]:
        """See ``DispatchPort.serve_whole``."""
        lane = self.lanes[request.group]
        assert lane.group.serves is not None
        whole = replace(request.again(), group=lane.group.serves.name)
        if self.cluster.phase(request.id) is Phase.ENDED:  # it was not let in
            waiter = self.submit(whole)
        else:
            waiter = self._again(request, whole)[1]
        lane.stats.fallbacks += 1
        return whole, waiter

    def keeps(self, request: Request) -> bool:
        """See ``DispatchPort.keeps``."""
        return self.cluster.keeps(request.id)

    def fetched(self, request: Request) -> None:
        """See ``DispatchPort.fetched``."""
        if self.cluster.keeps(request.id):
            self.apply(Fetched(request.id))

    def end(self, request: Request, outcome: Outcome) -> None:
        """See ``DispatchPort.end``."""
        if self.cluster.phase(request.id) is not Phase.ENDED:
            self.lanes.incoming.read()  # its last tokens
            self.lanes[request.group].stats.outcomes[outcome] += 1
            self.lanes.take_sent(request.id)
            self.apply(Ended(request.id, outcome, self._clock()))

    def progress(self, request: Request, generated_tokens: int) -> None:
        """See ``DispatchPort.progress``."""
        self.cluster.apply(Progressed(request.id, generated_tokens))

    def prompt_counted(self, request: Request, prompt_tokens: int, output_tokens: int = 0) -> None:
        """See ``DispatchPort.prompt_counted``."""
        self.cluster.apply(PromptCounted(request.id, prompt_tokens, output_tokens))

    def token_stats(self, group: str) -> TokenStats:
        """See ``DispatchPort.token_stats``."""
        return self.lanes[group].stats.tokens

    def energy_j(self, request: Request) -> float | None:
        """See ``DispatchPort.energy_j``."""
        self.lanes.incoming.read()
        return self.cluster.energy_j(request.id)

    def first_byte(self, request: Request, now_s: float) -> None:
        """See ``DispatchPort.first_byte``."""
        lane = self.lanes[request.group]
        lane.stats.ttft_s.observe(now_s - request.arrival_s)
        self.cluster.note_first_byte(request)
        self._observe_service(lane, request, now_s)

    def answered(self, worker_id: str, attempt: str) -> None:
        """See ``DispatchPort.answered``."""
        self.cluster.worker(worker_id).breaker.succeeded(attempt, self._clock())

    def failed(self, worker_id: str, attempt: str, *, suspect: bool = False) -> None:
        """See ``DispatchPort.failed``."""
        group = self.cluster.group_of(worker_id)
        group.failed(worker_id, attempt, self._clock(), suspect=suspect)

    def refused(self, worker_id: str, attempt: str) -> None:
        """See ``DispatchPort.refused``."""
        self.cluster.worker(worker_id).refused(attempt)

    def rest(self, worker_id: str, seconds: float) -> None:
        """See ``DispatchPort.rest``."""
        self.cluster.group_of(worker_id).rest(worker_id, self._clock(), seconds)

    # what the engines say

    def apply(self, event: Event) -> None:
        """Move the cluster's state, and start a round where that may have freed a slot."""
        step_complete = self.cluster.apply(event)
        if isinstance(event, WorkerUp):
            self.cluster.group_of(event.worker_id).rose(event.worker_id, self._clock())
        for lane in self.lanes.concerned(event):
            if step_complete:
                lane.decider.learn(step_complete=True)
            if isinstance(event, (WorkerUp, WorkerDown)):
                lane.note_desertion(self._clock())
            if lane.pool:
                self.lanes.schedule(
                    lane, hurry=step_complete or not isinstance(event, SnapshotReceived)
                )

    async def run(self) -> None:
        """Watch the clock: snapshots that stop, requests that wait too long."""
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                self.tick()
            except Exception:
                log.exception("timeouts could not be checked")

    def tick(self) -> None:
        """Look at the clock once."""
        now = self._clock()
        for lane in self.lanes:
            try:
                self._tick(lane, now)
            except Exception:  # the other groups go on
                log.exception("group %s: its timeouts could not be checked", lane.group.name)
        self.lanes.dissolve()

    def _tick(self, lane: Lane, now: float) -> None:
        lane.decider.learn()
        lane.decider.fair.see(now, lane.group.held)
        self._watch_feeds(lane, now)
        self._expire(lane, now)
        self._look_at_prefills(lane, now)
        if lane.group.review(now) and lane.pool:
            self.lanes.schedule(lane, hurry=True)
        if (deserted := self.lanes.deserted(lane)) is not None:
            for request in list(lane.pool):
                self._desert(lane, request, deserted)

    def _expire(self, lane: Lane, now: float) -> None:
        lacking = "slot became free" if lane.group.serves is None else "prefill worker had room"
        for request in lane.pool.expired(now):
            # One that came back is old by its arrival, but has waited since its return only.
            timeout_s = lane.pool.timeout_of(request)
            if now - lane.waiters[request.id].since_s >= timeout_s:
                own = timeout_s == request.queue_timeout_s
                error = QueueTimeoutError(f"no {lacking} within {timeout_s:g} s", own=own)
                self._give_up(lane, request, Outcome.EXPIRED, error)

    def _look_at_prefills(self, lane: Lane, now: float) -> None:
        """Memory that is free again, or a refusal that is over, may let others in."""
        may_enter = False
        for worker in lane.group.prefill_workers:
            kept_tokens = worker.kept_tokens
            lane.stats.expired_kv_tokens += worker.expire(now)
            may_enter |= worker.kept_tokens < kept_tokens or worker.refusing
            worker.refusing = False
        if may_enter and lane.pool:
            self.lanes.schedule(lane, hurry=True)

    def _desert(self, lane: Lane, request: Request, deserted: Lane) -> None:
        """Nobody is there any more; where only the prefill workers are gone, others can do it."""
        error = deserted.desertion()
        if deserted.group.serves is None:
            self._give_up(lane, request, Outcome.FAILED, error)
        else:
            lane.pool.remove(request.id)
            lane.waiters.pop(request.id).refuse(error)

    def _watch_feeds(self, lane: Lane, now: float) -> None:
        for worker in lane.group.live_workers():
            age_s = now - worker.feed.received_s if worker.feed else 0.0
            if age_s > self.lanes.settings.snapshot_stale_s:
                log.warning("%s: no snapshot for %.1f s, own counts hold", worker.spec.id, age_s)
                self.apply(FeedStale(worker.spec.id))

    def _again(
        self, request: Request, again: Request
    ) -> tuple[Request, asyncio.Future[WorkerSpec]]:
        """A request waits once more, perhaps for workers of another group."""
        now = self._clock()
        self.lanes.take_sent(request.id)
        self.apply(Returned(request.id, again, now))
        return again, self.lanes.wait(self.lanes[again.group], again, now)

    def _observe_service(self, lane: Lane, request: Request, now_s: float) -> None:
        sent_s = self.lanes.take_sent(request.id)
        if sent_s is not None:
            lane.stats.service_s.observe(now_s - sent_s)

    def _give_up(
        self, lane: Lane, request: Request, outcome: Outcome, error: EvenstepError
    ) -> None:
        lane.pool.remove(request.id)
        self.end(request, outcome)
        lane.waiters.pop(request.id).refuse(error)

    def _make_lane(self, group: Group, settings: DispatchSettings) -> Lane:
        answers = group.serves is None
        decider = Decider(
            group,
            Pool(settings.pool_limit, settings.patience_s, settings.queue_timeout_s),
            self._make_policy() if answers else self._fallback(),
            self._fallback(),
            settings.dispatch if answers else Dispatch.POOL,
            self._make_look_ahead() if answers else None,
            Overcommit(settings.overcommit),
            fair=FairShare(self._weight),
        )
        budget = RetryBudget(settings.retry_share, settings.retry_min_per_s)
        return Lane(decider, self._clock(), budget)
