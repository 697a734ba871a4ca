"""The cluster as the router knows it: a state machine that only events move.

Two sources are kept apart and joined when asked: what each engine says in its snapshots (``Feed``)
and what this router has sent and not yet seen there (``Worker``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from router.barrier import StepLedger, StepShares, StepTotals
from router.errors import ConfigError
from router.forecast import Running
from router.prefill import PrefillWorker
from router.running import RunningTable, joined
from router.signals import Departure
from router.token_rate import TokenRate
from router.types import (
    Arrived,
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
    PoolState,
    Prefilled,
    Progressed,
    PromptCounted,
    Request,
    RequestEvent,
    Returned,
    SnapshotReceived,
    WorkerDown,
    WorkerSpec,
    WorkerUp,
    WorkerView,
    prefill_stage,
)
from router.worker import Worker
from router.workload import DEFAULT_CHUNK


class OwnSteps:
    """Steps of engines that do not tell them, by the output tokens that their requests receive.

    A step yields as many tokens to each request that decodes: so of n of them, a token that one
    receives is an nth of what a step yields. Who decodes is known from its first tokens on, so
    somewhat too many steps are seen where these come several at a time.
    """

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._decoding = 0
        self._tokens_each = 0.0

    def receive(self, request: Request, tokens: int) -> None:
        """A request has received some more tokens, all its engine requests together."""
        if request.id not in self._slots:
            self._slots[request.id] = request.slots
            self._decoding += request.slots
        self._tokens_each += tokens / self._decoding

    def leave(self, request_id: str) -> None:
        """A request no longer decodes, if it has."""
        self._decoding -= self._slots.pop(request_id, 0)

    def take(self, step_tokens: float) -> int:
        """Whole steps since the last ones were taken; what is left over counts the next time."""
        steps = int(self._tokens_each / step_tokens)
        self._tokens_each -= steps * step_tokens
        return steps


class Group:
    """A barrier domain: the workers that serve one model and step together.

    Or those that compute prompts for these; they step each by itself.

    Args:
        name: as configured.
        lockstep: without one of its workers the others cannot step either.
        prefill_chunk: prompt tokens that an engine computes in a step at most.
        serves: the group that its prompts are computed for, None for one that serves answers.

    Attributes:
        waiting: requests that wait for a worker.
        departures: requests that stopped running; whoever reads them clears it.
        token_rate: what a prompt's text comes to in tokens.
    """

    def __init__(
        self,
        name: str,
        *,
        lockstep: bool = False,
        prefill_chunk: int = DEFAULT_CHUNK,
        serves: Group | None = None,
    ) -> None:
        self.name = name
        self.lockstep = lockstep
        self.serves = serves
        self.workers: dict[str, Worker] = {}
        self.waiting = 0
        self.departures: list[Departure] = []
        self.token_rate: TokenRate = TokenRate() if serves is None else serves.token_rate
        self._prefill_chunk = prefill_chunk
        self._table = RunningTable()
        self._ledger = StepLedger()
        self._own_steps = OwnSteps()
        self._fed: set[str] = set()  # live workers with a feed: those that a step waits for

    @property
    def totals(self) -> Mapping[PoolState, StepTotals]:
        """Sums over steps, by whether requests were waiting when the step ended."""
        return self._ledger.totals

    @property
    def prefill_workers(self) -> list[PrefillWorker]:
        """Those of its workers that compute prompts for others: all or none."""
        return [each for each in self.workers.values() if isinstance(each, PrefillWorker)]

    def live_workers(self) -> list[Worker]:
        """Workers that may be given requests, in the order of their configuration."""
        return [worker for worker in self.workers.values() if worker.live]

    def join(self, spec: WorkerSpec) -> None:
        """One more worker."""
        parts = spec, self._table.worker(), self.departures, self.token_rate
        self.workers[spec.id] = (
            Worker(*parts) if self.serves is None else PrefillWorker(*parts, self._prefill_chunk)
        )

    def views(self, dispatch: Dispatch, overcommit: int = 0) -> Sequence[WorkerView]:
        """What a policy sees of the live workers."""
        return [worker.view(dispatch, overcommit) for worker in self.live_workers()]

    def running(self) -> Running:
        """Engine requests that run on the live workers or are on their way, worker by view."""
        live = self.live_workers()
        shown = self._table.running([worker.rows.worker for worker in live])
        unseen = [(i, *row) for i, worker in enumerate(live) for row in worker.foreseen()]
        if not unseen:
            return shown
        worker, number, prompt, generated, cap = np.array(unseen, dtype=np.int64).T
        left = np.where(generated == 0, prompt, 0)
        untold = np.full(len(unseen), np.nan)
        return joined(shown, Running(number, worker, prompt, generated, cap, untold, left))

    def receive(self, event: SnapshotReceived) -> bool:
        """Take in a snapshot; True if all live workers have now reported the step."""
        worker = self.workers[event.worker_id]
        if worker.feed is not None and worker.feed.epoch != event.snapshot.epoch:
            self._ledger.leave(event.worker_id)
        feed = worker.receive(event.snapshot, event.received_s)
        if feed is None or not worker.live or self.serves is not None:
            return False
        state = PoolState.WAITING if self.waiting else PoolState.EMPTY
        shares = StepShares(
            feed.step_load_tokens,
            feed.resident_tokens,
            max(0, worker.slots - feed.step_running),
            feed.step_entered,
        )
        self._ledger.report(event.worker_id, shares, event.snapshot, state)
        self._fed.add(event.worker_id)
        return self._ledger.complete(self._fed, state)

    def progress(self, worker: Worker, request: Request, generated_tokens: int) -> None:
        """A request's stream has shown so many output tokens."""
        new = worker.progress(request.id, generated_tokens)
        if new > 0:
            self._own_steps.receive(request, new)

    def leave(self, worker: Worker, request: Request, *, complete: bool) -> None:
        """A request is no longer on a worker."""
        worker.remove(request.id, complete=complete)
        self._own_steps.leave(request.id)

    def own_steps(self, step_tokens: float) -> int:
        """Steps since this was asked last by own counts; none where a live worker has a feed."""
        steps = self._own_steps.take(step_tokens)
        return 0 if steps and any(worker.feed for worker in self.live_workers()) else steps

    def note_health(self, worker_id: str, trouble: str | None) -> None:
        """A worker's engine is healthy, or why it is not; in lockstep that concerns all."""
        self.workers[worker_id].trouble = trouble
        sick = [worker for worker in self.workers.values() if worker.trouble is not None]
        for worker in self.workers.values():
            was_live, worker.down_reason = worker.live, worker.trouble
            if self.lockstep and sick and worker.trouble is None:
                worker.down_reason = f"in lockstep with {sick[0].spec.id}: {sick[0].trouble}"
            if not worker.live and (was_live or worker.spec.id == worker_id):
                self.lose_feed(worker.spec.id)
                worker.foreign.clear()

    def lose_feed(self, worker_id: str) -> None:
        """The worker's snapshots no longer count."""
        self.workers[worker_id].lose_feed()
        self._ledger.leave(worker_id)
        self._fed.discard(worker_id)


