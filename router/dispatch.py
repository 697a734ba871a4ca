"""The dispatch loop: events in, rounds when they can change something, assignments out.

The proxy speaks to it through ``port.DispatchPort`` alone, so that pool and policy can live in
another process than the connections.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from router.cluster import Cluster, Group
from router.decider import Clock, Decider
from router.errors import EvenstepError, NoWorkerError, PoolFullError, QueueTimeoutError
from router.lane import DispatchSettings, Lane, Waiter
from router.lookahead import LookAhead
from router.overcommit import Overcommit
from router.pool import Pool
from router.types import (
    Arrived,
    Assignment,
    Dispatch,
    Dispatched,
    Ended,
    EngineFailed,
    Event,
    FeedStale,
    Fetched,
    GaugesReceived,
    Outcome,
    Phase,
    Policy,
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
# A worker that failed one request is down until its next health check: nobody is sent away for it.
_GRACE_S = 1.0
# Ranks of one barrier report within this of each other; a round waits for the last of them.
_BARRIER_SKEW_S = 0.002


class Dispatcher:
    """Owns cluster, pools and policies; everything runs on one event loop.

    Args:
        cluster: its state; changed here alone.
        make_policy: called once per group.
        fallback: stands in for a round in which the policy broke its contract, and chooses among
            prefill workers.
        settings: see ``DispatchSettings``.
        clock: seconds, monotonic.
        make_look_ahead: called once per group; None where the policy asks nothing of the future.
    """

    def __init__(
        self,
        cluster: Cluster,
        make_policy: Callable[[], Policy],
        fallback: Callable[[], Policy],
        settings: DispatchSettings,
        clock: Clock,
        make_look_ahead: Callable[[], LookAhead | None] = lambda: None,
    ) -> None:
        self.cluster = cluster
        self._settings = settings
        self._clock = clock
        self._lanes = {
            name: Lane(
                Decider(
                    group,
                    Pool(settings.pool_limit, settings.patience_s, settings.queue_timeout_s),
                    make_policy() if group.serves is None else fallback(),
                    fallback(),
                    settings.dispatch if group.serves is None else Dispatch.POOL,
                    make_look_ahead() if group.serves is None else None,
                    Overcommit(settings.overcommit),
                ),
                clock(),
            )
            for name, group in cluster.groups.items()
        }
        self._sent_s: dict[str, float] = {}
        self._lane_of = {
            worker_id: (lane,) for lane in self._lanes.values() for worker_id in lane.group.workers
        }

    @property
    def deciders(self) -> Mapping[str, Decider]:
        """Who decides, per group, with pool and counters."""
        return {name: lane.decider for name, lane in self._lanes.items()}

    # what the proxy says

    def submit(self, request: Request) -> asyncio.Future[WorkerSpec]:
        """See ``DispatchPort.submit``."""
        lane = self._lanes[request.group]
        if (deserted := self._deserted(lane)) is not None:
            lane.stats.unserved += lane.group.serves is None  # else it may be served whole
            raise NoWorkerError(_no_worker(deserted.group))
        if lane.pool.full:
            self._round(lane)
        if lane.pool.full:
            lane.stats.rejected += 1
            raise PoolFullError(self._settings.pool_limit, retry_after_s=1)
        self.cluster.apply(Arrived(request))
        return self._wait(lane, request, request.arrival_s)

    def withdraw(self, request: Request) -> None:
        """See ``DispatchPort.withdraw``."""
        lane = self._lanes[request.group]
        if lane.pool.remove(request.id) is not None:
            lane.waiters.pop(request.id).worker.cancel()
        self.end(request, Outcome.ABORTED)

    def give_back(self, request: Request) -> tuple[Request, asyncio.Future[WorkerSpec]]:
        """See ``DispatchPort.give_back``."""
        lane = self._lanes[request.group]
        lane.stats.returned += 1
        return self._again(request, request.again())

    def turned_away(
        self, request: Request, worker_id: str
    ) -> tuple[Request, asyncio.Future[WorkerSpec]] | None:
        """See ``DispatchPort.turned_away``."""
        workers = self._lanes[request.group].group.prefill_workers
        if not any(w.live and not w.refusing and w.spec.id != worker_id for w in workers):
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
        lane, now = self._lanes[request.group], self._clock()
        assert lane.group.serves is not None
        self._observe_service(lane, request, now)
        lane.stats.outcomes[Outcome.COMPLETED] += 1
        lane.stats.lost_prefills += lost
        ready = replace(
            request.again(),
            group=lane.group.serves.name,
            prompt_tokens=prompt_tokens,
            text_bytes=0,
            exact=True,
        )
        self.apply(Prefilled(request.id, ready, None if kept_s is None else now + kept_s))
        return ready, self._wait(self._lanes[ready.group], ready, now)

    def prefill_again(self, request: Request) -> tuple[Request, asyncio.Future[WorkerSpec]]:
        """See ``DispatchPort.prefill_again``."""
        group = prefill_stage(request.group)
        self._lanes[group].stats.repeated_prefills += 1
        return self._again(request, replace(request.again(), group=group))

    def serve_whole(self, request: Request) -> tuple[Request, asyncio.Future[WorkerSpec]]:
        """See ``DispatchPort.serve_whole``."""
        lane = self._lanes[request.group]
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
            self._lanes[request.group].stats.outcomes[outcome] += 1
            self._sent_s.pop(request.id, None)
            self.apply(Ended(request.id, outcome))

    def progress(self, request: Request, generated_tokens: int) -> None:
        """See ``DispatchPort.progress``."""
        self.cluster.apply(Progressed(request.id, generated_tokens))

    def prompt_counted(self, request: Request, prompt_tokens: int) -> None:
        """See ``DispatchPort.prompt_counted``."""
        self.cluster.apply(PromptCounted(request.id, prompt_tokens))

    def first_byte(self, request: Request, now_s: float) -> None:
        """See ``DispatchPort.first_byte``."""
        lane = self._lanes[request.group]
        lane.stats.ttft_s.observe(now_s - request.arrival_s)
        self._observe_service(lane, request, now_s)

    # what the engines say

    def apply(self, event: Event) -> None:
        """Move the cluster's state, and start a round where that may have freed a slot."""
        step_complete = self.cluster.apply(event)
        for lane in self._lanes_of(event):
            if step_complete:
                lane.decider.learn(step_complete=True)
            if isinstance(event, (WorkerUp, WorkerDown)):
                self._note_desertion(lane)
            if lane.pool:
                self._schedule(lane, hurry=step_complete or not isinstance(event, SnapshotReceived))

    async def run(self) -> None:
        """Watch the clock: snapshots that stop, requests that wait too long."""
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                self.tick()
            except Exception:
                log.exception("looking at the clock failed")

    def tick(self) -> None:
        """Look at the clock once."""
        now = self._clock()
        for lane in self._lanes.values():
            lane.decider.learn()
            self._watch_feeds(lane, now)
            self._expire(lane, now)
            self._look_at_prefills(lane, now)
            if (deserted := self._deserted(lane)) is not None:
                for request in list(lane.pool):
                    self._desert(lane, request, deserted)

    def _expire(self, lane: Lane, now: float) -> None:
        timeout_s = self._settings.queue_timeout_s
        lacking = "slot became free" if lane.group.serves is None else "prefill worker had room"
        for request in lane.pool.expired(now):
            # One that came back is old by its arrival, but has waited since its return only.
            if now - lane.waiters[request.id].since_s >= timeout_s:
                error = QueueTimeoutError(f"no {lacking} within {timeout_s:g} s")
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
            self._schedule(lane, hurry=True)

    def _desert(self, lane: Lane, request: Request, deserted: Lane) -> None:
        """Nobody is there any more; where only the prefill workers are gone, others can do it."""
        error = NoWorkerError(_no_worker(deserted.group))
        if deserted.group.serves is None:
            self._give_up(lane, request, Outcome.FAILED, error)
        else:
            lane.pool.remove(request.id)
            lane.waiters.pop(request.id).refuse(error)

    def _watch_feeds(self, lane: Lane, now: float) -> None:
        for worker in lane.group.live_workers():
            age_s = now - worker.feed.received_s if worker.feed else 0.0
            if age_s > self._settings.snapshot_stale_s:
                log.warning("%s: no snapshot for %.1f s, own counts hold", worker.spec.id, age_s)
                self.apply(FeedStale(worker.spec.id))

    def _note_desertion(self, lane: Lane) -> None:
        if lane.group.live_workers():
            lane.deserted_s = None
        elif lane.deserted_s is None:
            lane.deserted_s = self._clock()

    def _deserted(self, lane: Lane) -> Lane | None:
        """Which lane nobody has served for a while: the one behind this one, or itself."""
        since_s = self._clock() - _GRACE_S
        for each in (self._behind(lane), lane):
            if each is not None and each.deserted_s is not None and each.deserted_s <= since_s:
                return each
        return None

    def _behind(self, lane: Lane) -> Lane | None:
        """Where prompts are handed off, None where answers are given."""
        return None if lane.group.serves is None else self._lanes[lane.group.serves.name]

    # rounds

    def _again(
        self, request: Request, again: Request
    ) -> tuple[Request, asyncio.Future[WorkerSpec]]:
        """A request waits once more, perhaps for workers of another group."""
        self._sent_s.pop(request.id, None)
        self.apply(Returned(request.id, again))
        return again, self._wait(self._lanes[again.group], again, self._clock())

    def _observe_service(self, lane: Lane, request: Request, now_s: float) -> None:
        sent_s = self._sent_s.pop(request.id, None)
        if sent_s is not None:
            lane.stats.service_s.observe(now_s - sent_s)

    def _has_room_behind(self, lane: Lane) -> bool:
        """What the lane's workers do next can wait in the router; prompts are handed off there."""
        behind = self._behind(lane)
        if behind is None:
            return True
        prefilling = sum(worker.in_flight for worker in lane.group.workers.values())
        return len(behind.pool) + prefilling < self._settings.pool_limit

    def _wait(self, lane: Lane, request: Request, since_s: float) -> asyncio.Future[WorkerSpec]:
        lane.pool.add(request)
        worker: asyncio.Future[WorkerSpec] = asyncio.get_running_loop().create_future()
        lane.waiters[request.id] = Waiter(worker, since_s)
        self._schedule(lane, hurry=True)
        return worker

    def _schedule(self, lane: Lane, *, hurry: bool) -> None:
        if lane.timer is not None:
            if lane.hurried or not hurry:
                return
            lane.timer.cancel()
        loop = asyncio.get_running_loop()
        lane.hurried = hurry
        if hurry:
            lane.timer = loop.call_soon(self._round, lane)
        else:
            lane.timer = loop.call_later(_BARRIER_SKEW_S, self._round, lane)

    def _round(self, lane: Lane) -> None:
        if lane.timer is not None:
            lane.timer.cancel()
            lane.timer = None
        if not self._has_room_behind(lane):
            return
        now = self._clock()
        assignments = lane.decider.decide(now, self._clock)
        for assignment in assignments:
            self._send(lane, assignment, now)
        if assignments:
            self._schedule_prefills(lane)

    def _schedule_prefills(self, lane: Lane) -> None:
        """After a round: prefill workers are given one prompt in each, and room behind them."""
        for prefills in (lane, self._lanes.get(prefill_stage(lane.group.name))):
            if prefills is not None and prefills.group.serves is not None and prefills.pool:
                self._schedule(prefills, hurry=True)

    def _send(self, lane: Lane, assignment: Assignment, now: float) -> None:
        request = lane.pool.remove(assignment.request_id)
        waiter = lane.waiters.pop(assignment.request_id)
        assert request is not None
        self.cluster.apply(Dispatched(request.id, assignment.worker_id))
        self._sent_s[request.id] = now
        lane.stats.assigned += 1
        lane.stats.estimated += not request.exact
        lane.stats.pool_wait_s.observe(now - waiter.since_s)
        if not waiter.worker.done():  # else its client has just left: it is about to be withdrawn
            waiter.worker.set_result(self.cluster.worker(assignment.worker_id).spec)

    def _lanes_of(self, event: Event) -> Iterable[Lane]:
        match event:
            case SnapshotReceived() | GaugesReceived() | FeedStale() | EngineFailed():
                return self._lane_of[event.worker_id]
            case _:
                return self._lanes.values()

    def _give_up(
        self, lane: Lane, request: Request, outcome: Outcome, error: EvenstepError
    ) -> None:
        lane.pool.remove(request.id)
        self.end(request, outcome)
        lane.waiters.pop(request.id).refuse(error)


def _no_worker(group: Group) -> str:
    states = ", ".join(f"{i}: {w.down_reason}" for i, w in group.workers.items())
    return f"no worker of group {group.name!r} is up ({states})"
