"""The dispatcher: events of proxy and engines come in, assignments of waiting requests go out.

The proxy uses ``interface.DispatchPort`` alone, so pool and policy can live in another process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Set
from dataclasses import replace

from router.core.clock import Clock
from router.core.errors import (
    DisplacedError,
    EvenstepError,
    NoWorkerError,
    PolicyError,
    PoolFullError,
    QueueTimeoutError,
)
from router.core.forecast.look_ahead import LookAhead
from router.core.policies.protocol import Policy
from router.core.queue.fair_share import FairShare, Weight, equal
from router.core.queue.pool import Pool
from router.core.queue.retry import RetryBudget
from router.core.rounds.decider import Decider
from router.core.rounds.overcommit import Overcommit
from router.core.state.cluster import Cluster
from router.core.state.group import Group
from router.core.stats import TokenStats
from router.core.types import (
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
from router.dispatch.lane import DispatchSettings, Lane
from router.dispatch.lanes import Lanes

log = logging.getLogger(__name__)

_TICK_S = 0.25


class Dispatcher:
    """Owns cluster, pools and policies, all on one event loop.

    Only this class and the lanes change the cluster.

    Args:
        make_policy: factory of policies, called once per group.
        fallback: factory of the policy for rounds that the main policy failed, and for prefill
            workers.
        clock: seconds, monotonic.
        make_look_ahead: factory, called once per group; its result is None for a policy without
            forecast.
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
        return self.lanes.deciders

    # Settings.

    def decide_by(
        self, make_policy: Callable[[], Policy], make_look_ahead: Callable[[], LookAhead | None]
    ) -> None:
        """Use another policy from the next round on; state learned by the old one is lost."""
        self._make_policy, self._make_look_ahead = make_policy, make_look_ahead
        for lane in self.lanes:
            if lane.group.serves is None:
                lane.decider.policy = make_policy()
                lane.decider.look_ahead = make_look_ahead()

    # Calls of the proxy.

    def submit(self, request: Request) -> asyncio.Future[WorkerSpec]:
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
        """Evict a request of the tenant with the most waiting requests, or reject the newcomer."""
        limit = self.lanes.settings.pool_limit
        displaced = lane.pool.displaced_by(newcomer.tenant, lane.decider.fair.weight)
        if displaced is None:
            lane.stats.rejected += 1
            raise PoolFullError(limit, retry_after_s=1)
        error = DisplacedError(limit, retry_after_s=1)
        self._give_up(lane, displaced, Outcome.DISPLACED, error)

    def withdraw(self, request: Request, outcome: Outcome = Outcome.ABORTED) -> None:
        lane = self.lanes.get(request.group)
        if lane is not None and lane.pool.remove(request.id) is not None:
            lane.waiters.pop(request.id).worker.cancel()
        self.end(request, outcome)

    def give_back(
        self, request: Request, *failed_by: str
    ) -> tuple[Request, asyncio.Future[WorkerSpec]]:
        lane = self.lanes[request.group]
        lane.stats.returned += 1
        return self._again(request, request.again(*failed_by))

    def may_ask_elsewhere(self, group: str, asked: Set[str]) -> bool:
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
        group = prefill_stage(request.group)
        self.lanes[group].stats.repeated_prefills += 1
        return self._again(request, replace(request.again(*failed_by), group=group))

    def serve_whole(self, request: Request) -> tuple[Request, asyncio.Future[WorkerSpec]]:
        lane = self.lanes[request.group]
        assert lane.group.serves is not None
        whole = replace(request.again(), group=lane.group.serves.name)
        if self.cluster.phase(request.id) is Phase.ENDED:  # the pool rejected it
            waiter = self.submit(whole)
        else:
            waiter = self._again(request, whole)[1]
        lane.stats.fallbacks += 1
        return whole, waiter

    def keeps(self, request: Request) -> bool:
        return self.cluster.keeps(request.id)

    def fetched(self, request: Request) -> None:
        if self.cluster.keeps(request.id):
            self.apply(Fetched(request.id))

    def end(self, request: Request, outcome: Outcome) -> None:
        if self.cluster.phase(request.id) is not Phase.ENDED:
            self.lanes.incoming.read()  # its last tokens must be counted before it ends
            self.lanes[request.group].stats.outcomes[outcome] += 1
            self.lanes.take_sent(request.id)
            self.apply(Ended(request.id, outcome, self._clock()))

    def progress(self, request: Request, generated_tokens: int) -> None:
        self.cluster.apply(Progressed(request.id, generated_tokens))

    def prompt_counted(self, request: Request, prompt_tokens: int, output_tokens: int = 0) -> None:
        self.cluster.apply(PromptCounted(request.id, prompt_tokens, output_tokens))

    def token_stats(self, group: str) -> TokenStats:
        return self.lanes[group].stats.tokens

    def energy_j(self, request: Request) -> float | None:
        self.lanes.incoming.read()
        return self.cluster.energy_j(request.id)

    def first_byte(self, request: Request, now_s: float) -> None:
        lane = self.lanes[request.group]
        lane.stats.ttft_s.observe(now_s - request.arrival_s)
        self.cluster.note_first_byte(request)
        self._observe_service(lane, request, now_s)

    def answered(self, worker_id: str, attempt: str) -> None:
        self.cluster.worker(worker_id).breaker.succeeded(attempt, self._clock())

    def failed(self, worker_id: str, attempt: str, *, suspect: bool = False) -> None:
        group = self.cluster.group_of(worker_id)
        group.failed(worker_id, attempt, self._clock(), suspect=suspect)

    def refused(self, worker_id: str, attempt: str) -> None:
        self.cluster.worker(worker_id).refused(attempt)

    def rest(self, worker_id: str, seconds: float) -> None:
        self.cluster.group_of(worker_id).rest(worker_id, self._clock(), seconds)

    # Events of the engines.

    def apply(self, event: Event) -> None:
        """Update the cluster's state, and schedule a round if the event may have freed a slot."""
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
        """Check stale snapshots and expired requests, several times a second."""
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                self.tick()
            except Exception:
                log.exception("timeouts could not be checked")

    def tick(self) -> None:
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
            # A request that came back is old by its arrival, but has waited only since its return.
            timeout_s = lane.pool.timeout_of(request)
            if now - lane.waiters[request.id].since_s >= timeout_s:
                own = timeout_s == request.queue_timeout_s
                error = QueueTimeoutError(f"no {lacking} within {timeout_s:g} s", own=own)
                self._give_up(lane, request, Outcome.EXPIRED, error)

    def _look_at_prefills(self, lane: Lane, now: float) -> None:
        """Expired KV or the end of a refusal may make room for further prompts."""
        may_enter = False
        for worker in lane.group.prefill_workers:
            kept_tokens = worker.kept_tokens
            lane.stats.expired_kv_tokens += worker.expire(now)
            may_enter |= worker.kept_tokens < kept_tokens or worker.refusing
            worker.refusing = False
        if may_enter and lane.pool:
            self.lanes.schedule(lane, hurry=True)

    def _desert(self, lane: Lane, request: Request, deserted: Lane) -> None:
        """Fail a waiting request; without prefill workers, the caller then serves it whole."""
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
            on_policy_error=_log_policy_error,
        )
        budget = RetryBudget(settings.retry_share, settings.retry_min_per_s)
        return Lane(decider, self._clock(), budget)


def _log_policy_error(error: Exception) -> None:
    reason = "broke its contract" if isinstance(error, PolicyError) else "failed"
    log.error("the policy %s, this round is assigned by the fallback", reason, exc_info=error)
