"""The dispatch loop: events in, rounds when they can change something, assignments out.

The proxy speaks to it through ``DispatchPort`` alone, so that pool and policy can live in another
process than the connections.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from router.cluster import Cluster, Group
from router.decider import Clock, Decider
from router.errors import EvenstepError, NoWorkerError, PoolFullError, QueueTimeoutError
from router.lookahead import LookAhead
from router.overcommit import Overcommit
from router.pool import Pool
from router.stats import GroupStats
from router.types import (
    Arrived,
    Assignment,
    Dispatch,
    Dispatched,
    Ended,
    Event,
    FeedStale,
    GaugesReceived,
    Outcome,
    Phase,
    Policy,
    Progressed,
    PromptCounted,
    Request,
    Returned,
    SnapshotReceived,
    WorkerDown,
    WorkerSpec,
    WorkerUp,
)

log = logging.getLogger(__name__)

_TICK_S = 0.25
# A worker that failed one request is down until its next health check: nobody is sent away for it.
_GRACE_S = 1.0
# Ranks of one barrier report within this of each other; a round waits for the last of them.
_BARRIER_SKEW_S = 0.002


class DispatchPort(Protocol):
    """What the proxy may ask of the dispatcher."""

    def submit(self, request: Request) -> asyncio.Future[WorkerSpec]:
        """Let a request wait for a worker.

        Returns:
            The worker, once a slot is free. Its exceptions: NoWorkerError, QueueTimeoutError.

        Raises:
            NoWorkerError: nobody has served the group for a second.
            PoolFullError: no room to wait.
        """
        ...

    def withdraw(self, request: Request) -> None:
        """The client left; the request may be waiting or assigned."""
        ...

    def give_back(self, request: Request) -> tuple[Request, asyncio.Future[WorkerSpec]]:
        """The worker failed before the first byte: wait for another, at the old place.

        Returns:
            The request as it is called from now on, and its worker as ``submit`` returns it.
        """
        ...

    def end(self, request: Request, outcome: Outcome) -> None:
        """An assigned request has ended."""
        ...

    def progress(self, request: Request, generated_tokens: int) -> None:
        """An assigned request's stream has shown so many output tokens."""
        ...

    def prompt_counted(self, request: Request, prompt_tokens: int) -> None:
        """An engine has said how many tokens a request's prompt has."""
        ...

    def first_byte(self, request: Request, now_s: float) -> None:
        """The first byte of an answer was passed on, at a time of the dispatcher's clock."""
        ...


@dataclass(frozen=True, slots=True)
class _Waiter:
    """Who waits for a worker; ``since_s`` is its arrival, or when it came back from a worker."""

    worker: asyncio.Future[WorkerSpec]
    since_s: float


@dataclass(slots=True)
class _Lane:
    """A group's decider, and those who wait for its answers.

    ``deserted_s`` is since when no worker has been live, None while one is.
    """

    decider: Decider
    deserted_s: float | None
    waiters: dict[str, _Waiter] = field(default_factory=dict)
    timer: asyncio.TimerHandle | asyncio.Handle | None = None
    hurried: bool = False

    @property
    def group(self) -> Group:
        return self.decider.group

    @property
    def pool(self) -> Pool:
        return self.decider.pool

    @property
    def stats(self) -> GroupStats:
        return self.decider.stats


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """Settings of the loop.

    Attributes:
        pool_limit: requests that may wait, per group.
        patience_s: a request that waited longer enters at the next free slot.
        queue_timeout_s: a request that waited longer is given up; one that came back from a
            failing worker has as long again.
        snapshot_stale_s: snapshots older than this no longer count.
        overcommit: requests that may queue in an engine before a slot is free; None: as many as
            its slot bubble asks for.
    """

    dispatch: Dispatch = Dispatch.POOL
    pool_limit: int = 1024
    patience_s: float = 5.0
    queue_timeout_s: float = 60.0
    snapshot_stale_s: float = 3.0
    overcommit: int | None = 0


