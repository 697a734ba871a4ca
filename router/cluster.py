"""The cluster as the router knows it: a state machine that only events move.

Two sources are kept apart and joined when asked: what each engine says in its snapshots (``Feed``)
and what this router has sent and not yet seen there (``Worker``). A dispatch is therefore never
forgotten between its sending and the first snapshot that shows it, however stale that one is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from router.barrier import StepLedger
from router.errors import ConfigError
from router.feed import Feed
from router.types import (
    DEFAULT_SLOTS,
    Arrived,
    Dispatch,
    Dispatched,
    Ended,
    Event,
    FeedStale,
    Outcome,
    Phase,
    PoolState,
    Progressed,
    Request,
    Returned,
    Snapshot,
    SnapshotReceived,
    StepTotals,
    WorkerDown,
    WorkerSpec,
    WorkerUp,
    WorkerView,
)

UNBOUNDED = 1 << 30


@dataclass(slots=True)
class _InFlight:
    """A dispatched request, and how many of its engine requests have ended."""

    request: Request
    finished: int = 0
    generated_tokens: int = 0


class Worker:
    """One worker: its engine's feed, if it has one, and this router's requests on it.

    Attributes:
        live: may be given requests.
        down_reason: why not, while it is not live.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.live = False
        self.down_reason: str | None = "not checked yet"
        self.feed: Feed | None = None
        self.gaps = 0
        self._in_flight: dict[str, _InFlight] = {}

    @property
    def slots(self) -> int:
        """Engine requests that run at once: as configured, else as reported, else a default."""
        return self.spec.slots or (self.feed.slots if self.feed else 0) or DEFAULT_SLOTS

    @property
    def in_flight(self) -> int:
        """This router's requests that were sent here and have not ended."""
        return len(self._in_flight)

    @property
    def load_tokens(self) -> int:
        """KV tokens: running as the engine says, plus those of dispatches that it has not shown."""
        unseen = sum(
            parts * flight.request.prompt_tokens + flight.generated_tokens
            for flight, parts in self._unseen()
        )
        return unseen + (self.feed.load_tokens if self.feed else 0)

    @property
    def requests(self) -> int:
        """Engine requests running, queued in the engine, or on their way."""
        unseen = sum(parts for _, parts in self._unseen())
        if self.feed is None:
            return unseen
        return self.feed.running + max(unseen, self.feed.waiting)

    @property
    def free_slots(self) -> int:
        """Engine requests that would start at the next step."""
        return max(0, self.slots - self.requests)

    def receive(self, snapshot: Snapshot, received_s: float) -> Feed | None:
        """Take in a snapshot; None if it came late and changed nothing, else the feed."""
        feed = self.feed = self.feed or Feed()
        ended = feed.apply(snapshot, received_s)
        if ended is None:
            return None
        for token in ended:
            if token in self._in_flight:
                self._in_flight[token].finished += 1
        return feed

    def lose_feed(self) -> None:
        """Go on by own counts, from what the feed showed last."""
        if self.feed is None:
            return
        for token, flight in self._in_flight.items():
            flight.generated_tokens = self.feed.generated_by_token(token)
        self.gaps += self.feed.gaps
        self.feed = None

    def add(self, request: Request) -> None:
        """Count a request that is on its way here."""
        self._in_flight[request.id] = _InFlight(request)

    def progress(self, request_id: str, generated_tokens: int) -> None:
        """Output tokens of a request, where no feed tells them."""
        if self.feed is None:
            self._in_flight[request_id].generated_tokens = generated_tokens

    def remove(self, request_id: str, *, complete: bool) -> None:
        """Stop counting a request; an incomplete one counts until the engine has dropped it."""
        del self._in_flight[request_id]
        if complete and self.feed is not None:
            self.feed.forget(request_id)

    def view(self, dispatch: Dispatch) -> WorkerView:
        """What a policy sees of it."""
        requests = self.requests
        free = max(0, self.slots - requests)
        return WorkerView(
            id=self.spec.id,
            load_tokens=self.load_tokens,
            requests=requests,
            capacity=free if dispatch is Dispatch.POOL else UNBOUNDED,
        )

    def _unseen(self) -> Iterable[tuple[_InFlight, int]]:
        running: Mapping[str, int] = self.feed.running_by_token if self.feed else {}
        for token, flight in self._in_flight.items():
            parts = flight.request.slots - flight.finished - running.get(token, 0)
            if parts > 0:
                yield flight, parts