@dataclass(slots=True)
class _Tracked:
    """A request from its arrival to its end.

    ``worker`` while it is on one; ``keeper`` has computed its prompt, and kept the KV.
    """

    request: Request
    worker: Worker | None = None
    keeper: PrefillWorker | None = None

    def go_to(self, worker: Worker) -> None:
        """It is sent to a worker, which is told of its KV if it has been kept."""
        self.worker = worker
        worker.add(self.request)
        if self.keeper is not None:
            self.keeper.hand_out(self.request.id)


class Cluster:
    """All groups and all requests; ``apply`` is the only way to change them.

    Args:
        specs: the workers.
        lockstep: groups that are down as soon as one of their workers is.
        prefill_chunk: prompt tokens that an engine computes in a step at most.

    Attributes:
        groups: by name; those of prefill workers too, under ``types.prefill_stage``.

    Raises:
        ConfigError: two workers of one id.
    """

    def __init__(
        self,
        specs: Iterable[WorkerSpec],
        lockstep: Collection[str] = (),
        prefill_chunk: int = DEFAULT_CHUNK,
    ) -> None:
        self.groups: dict[str, Group] = {}
        self._group_of: dict[str, Group] = {}
        self._requests: dict[str, _Tracked] = {}
        for spec in sorted(specs, key=lambda spec: spec.role == "prefill"):
            self._join(spec, lockstep, prefill_chunk)

    def worker(self, worker_id: str) -> Worker:
        """The worker of that id."""
        return self._group_of[worker_id].workers[worker_id]

    def group_of(self, worker_id: str) -> Group:
        """The group that a worker belongs to."""
        return self._group_of[worker_id]

    def phase(self, request_id: str) -> Phase:
        """Where a request stands; one that is not known has ended."""
        tracked = self._requests.get(request_id)
        if tracked is None:
            return Phase.ENDED
        if self.groups[tracked.request.group].serves is None:
            return Phase.READY if tracked.worker is None else Phase.DECODING
        return Phase.ARRIVED if tracked.worker is None else Phase.PREFILLING

    def prefill_group(self, name: str) -> Group | None:
        """The prefill workers of a group, None if it has none."""
        return self.groups.get(prefill_stage(name))

    def keeps(self, request_id: str) -> bool:
        """Whether a prefill worker keeps a request's KV for it."""
        tracked = self._requests.get(request_id)
        keeper = None if tracked is None else tracked.keeper
        return keeper is not None and keeper.keeps(request_id)

    def apply(self, event: Event) -> bool:
        """Move the state by one event.

        Events of requests that have ended are ignored: they come late.

        Returns:
            True if the event completed a barrier step of its group.
        """
        match event:
            case SnapshotReceived():
                return self._group_of[event.worker_id].receive(event)
            case Arrived():
                self._wait(event.request)
            case WorkerUp() | WorkerDown() | EngineFailed():
                self._apply_health(event)
            case GaugesReceived():
                self.worker(event.worker_id).read(event.gauges, event.received_s)
            case FeedStale():
                self._group_of[event.worker_id].lose_feed(event.worker_id)
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
                if isinstance(worker, PrefillWorker):
                    worker.lose_kept()

    def _apply_request(self, event: RequestEvent, tracked: _Tracked) -> None:
        group = self.groups[tracked.request.group]
        match event:
            case Dispatched():
                group.waiting -= 1
                tracked.go_to(self.worker(event.worker_id))
            case Progressed():
                if tracked.worker is not None:
                    group.progress(tracked.worker, tracked.request, event.generated_tokens)
            case PromptCounted():
                if tracked.worker is not None:
                    tracked.worker.count_prompt(event.request_id, event.prompt_tokens)
            case Fetched():
                if tracked.keeper is not None:
                    tracked.keeper.drop(event.request_id)
            case _:
                self._end_stage(group, tracked, event)

    def _end_stage(
        self, group: Group, tracked: _Tracked, event: Prefilled | Returned | Ended
    ) -> None:
        match event:
            case Prefilled():
                self._leave(group, tracked, complete=True)
                self._wait(event.ready, _keeper(tracked.worker, event))
            case Returned():
                self._leave(group, tracked, complete=False)
                self._wait(event.again)
            case _:
                self._leave(group, tracked, complete=event.outcome is Outcome.COMPLETED)

    def _wait(self, request: Request, keeper: PrefillWorker | None = None) -> None:
        self._requests[request.id] = _Tracked(request, keeper=keeper)
        self.groups[request.group].waiting += 1

    def _leave(self, group: Group, tracked: _Tracked, *, complete: bool) -> None:
        """A request ends, or goes on under another id."""
        if tracked.worker is None:
            group.waiting -= 1
        else:
            group.leave(tracked.worker, tracked.request, complete=complete)
        if tracked.keeper is not None:
            tracked.keeper.take_back(tracked.request.id)
        del self._requests[tracked.request.id]

    def _join(self, spec: WorkerSpec, lockstep: Collection[str], prefill_chunk: int) -> None:
        if spec.id in self._group_of:
            raise ConfigError(f"two workers are called {spec.id!r}: give one of them another id")
        group = self.groups.get(spec.stage)
        if group is None:
            group = self.groups[spec.stage] = Group(
                spec.stage,
                lockstep=spec.stage in lockstep,
                prefill_chunk=prefill_chunk,
                serves=self._served(spec),
            )
        group.join(spec)
        self._group_of[spec.id] = group

    def _served(self, spec: WorkerSpec) -> Group | None:
        """The group that a prefill worker computes prompts for, None for another worker."""
        return self.groups[spec.group] if spec.role == "prefill" else None


def _keeper(worker: Worker | None, event: Prefilled) -> PrefillWorker | None:
    """Who keeps the KV of a prompt that is computed, if it has to be kept."""
    if event.kept_until_s is None or not isinstance(worker, PrefillWorker):
        return None
    worker.keep(event.ready.id, event.ready.prompt_tokens, event.kept_until_s)
    return worker
