"""The router's view of the cluster: a state machine that only events change.

It joins two sources on demand: engines' snapshots (``Feed``), and this router's dispatches that no
snapshot shows yet (``Worker``).
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial

from router.core import events as ev
from router.core.energy.joules import PowerLevels
from router.core.errors import ConfigError
from router.core.request_watcher import Served, Watcher
from router.core.state import guesses
from router.core.state.breaker import DEFAULTS, BreakerSettings
from router.core.state.group import Group
from router.core.state.prefill_worker import PrefillWorker
from router.core.state.worker import Worker
from router.core.step_time import StepTime
from router.core.types import Outcome, Request, Sight, WorkerSpec


@dataclass(slots=True)
class _Tracked:
    """A request from its arrival to its end; ``keeper``: prefill worker that keeps its KV."""

    request: Request
    worker: Worker | None = None
    keeper: PrefillWorker | None = None


class Cluster:
    """All groups and all requests; ``apply`` is the only way to change these.

    Args:
        specs: decode workers first; ConfigError: two workers have one id.
        lockstep: groups that are down as soon as one of their workers is; ``NAME=no`` never is. The
            others are if their engines tell so.
        step_time: cost of a step of answering workers; None: each group learns its own.
    """

    def __init__(
        self,
        specs: Iterable[WorkerSpec],
        lockstep: Collection[str] = (),
        power_levels: PowerLevels | None = None,
        breakers: BreakerSettings = DEFAULTS,
        step_time: StepTime | None = None,
    ) -> None:
        # Groups by name, those of prefill workers under ``WorkerSpec.stage``.
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
        return [group for group in self.groups.values() if group.serves is None]

    def worker(self, worker_id: str) -> Worker:
        return self._group_of[worker_id].workers[worker_id]

    def group_of(self, worker_id: str) -> Group:
        return self._group_of[worker_id]

    def at(self, request: Request) -> Group | None:
        """Where it is: its group, or another one that serves the same requests."""
        tracked = self._requests.get(request.id)
        return self.groups.get(request.group if tracked is None else tracked.request.group)

    def move(self, request: Request, group: str) -> None:
        """A waiting request counts at another group of its line."""
        tracked = self._requests[request.id]
        if tracked.request.group != group:
            tracked.request = replace(tracked.request, group=group)

    def knows(self, request_id: str) -> bool:
        """Whether it has come, and has not ended."""
        return request_id in self._requests

    def prefill_group(self, name: str) -> Group | None:
        group = self.groups.get(name)
        stage = None if group is None else group.prefills
        return stage if stage is not None and stage.workers else None

    def keeps(self, request_id: str) -> bool:
        tracked = self._requests.get(request_id)
        keeper = None if tracked is None else tracked.keeper
        return keeper is not None and keeper.keeps(request_id)

    def sight(self, request_id: str) -> Sight:
        """Of a request that was dispatched; ENDED too if it is not known any more."""
        tracked = self._requests.get(request_id)
        if tracked is None or tracked.worker is None:
            return Sight.ENDED
        return tracked.worker.sight(request_id)

    def energy_j(self, request_id: str) -> float | None:
        tracked = self._requests.get(request_id)
        if tracked is None or tracked.worker is None:
            return None
        energy = self.groups[tracked.request.group].energy
        return energy.of_request(tracked.worker.spec.id, request_id)

    # Workers.

    def join(self, spec: WorkerSpec) -> None:
        """Add a worker, down at first; ConfigError: its id is taken, or it has no decode group."""
        if spec.id in self._group_of:
            raise ConfigError(f"two workers are called {spec.id!r}: give one of them another id")
        group, serves = self.groups.get(spec.stage), None
        if group is None:
            if spec.role == "prefill" and (serves := self.groups.get(spec.group)) is None:
                raise ConfigError(
                    f"worker {spec.id!r} would compute prompts for group {spec.group!r}, which has "
                    "no worker that decodes: add one first"
                )
            lockstep = self._imposed(spec.stage) if serves is None else False
            group = self._make(spec.stage, lockstep=lockstep, serves=serves)
            self.groups[spec.stage] = group
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
        """Delete a decode group with its prefill group, if no worker is left and none waits."""
        group = self.groups[name]
        both = [one for one in (group, group.prefills) if one is not None]
        if group.serves is not None or any(one.workers or one.line.waiting for one in both):
            return False
        for one in both:
            del self.groups[one.name]
        return True

    def set_lockstep(self, names: Collection[str]) -> None:
        self._lockstep = names
        for group in self.answering:
            group.set_lockstep(self._imposed(group.name))

    def _imposed(self, group: str) -> bool | None:
        return False if f"{group}=no" in self._lockstep else group in self._lockstep or None

    def fix_step_time(self, step_time: StepTime | None) -> None:
        self.step_time = step_time
        for group in self.answering:
            group.fix_step_time(step_time)

    def apply(self, event: ev.Event) -> bool:
        """True if the event completed a barrier step; late events of ended requests are ignored."""
        match event:
            case ev.SnapshotReceived():
                return self._receive(event)
            case ev.CacheTold():
                told = event.worker_id, event.cache, event.received_s
                self._group_of[event.worker_id].prefixes.heard(*told, texts=False)
            case ev.Arrived():
                self._wait(event.request)
            case ev.WorkerUp() | ev.WorkerDown():
                trouble = event.reason if isinstance(event, ev.WorkerDown) else None
                self._group_of[event.worker_id].note_health(event.worker_id, trouble)
            case ev.GaugesReceived():
                worker = self.worker(event.worker_id)
                worker.read(event.gauges, event.received_s)
                guesses.read(self._group_of[event.worker_id].prefixes, worker)
            case ev.FeedStale():
                self._group_of[event.worker_id].lose_feed(event.worker_id)
            case ev.PowerTold():
                self._group_of[event.worker_id].take_power(event)
            case (
                ev.EngineFailed() | ev.Succeeded() | ev.Failed() | ev.Refused() | ev.RestRequested()
            ):
                self._apply_result(event)
            case _:
                self._apply_request(event)
        return False

    def _receive(self, event: ev.SnapshotReceived) -> bool:
        group = self._group_of[event.worker_id]
        group.workers[event.worker_id].unreported = event.snapshot.unreported
        if event.snapshot.kind != "stateless":
            return group.receive(event)
        group.lose_feed(event.worker_id)
        return False

    def _apply_result(self, event: ev.EngineFailed | ev.AnswerEvent) -> None:
        """That of a removed worker shows nothing."""
        group = self._group_of.get(event.worker_id)
        if group is None:
            return
        match event:
            case ev.EngineFailed():
                group.workers[event.worker_id].engine_failed()
            case ev.Succeeded():
                group.workers[event.worker_id].breaker.succeeded(event.request_id, event.time_s)
            case ev.Failed():
                group.failed(event.worker_id, event.request_id, event.time_s, suspect=event.suspect)
            case ev.Refused():
                group.workers[event.worker_id].refused(event.request_id)
            case _:
                group.watched(event.worker_id).rest(event.time_s, event.seconds)

    def _apply_request(self, event: ev.RequestEvent) -> None:
        tracked = self._requests.get(event.request_id)
        if tracked is None:
            return
        group = self.groups[tracked.request.group]
        match event:
            case ev.Dispatched():
                self._dispatch(tracked, event)
            case ev.Began():
                self._begin(group, tracked, event)
            case ev.Carried() | ev.Progressed() | ev.PromptCounted():
                if tracked.worker is not None:
                    self._note_part(group, tracked.worker, tracked.request, event)
            case ev.Fetched():
                if tracked.keeper is not None:
                    tracked.keeper.drop(event.request_id)
            case _:
                self._end_stage(group, tracked, event)

    def _note_part(
        self,
        group: Group,
        worker: Worker,
        request: Request,
        event: ev.Carried | ev.Progressed | ev.PromptCounted,
    ) -> None:
        match event:
            case ev.Carried():
                group.computed(worker, request, event.time_s)
            case ev.Progressed():
                group.progress(worker, request, event.generated_tokens)
            case _:
                worker.count(event)

    def _dispatch(self, tracked: _Tracked, event: ev.Dispatched) -> None:
        group = self._group_of[event.worker_id]
        if group.name != tracked.request.group:  # one of those that serve the same requests
            tracked.request = replace(tracked.request, group=group.name)
        tracked.worker = group.workers[event.worker_id]
        group.enter(tracked.worker, tracked.request, event.time_s)
        if tracked.keeper is not None:  # the worker receives its address
            tracked.keeper.hand_out(event.request_id)
        for watcher in self.watchers:
            watcher.dispatched(tracked.request)

    def _begin(self, group: Group, tracked: _Tracked, event: ev.Began) -> None:
        for watcher in self.watchers:
            watcher.first_byte(tracked.request, event.time_s)
        if event.good and tracked.worker is not None:
            tracked.worker.breaker.succeeded(event.request_id, event.time_s)
            group.computed(tracked.worker, tracked.request, event.time_s)
            group.progress(tracked.worker, tracked.request, 1)

    def _end_stage(
        self, group: Group, tracked: _Tracked, event: ev.Prefilled | ev.Returned | ev.Ended
    ) -> None:
        match event:
            case ev.Prefilled():
                self._leave(group, tracked, event, complete=True)
                keeper = tracked.worker if isinstance(tracked.worker, PrefillWorker) else None
                if event.kept_until_s is None or keeper is None:
                    self._wait(event.ready)
                else:
                    keeper.keep(event.ready.id, event.ready.prompt_tokens, event.kept_until_s)
                    self._wait(event.ready, keeper)
            case ev.Returned():
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
        self.groups[request.group].line.waiting += 1

    def _leave(
        self,
        group: Group,
        tracked: _Tracked,
        event: ev.Prefilled | ev.Returned | ev.Ended,
        *,
        complete: bool,
    ) -> None:
        if tracked.worker is None:
            group.withdraw(tracked.request)
        else:
            if isinstance(event, ev.Prefilled):
                group.computed(tracked.worker, tracked.request, event.time_s)
            group.leave(tracked.worker, tracked.request, complete=complete, now_s=event.time_s)
        if tracked.keeper is not None:
            tracked.keeper.take_back(tracked.request.id)
        del self._requests[tracked.request.id]


def in_order(specs: Iterable[WorkerSpec]) -> list[WorkerSpec]:
    """Decode workers before prefill workers."""
    return sorted(specs, key=lambda spec: spec.role == "prefill")