class Group:
    """A barrier domain: the workers that serve one model and step together.

    Attributes:
        waiting: requests that wait for a worker.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.workers: dict[str, Worker] = {}
        self.waiting = 0
        self._ledger = StepLedger()

    @property
    def totals(self) -> Mapping[PoolState, StepTotals]:
        """Sums over steps, by whether requests were waiting when the step ended."""
        return self._ledger.totals

    def live_workers(self) -> list[Worker]:
        """Workers that may be given requests, in the order of their configuration."""
        return [worker for worker in self.workers.values() if worker.live]

    def views(self, dispatch: Dispatch) -> Sequence[WorkerView]:
        """What a policy sees of the live workers."""
        return [worker.view(dispatch) for worker in self.live_workers()]

    def receive(self, event: SnapshotReceived) -> bool:
        """Take in a snapshot; True if all live workers have now reported the step."""
        worker = self.workers[event.worker_id]
        if worker.feed is not None and worker.feed.epoch != event.snapshot.epoch:
            self._ledger.leave(event.worker_id)
        feed = worker.receive(event.snapshot, event.received_s)
        if feed is None or not worker.live:
            return False
        state = PoolState.WAITING if self.waiting else PoolState.EMPTY
        self._ledger.report(
            event.worker_id, feed.step_load_tokens, feed.resident_tokens, event.snapshot, state
        )
        fed = [i for i, other in self.workers.items() if other.live and other.feed]
        return self._ledger.complete(fed, state)

    def lose_feed(self, worker_id: str) -> None:
        """The worker's snapshots no longer count."""
        self.workers[worker_id].lose_feed()
        self._ledger.leave(worker_id)


@dataclass(slots=True)
class _Tracked:
    """A request from its arrival to its end; ``worker`` while it is on one."""

    request: Request
    worker: Worker | None = None


class Cluster:
    """All groups and all requests; ``apply`` is the only way to change them.

    Raises:
        ConfigError: two workers of one id.
    """

    def __init__(self, specs: Iterable[WorkerSpec]) -> None:
        self.groups: dict[str, Group] = {}
        self._group_of: dict[str, Group] = {}
        self._requests: dict[str, _Tracked] = {}
        for spec in specs:
            self._join(spec)

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
        return Phase.READY if tracked.worker is None else Phase.DECODING

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
                self._requests[event.request.id] = _Tracked(event.request)
                self.groups[event.request.group].waiting += 1
            case WorkerUp() | WorkerDown() | FeedStale():
                self._apply_health(event)
            case _:
                tracked = self._requests.get(event.request_id)
                if tracked is not None:
                    self._apply_request(event, tracked)
        return False

    def _apply_health(self, event: WorkerUp | WorkerDown | FeedStale) -> None:
        worker = self.worker(event.worker_id)
        if isinstance(event, WorkerUp):
            worker.live, worker.down_reason = True, None
            return
        if isinstance(event, WorkerDown):
            worker.live, worker.down_reason = False, event.reason
        self._group_of[event.worker_id].lose_feed(event.worker_id)

    def _apply_request(
        self, event: Dispatched | Progressed | Returned | Ended, tracked: _Tracked
    ) -> None:
        group = self.groups[tracked.request.group]
        match event:
            case Dispatched():
                group.waiting -= 1
                tracked.worker = self.worker(event.worker_id)
                tracked.worker.add(tracked.request)
            case Progressed():
                if tracked.worker is not None:
                    tracked.worker.progress(event.request_id, event.generated_tokens)
            case Returned():
                self._leave_worker(tracked, complete=False)
                group.waiting += 1
            case _:
                if tracked.worker is None:
                    group.waiting -= 1
                self._leave_worker(tracked, complete=event.outcome is Outcome.COMPLETED)
                del self._requests[event.request_id]

    def _leave_worker(self, tracked: _Tracked, *, complete: bool) -> None:
        if tracked.worker is not None:
            tracked.worker.remove(tracked.request.id, complete=complete)
            tracked.worker = None

    def _join(self, spec: WorkerSpec) -> None:
        if spec.id in self._group_of:
            raise ConfigError(f"two workers are called {spec.id!r}: give one of them another id")
        group = self.groups.setdefault(spec.group, Group(spec.group))
        group.workers[spec.id] = Worker(spec)
        self._group_of[spec.id] = group
