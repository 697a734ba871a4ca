"""The lanes of all groups: queues, timing of rounds, and dispatch of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Protocol

from router.core.clock import Clock
from router.core.rounds.decider import Decider
from router.core.rounds.overcommit import Overcommit
from router.core.state.cluster import Cluster
from router.core.state.group import Group
from router.core.types import (
    Arrived,
    Assignment,
    Dispatched,
    EngineFailed,
    Event,
    FeedStale,
    GaugesReceived,
    PowerTold,
    Request,
    SnapshotReceived,
    WorkerSpec,
    prefill_stage,
)
from router.dispatch.lane import DispatchSettings, Lane, Waiter

# One failed request takes a worker down until its next health check. Requests wait for that long.
_GRACE_S = 1.0
# All workers may be replaced at once. Until then, requests get a retryable error.
DISSOLVED_S = 60.0
# Ranks of one barrier report within this time of each other; a round waits for the last report.
_BARRIER_SKEW_S = 0.002


class Incoming(Protocol):
    """Engine messages that have arrived and are not applied yet."""

    def read(self) -> None:
        """Apply all messages that have arrived; a decision follows."""
        ...

    def hasten(self) -> None:
        """Apply further messages soon; requests wait for them."""
        ...


class _Nothing:
    """A source without messages."""

    def read(self) -> None:
        """Do nothing."""

    def hasten(self) -> None:
        """Do nothing."""


class Lanes:
    """Holds the pools and starts the rounds; everything runs on one event loop.

    Args:
        clock: seconds, monotonic.
        make: factory of a group's lane.

    Attributes:
        incoming: engine messages that are applied before each round.
    """

    def __init__(
        self,
        cluster: Cluster,
        make: Callable[[Group, DispatchSettings], Lane],
        settings: DispatchSettings,
        clock: Clock,
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self.settings = settings
        self.incoming: Incoming = _Nothing()
        self._make = make
        self._lanes: dict[str, Lane] = {}
        self._deciders: dict[str, Decider] = {}
        self._lane_of: dict[str, tuple[Lane]] = {}
        self._sent_s: dict[str, float] = {}
        for group in cluster.groups.values():
            for worker_id in group.workers:
                self._open(worker_id)

    @property
    def deciders(self) -> Mapping[str, Decider]:
        return MappingProxyType(self._deciders)

    # Workers and settings.

    def join(self, spec: WorkerSpec) -> None:
        self._cluster.join(spec)
        self._open(spec.id)

    def leave(self, worker_id: str) -> None:
        """Remove a worker; its group's requests keep waiting."""
        self._cluster.leave(worker_id)
        (lane,) = self._lane_of.pop(worker_id)
        self._note_change(lane)

    def drain(self, worker_id: str, *, draining: bool) -> None:
        """Start or end draining: a draining worker receives no requests."""
        self._cluster.worker(worker_id).draining = draining
        self._note_change(*self._lane_of[worker_id])

    def amend(self, spec: WorkerSpec) -> None:
        self._cluster.amend(spec)
        self._note_change(*self._lane_of[spec.id])

    def set_lockstep(self, names: Collection[str]) -> None:
        self._cluster.set_lockstep(names)
        for lane in self:
            self._note_change(lane)

    def configure(self, settings: DispatchSettings) -> None:
        before, self.settings = self.settings, settings
        bounds = settings.pool_limit, settings.patience_s, settings.queue_timeout_s
        for lane in self:
            lane.budget.configure(settings.retry_share, settings.retry_min_per_s)
            lane.pool.configure(*bounds)
            if lane.group.serves is None:
                lane.decider.dispatch = settings.dispatch
            if before.overcommit != settings.overcommit:
                lane.decider.overcommit = Overcommit(settings.overcommit)
            self._note_change(lane)

    def _open(self, worker_id: str) -> None:
        group = self._cluster.group_of(worker_id)
        if group.name not in self._lanes:
            lane = self._lanes[group.name] = self._make(group, self.settings)
            self._deciders[group.name] = lane.decider
        self._lane_of[worker_id] = (self._lanes[group.name],)

    def _note_change(self, lane: Lane) -> None:
        """Start a round, since the set of usable workers may have changed."""
        lane.note_desertion(self._clock())
        if lane.pool:
            self.schedule(lane, hurry=True)

    def dissolve(self) -> None:
        """Delete empty groups that have had no worker for ``DISSOLVED_S`` seconds."""
        until_s = self._clock() - DISSOLVED_S
        for lane in list(self):
            since_s = lane.deserted_s
            if lane.group.serves is not None:
                continue  # deleted with its decode group
            if lane.group.workers or since_s is None or since_s > until_s:
                continue
            if self._cluster.dissolve(lane.group.name):
                for name in self._lanes.keys() - self._cluster.groups.keys():
                    del self._lanes[name], self._deciders[name]

    # Queues and rounds.

    @property
    def waiting(self) -> bool:
        return any(lane.pool for lane in self)

    def get(self, group: str) -> Lane | None:
        return self._lanes.get(group)

    def __getitem__(self, group: str) -> Lane:
        return self._lanes[group]

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes.values())

    def concerned(self, event: Event) -> Iterable[Lane]:
        """Lanes in which the event may have freed a slot."""
        match event:
            case SnapshotReceived() | GaugesReceived() | FeedStale() | EngineFailed():
                return self._lane_of[event.worker_id]
            case PowerTold():
                return ()
            case _:
                return self._lanes.values()

    def behind(self, lane: Lane) -> Lane | None:
        """Decode lane that a prefill lane hands off to; None for other lanes."""
        return None if lane.group.serves is None else self._lanes[lane.group.serves.name]

    def deserted(self, lane: Lane) -> Lane | None:
        """The decode lane or this one, if without workers for ``_GRACE_S``; else None."""
        since_s = self._clock() - _GRACE_S
        for each in (self.behind(lane), lane):
            if each is not None and each.deserted_s is not None and each.deserted_s <= since_s:
                return each
        return None

    def wait(self, lane: Lane, request: Request, since_s: float) -> asyncio.Future[WorkerSpec]:
        """Queue a request; the future resolves to its worker."""
        lane.pool.add(request)
        worker: asyncio.Future[WorkerSpec] = asyncio.get_running_loop().create_future()
        lane.waiters[request.id] = Waiter(worker, since_s)
        self.schedule(lane, hurry=True)
        return worker

    def adopt(self, request: Request, worker_id: str) -> bool:
        """Count a request that an earlier router process has sent to a worker.

        Returns:
            False, without effect, if the worker is gone.
        """
        lane = self.get(request.group)
        if lane is None or worker_id not in lane.group.workers:
            return False
        self._cluster.apply(Arrived(request))
        self._cluster.apply(Dispatched(request.id, worker_id, self._clock()))
        return True

    def take_sent(self, request_id: str) -> float | None:
        return self._sent_s.pop(request_id, None)

    def schedule(self, lane: Lane, *, hurry: bool) -> None:
        """Schedule a round: at the loop's next turn, or once all ranks should have reported."""
        if lane.timer is not None:
            if lane.hurried or not hurry:
                return
            lane.timer.cancel()
        loop = asyncio.get_running_loop()
        lane.hurried = hurry
        if hurry:
            lane.timer = loop.call_soon(self.hold_round, lane)
        else:
            lane.timer = loop.call_later(_BARRIER_SKEW_S, self.hold_round, lane)

    def hold_round(self, lane: Lane) -> None:
        self.incoming.read()
        if lane.timer is not None:
            lane.timer.cancel()
            lane.timer = None
        if self._has_room_behind(lane):
            self._assign(lane)
        if lane.pool:
            self.incoming.hasten()

    def _assign(self, lane: Lane) -> None:
        now = self._clock()
        assignments = lane.decider.decide(now, self._clock)
        for assignment in assignments:
            self._send(lane, assignment, now)
        if assignments:
            self._schedule_prefills(lane)

    def _has_room_behind(self, lane: Lane) -> bool:
        """True if the decode queue can hold all prompts that are being computed."""
        behind = self.behind(lane)
        if behind is None:
            return True
        prefilling = sum(worker.in_flight for worker in lane.group.workers.values())
        return len(behind.pool) + prefilling < self.settings.pool_limit

    def _schedule_prefills(self, lane: Lane) -> None:
        """Schedule prefill rounds: prompts go out one a round, and the decode queue has room."""
        for prefills in (lane, self._lanes.get(prefill_stage(lane.group.name))):
            if prefills is not None and prefills.group.serves is not None and prefills.pool:
                self.schedule(prefills, hurry=True)

    def _send(self, lane: Lane, assignment: Assignment, now: float) -> None:
        request = lane.pool.remove(assignment.request_id)
        waiter = lane.waiters.pop(assignment.request_id)
        assert request is not None
        self._cluster.apply(Dispatched(request.id, assignment.worker_id, now))
        self._sent_s[request.id] = now
        lane.stats.assigned += 1
        lane.stats.estimated += not request.exact
        lane.stats.pool_wait_s.observe(now - waiter.since_s)
        if not waiter.worker.done():  # else its client has just left, and withdraws it next
            waiter.worker.set_result(self._cluster.worker(assignment.worker_id).spec)