class Dispatcher:
    """Owns cluster, pools and policies; everything runs on one event loop.

    Args:
        cluster: its state; changed here alone.
        make_policy: called once per group.
        fallback: stands in for a round in which the policy broke its contract.
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
            name: _Lane(
                Decider(
                    group,
                    Pool(settings.pool_limit, settings.patience_s, settings.queue_timeout_s),
                    make_policy(),
                    fallback(),
                    settings.dispatch,
                    make_look_ahead(),
                    Overcommit(settings.overcommit),
                ),
                clock(),
            )
            for name, group in cluster.groups.items()
        }
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
        if self._is_deserted(lane):
            lane.stats.unserved += 1
            raise NoWorkerError(_no_worker(lane.group))
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
        again = request.again()
        self.apply(Returned(request.id, again))
        lane.stats.returned += 1
        return again, self._wait(lane, again, self._clock())

    def end(self, request: Request, outcome: Outcome) -> None:
        """See ``DispatchPort.end``."""
        if self.cluster.phase(request.id) is not Phase.ENDED:
            self._lanes[request.group].stats.outcomes[outcome] += 1
            self.apply(Ended(request.id, outcome))

    def progress(self, request: Request, generated_tokens: int) -> None:
        """See ``DispatchPort.progress``."""
        self.cluster.apply(Progressed(request.id, generated_tokens))

    def prompt_counted(self, request: Request, prompt_tokens: int) -> None:
        """See ``DispatchPort.prompt_counted``."""
        self.cluster.apply(PromptCounted(request.id, prompt_tokens))

    def first_byte(self, request: Request, now_s: float) -> None:
        """See ``DispatchPort.first_byte``."""
        self._lanes[request.group].stats.ttft_s.observe(now_s - request.arrival_s)

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
            if self._is_deserted(lane):
                for request in list(lane.pool):
                    error = NoWorkerError(_no_worker(lane.group))
                    self._give_up(lane, request, Outcome.FAILED, error)

    def _expire(self, lane: _Lane, now: float) -> None:
        timeout_s = self._settings.queue_timeout_s
        for request in lane.pool.expired(now):
            # One that came back is old by its arrival, but has waited since its return only.
            if now - lane.waiters[request.id].since_s >= timeout_s:
                error = QueueTimeoutError(f"no slot became free within {timeout_s:g} s")
                self._give_up(lane, request, Outcome.EXPIRED, error)

    def _watch_feeds(self, lane: _Lane, now: float) -> None:
        for worker in lane.group.live_workers():
            age_s = now - worker.feed.received_s if worker.feed else 0.0
            if age_s > self._settings.snapshot_stale_s:
                log.warning("%s: no snapshot for %.1f s, own counts hold", worker.spec.id, age_s)
                self.apply(FeedStale(worker.spec.id))

    def _note_desertion(self, lane: _Lane) -> None:
        if lane.group.live_workers():
            lane.deserted_s = None
        elif lane.deserted_s is None:
            lane.deserted_s = self._clock()

    def _is_deserted(self, lane: _Lane) -> bool:
        return lane.deserted_s is not None and self._clock() - lane.deserted_s >= _GRACE_S

    # rounds

    def _wait(self, lane: _Lane, request: Request, since_s: float) -> asyncio.Future[WorkerSpec]:
        lane.pool.add(request)
        worker: asyncio.Future[WorkerSpec] = asyncio.get_running_loop().create_future()
        lane.waiters[request.id] = _Waiter(worker, since_s)
        self._schedule(lane, hurry=True)
        return worker

    def _schedule(self, lane: _Lane, *, hurry: bool) -> None:
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

    def _round(self, lane: _Lane) -> None:
        if lane.timer is not None:
            lane.timer.cancel()
            lane.timer = None
        now = self._clock()
        for assignment in lane.decider.decide(now, self._clock):
            self._send(lane, assignment, now)

    def _send(self, lane: _Lane, assignment: Assignment, now: float) -> None:
        request = lane.pool.remove(assignment.request_id)
        waiter = lane.waiters.pop(assignment.request_id)
        assert request is not None
        self.cluster.apply(Dispatched(request.id, assignment.worker_id))
        lane.stats.assigned += 1
        lane.stats.pool_wait_s.observe(now - waiter.since_s)
        if not waiter.worker.done():  # else its client has just left: it is about to be withdrawn
            waiter.worker.set_result(self.cluster.worker(assignment.worker_id).spec)

    def _lanes_of(self, event: Event) -> Iterable[_Lane]:
        match event:
            case SnapshotReceived() | GaugesReceived() | FeedStale():
                return self._lane_of[event.worker_id]
            case _:
                return self._lanes.values()

    def _give_up(
        self, lane: _Lane, request: Request, outcome: Outcome, error: EvenstepError
    ) -> None:
        lane.pool.remove(request.id)
        self.end(request, outcome)
        worker = lane.waiters.pop(request.id).worker
        if not worker.done():
            worker.set_exception(error)


def _no_worker(group: Group) -> str:
    states = ", ".join(f"{i}: {w.down_reason}" for i, w in group.workers.items())
    return f"no worker of group {group.name!r} is up ({states})"
