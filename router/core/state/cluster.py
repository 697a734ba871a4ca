"""The router's view of the cluster: a state machine that only events change.

It joins two sources on demand: engines' snapshots (``Feed``), and this router's dispatches that no
snapshot shows yet (``Worker``).
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from router.core.energy.joules import PowerLevels
from router.core.errors import ConfigError
from router.core.events import (
    AnswerEvent,
    Arrived,
    Began,
    CacheTold,
    Dispatched,
    Ended,
    EngineFailed,
    Event,
    Failed,
    FeedStale,
    Fetched,
    GaugesReceived,
    PowerTold,
    Prefilled,
    Progressed,
    PromptCounted,
    Refused,
    RequestEvent,
    RestRequested,
    Returned,
    SnapshotReceived,
    Succeeded,
    WorkerDown,
    WorkerUp,
)
from router.core.request_watcher import RequestWatcher, Served
from router.core.state import guesses
from router.core.state.breaker import DEFAULTS, BreakerSettings
from router.core.state.group import Group
from router.core.state.prefill_worker import PrefillWorker
from router.core.state.worker import Worker
from router.core.step_time import StepTime
from router.core.types import Outcome, Phase, Request, WorkerSpec


@dataclass(slots=True)
class _Tracked:
    """A request from its arrival to its end; ``keeper``: prefill worker that keeps its KV."""

    request: Request
    worker: Worker | None = None
    keeper: PrefillWorker | None = None


class Watcher(RequestWatcher, Protocol):
    """Observer of requests and new workers."""

    def joined(self, group: Group) -> None: ...


class Cluster:
    """All groups and all requests; ``apply`` is the only way to change these.

    Args:
        lockstep: groups that are down as soon as one of their workers is.
        step_time: cost of a step of answering workers; None: each group learns its own.

    Attributes:
        groups: groups by name, those of prefill workers under ``WorkerSpec.stage``.
        step_time: fixed for all groups; None: each learns its own.

    Raises:
        ConfigError: two workers have one id.
    """

    def __init__(
        self,
        specs: Iterable[WorkerSpec],
        lockstep: Collection[str] = (),
        power_levels: PowerLevels | None = None,
        breakers: BreakerSettings = DEFAULTS,
        step_time: StepTime | None = None,
    ) -> None:
        self.groups: dict[str, Group] = {}
        self._group_of: dict[str, Group] = {}
        self._requests: dict[str, _Tracked] = {}
        self.watchers: list[Watcher] = []
        self._lockstep = lockstep
        self.step_time = step_time
        self._make = partial(Group, power_levels=power_levels, breakers=breakers)
        for spec in in_order(specs):
            self.join(spec)

    @property
    def answering(self) -> list[Group]:
        """Groups that answer requests: all but the prefill stages of others."""
        return [group for group in self.groups.values() if group.serves is None]

    def worker(self, worker_id: str) -> Worker:
        return self._group_of[worker_id].workers[worker_id]

    def knows(self, worker_id: str) -> bool:
        return worker_id in self._group_of

    def asks(self, group: str) -> bool:
        """Whether a group can use the ids of a request's content."""
        return self.groups[group].asks_for_content

    def group_of(self, worker_id: str) -> Group:
        return self._group_of[worker_id]

    def phase(self, request_id: str) -> Phase:
        tracked = self._requests.get(request_id)
        if tracked is None:
            return Phase.ENDED
        if self.groups[tracked.request.group].serves is None:
            return Phase.READY if tracked.worker is None else Phase.DECODING
        return Phase.ARRIVED if tracked.worker is None else Phase.PREFILLING

    def prefill_group(self, name: str) -> Group | None:
        group = self.groups.get(name)
        stage = None if group is None else group.prefills
        return stage if stage is not None and stage.workers else None

    def keeps(self, request_id: str) -> bool:
        tracked = self._requests.get(request_id)
        keeper = None if tracked is None else tracked.keeper
        return keeper is not None and keeper.keeps(request_id)

    def energy_j(self, request_id: str) -> float | None:
        tracked = self._requests.get(request_id)
        if tracked is None or tracked.worker is None:
            return None
        return self.groups[tracked.request.group].energy_j(tracked.worker, request_id)

    # Workers.

    def join(self, spec: WorkerSpec) -> None:
        """Add a worker, which is down at first.

        Raises:
            ConfigError: its id is taken, or no worker decodes what it would prefill.
        """
        if spec.id in self._group_of:
            raise ConfigError(f"two workers are called {spec.id!r}: give one of them another id")
        group = self.groups.get(spec.stage)
        if group is None:
            lockstep, serves = spec.stage in self._lockstep, self._served(spec)
            group = self.groups[spec.stage] = self._make(
                spec.stage, lockstep=lockstep, serves=serves
            )
            if serves is None:
                group.fix_step_time(self.step_time)
        group.join(spec)
        self._group_of[spec.id] = group
        for watcher in self.watchers:
            watcher.joined(group)

    def leave(self, worker_id: str) -> None:
        """Remove an empty worker for good; its group stays, with all its sums."""
        self._group_of.pop(worker_id).remove(worker_id)

    def amend(self, spec: WorkerSpec) -> None:
        self._group_of[spec.id].amend(spec)

    def dissolve(self, name: str) -> bool:
        """Delete a decode group and its prefill group.

        True if done: no worker is left, and no request waits.
        """
        group = self.groups[name]
        both = [one for one in (group, group.prefills) if one is not None]
        if group.serves is not None or any(one.workers or one.waiting for one in both):
            return False
        for one in both:
            del self.groups[one.name]
        return True

    def set_lockstep(self, names: Collection[str]) -> None:
        self._lockstep = names
        for group in self.groups.values():
            if group.lockstep != (group.name in names):
                group.set_lockstep(group.name in names)

    def fix_step_time(self, step_time: StepTime | None) -> None:
        """None: each group learns its own."""
        self.step_time = step_time
        for group in self.answering:
            group.fix_step_time(step_time)

    def apply(self, event: Event) -> bool:
        """Apply one event; late events of ended requests are ignored.

        True if it completed a barrier step of its group.
        """
        match event:
            case SnapshotReceived():
                return self._group_of[event.worker_id].receive(event)
            case CacheTold():
                told = event.worker_id, event.cache, event.received_s
                self._group_of[event.worker_id].prefixes.heard(*told, texts=False)
            case Arrived():
                self._wait(event.request)
            case WorkerUp() | WorkerDown() | EngineFailed():
                self._apply_health(event)
            case GaugesReceived():
                worker = self.worker(event.worker_id)
                worker.read(event.gauges, event.received_s)
                guesses.read(self._group_of[event.worker_id].prefixes, worker)
            case FeedStale():
                self._group_of[event.worker_id].lose_feed(event.worker_id)
            case PowerTold():
                self._group_of[event.worker_id].take_power(event)
            case Succeeded() | Failed() | Refused() | RestRequested():
                self._apply_answer(event)
            case _:
                tracked = self._requests.get(event.request_id)
                if tracked is not None:
                    self._apply_request(event, tracked)
        return False

    def _apply_health(self, event: WorkerUp | WorkerDown | EngineFailed) -> None:
        group = self._group_of[event.worker_id]
        match event:
            case WorkerUp():
                group.note_health(event.worker_id, None)
            case WorkerDown():
                group.note_health(event.worker_id, event.reason)
            case _:
                worker = group.workers[event.worker_id]
                worker.breaker.fell()
                if isinstance(worker, PrefillWorker):
                    worker.lose_kept()

    def _apply_answer(self, event: AnswerEvent) -> None:
        """That of a removed worker shows nothing."""
        group = self._group_of.get(event.worker_id)
        if group is None:
            return
        match event:
            case Succeeded():
                group.workers[event.worker_id].breaker.succeeded(event.request_id, event.time_s)
            case Failed():
                group.failed(event.worker_id, event.request_id, event.time_s, suspect=event.suspect)
            case Refused():
                group.workers[event.worker_id].refused(event.request_id)
            case _:
                group.rest(event.worker_id, event.time_s, event.seconds)

    def _apply_request(self, event: RequestEvent, tracked: _Tracked) -> None:
        group = self.groups[tracked.request.group]
        match event:
            case Dispatched():
                self._dispatch(group, tracked, event)
            case Began():
                self._begin(group, tracked, event)
            case Progressed():
                if tracked.worker is not None:
                    group.progress(tracked.worker, tracked.request, event.generated_tokens)
            case PromptCounted():
                if tracked.worker is not None:
                    tracked.worker.count(event)
            case Fetched():
                if tracked.keeper is not None:
                    tracked.keeper.drop(event.request_id)
            case _:
                self._end_stage(group, tracked, event)

    def _dispatch(self, group: Group, tracked: _Tracked, event: Dispatched) -> None:
        tracked.worker = group.workers[event.worker_id]
        group.enter(tracked.worker, tracked.request, event.time_s)
        if tracked.keeper is not None:  # the worker receives its address
            tracked.keeper.hand_out(event.request_id)
        for watcher in self.watchers:
            watcher.dispatched(tracked.request)

    def _begin(self, group: Group, tracked: _Tracked, event: Began) -> None:
        for watcher in self.watchers:
            watcher.first_byte(tracked.request)
        if event.good and tracked.worker is not None:
            tracked.worker.breaker.succeeded(event.request_id, event.time_s)
            group.progress(tracked.worker, tracked.request, 1)  # its prompt is computed

    def _end_stage(
        self, group: Group, tracked: _Tracked, event: Prefilled | Returned | Ended
    ) -> None:
        match event:
            case Prefilled():
                self._leave(group, tracked, event, complete=True)
                self._wait(event.ready, _keeper(tracked.worker, event))
            case Returned():
                self._leave(group, tracked, event, complete=False)
                self._wait(event.again)
            case _:
                complete = event.outcome is Outcome.COMPLETED
                try:
                    served, worker = None, tracked.worker
                    if worker is not None and self.watchers:
                        counts = worker.served(tracked.request.id, complete=complete)
                        served = Served(worker.spec.id, *counts)
                    for watcher in self.watchers:
                        watcher.ended(tracked.request, served, event.outcome)
                finally:  # it has ended even if a watcher fails
                    self._leave(group, tracked, event, complete=complete)

    def _wait(self, request: Request, keeper: PrefillWorker | None = None) -> None:
        self._requests[request.id] = _Tracked(request, keeper=keeper)
        self.groups[request.group].waiting += 1

    def _leave(
        self,
        group: Group,
        tracked: _Tracked,
        event: Prefilled | Returned | Ended,
        *,
        complete: bool,
    ) -> None:
        if tracked.worker is None:
            group.withdraw(tracked.request)
        else:
            group.leave(tracked.worker, tracked.request, complete=complete, now_s=event.time_s)
        if tracked.keeper is not None:
            tracked.keeper.take_back(tracked.request.id)
        del self._requests[tracked.request.id]

    def _served(self, spec: WorkerSpec) -> Group | None:
        if spec.role != "prefill":
            return None
        if spec.group not in self.groups:
            raise ConfigError(
                f"worker {spec.id!r} would compute prompts for group {spec.group!r}, which has no "
                "worker that decodes: add one first"
            )
        return self.groups[spec.group]


def in_order(specs: Iterable[WorkerSpec]) -> list[WorkerSpec]:
    """Decode workers before prefill workers."""
    return sorted(specs, key=lambda spec: spec.role == "prefill")


def _keeper(worker: Worker | None, event: Prefilled) -> PrefillWorker | None:
    if event.kept_until_s is None or not isinstance(worker, PrefillWorker):
        return None
    worker.keep(event.ready.id, event.ready.prompt_tokens, event.kept_until_s)
    return worker
