"""A barrier domain: the workers of one model that step together, and what they have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

import numpy as np

from router.barrier import StepLedger, StepShares, StepTotals
from router.breaker import DEFAULTS, Breaker, BreakerSettings, may_open, review
from router.energy.joules import Joules, PowerLevels
from router.energy.levels import LevelFit
from router.forecast import Running
from router.prefill import PrefillWorker
from router.running import RunningTable, joined
from router.service_rate import GroupRates
from router.signals import Departure
from router.step_watch import ClosedStep, Said
from router.token_rate import TokenRate
from router.types import (
    PAUSED,
    Dispatch,
    PoolState,
    PowerTold,
    Request,
    SnapshotReceived,
    WorkerSpec,
    WorkerView,
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
        power_levels: calibrated power of a worker's GPUs; None: not calibrated.
        breakers: when its workers are ejected.

    Attributes:
        waiting: requests that wait for a worker.
        held: slots in use on its workers, by the requests' tenants.
        departures: requests that stopped running; whoever reads them clears it.
        token_rate: what a prompt's text comes to in tokens.
        ejections: times that a worker was ejected since it failed requests.
    """

    def __init__(
        self,
        name: str,
        *,
        lockstep: bool = False,
        prefill_chunk: int = DEFAULT_CHUNK,
        serves: Group | None = None,
        power_levels: PowerLevels | None = None,
        breakers: BreakerSettings = DEFAULTS,
    ) -> None:
        self.name = name
        self.lockstep = lockstep
        self.serves = serves
        self.workers: dict[str, Worker] = {}
        self.waiting = 0
        self.held: Counter[str] = Counter()
        self.departures: list[Departure] = []
        self.token_rate: TokenRate = TokenRate() if serves is None else serves.token_rate
        self._prefill_chunk = prefill_chunk
        self._table = RunningTable()
        self._ledger = StepLedger(power_levels)
        self._own_steps = OwnSteps()
        self._fed: set[str] = set()  # live workers with a feed: those that a step waits for
        self._newcomers: set[str] = set()  # came to live workers, and have not been live yet
        self._gone_gaps = self._gone_preemptions = 0  # of workers that have left
        self.ejections = 0
        self._breakers = breakers
        self._rates = GroupRates()
        self._watched: set[str] = set()  # workers whose breakers may hold requests back

    @property
    def totals(self) -> Mapping[PoolState, StepTotals]:
        """Sums over steps, by whether requests were waiting when the step ended."""
        return self._ledger.totals

    @property
    def every_step(self) -> StepTotals:
        """Sums over all steps."""
        return sum(self.totals.values(), StepTotals())

    @property
    def barrier(self) -> bool | None:
        """Its workers wait for each other, as their steps show or lockstep says; None: unknown."""
        shown = self._ledger.barrier
        return True if shown is None and self.lockstep else shown

    @property
    def gaps(self) -> int:
        """Snapshots known to be lost."""
        every = self.workers.values()
        return self._gone_gaps + sum(w.gaps + (w.feed.gaps if w.feed else 0) for w in every)

    @property
    def preemptions(self) -> int:
        """Times that engines took a running request's KV away, as far as feeds showed it."""
        every = self.workers.values()
        return self._gone_preemptions + sum(
            w.preemptions + (w.feed.preemptions if w.feed else 0) for w in every
        )

    @property
    def joules(self) -> Joules:
        """What its workers' energy was spent on."""
        return self._ledger.energy.joules

    @property
    def level_fit(self) -> LevelFit:
        """What its workers' meters say of their power at rest, waiting and computing."""
        return self._ledger.energy.level_fit

    @property
    def prefill_workers(self) -> list[PrefillWorker]:
        """Those of its workers that compute prompts for others: all or none."""
        return [each for each in self.workers.values() if isinstance(each, PrefillWorker)]

    @property
    def most_slots(self) -> int | None:
        """Slots of the largest engine, as reported; None: not all of them report theirs now."""
        told = [worker.feed.slots if worker.feed else 0 for worker in self.workers.values()]
        return max(told) if told and all(told) else None

    def live_workers(self) -> list[Worker]:
        """Workers whose engines can be used, in the order in which they joined."""
        return [worker for worker in self.workers.values() if worker.live]

    @property
    def serving(self) -> bool:
        """Some worker may be given requests."""
        return any(worker.takes for worker in self.workers.values())

    @property
    def paused(self) -> bool:
        """Some worker's engine is paused: it is expected to go on before long."""
        return any(worker.trouble == PAUSED for worker in self.workers.values())

    def join(self, spec: WorkerSpec) -> None:
        """One more worker; in lockstep it holds nobody back before it has been live once."""
        if self.live_workers():
            self._newcomers.add(spec.id)
        parts = spec, self._table.worker(), self.departures, self.token_rate
        self.workers[spec.id] = (
            Worker(*parts) if self.serves is None else PrefillWorker(*parts, self._prefill_chunk)
        )
        self.workers[spec.id].breaker = Breaker(self._breakers)
        self.workers[spec.id].service = self._rates.join(spec.service_rate)

    def amend(self, spec: WorkerSpec) -> None:
        """A worker has other slots, endpoints of its state, or another planned rate."""
        worker = self.workers[spec.id]
        worker.spec = spec
        self._rates.amend(worker.service, spec.service_rate)

    def remove(self, worker_id: str) -> None:
        """A worker that is empty goes for good; what it has added to the sums stays."""
        self.lose_feed(worker_id)
        worker = self.workers.pop(worker_id)
        self._rates.leave(worker.service)
        assert worker.empty
        self._gone_gaps += worker.gaps
        self._gone_preemptions += worker.preemptions
        self._ledger.forget_worker(worker_id)
        self._table.release(worker.rows.worker)
        self._newcomers.discard(worker_id)
        self._watched.discard(worker_id)
        self._settle_health()

    def set_lockstep(self, lockstep: bool) -> None:
        """Whether the others can step without one of its workers, from now on."""
        self.lockstep = lockstep
        self._settle_health()

    # breakers

    @property
    def askable(self) -> Set[str]:
        """Workers that take requests, if not right now."""
        return {i for i, w in self.workers.items() if w.takes and not w.breaker.ejected}

    def review(self, now_s: float) -> bool:
        """Time has passed; whether a breaker has been holding requests back."""
        if not self._watched:
            return False
        review([worker.breaker for worker in self.workers.values() if worker.takes], now_s)
        self._watched = {i for i in self._watched if not self.workers[i].breaker.calm}
        return True

    def failed(self, worker_id: str, attempt: str, now_s: float, *, suspect: bool) -> None:
        """A worker has failed a request; all that break with one that goes down are one failure."""
        worker = self.workers[worker_id]
        if worker.live:
            others = [w.breaker for w in self.workers.values() if w.takes and w is not worker]
            may = may_open(others, self._breakers.max_ejected)
            ejected = worker.breaker.failed(attempt, now_s, suspect=suspect, may_open=may)
            self.ejections += ejected
            self._watched.add(worker_id)

    def rest(self, worker_id: str, now_s: float, seconds: float) -> None:
        """A worker asks to be given nothing for so long."""
        self.workers[worker_id].breaker.rest(now_s, seconds)
        self._watched.add(worker_id)

    def rose(self, worker_id: str, now_s: float) -> None:
        """A worker's engine is healthy; after a failure it starts slowly."""
        self.workers[worker_id].breaker.rose(now_s)
        self._watched.add(worker_id)

    def views(self, dispatch: Dispatch, overcommit: int = 0) -> Sequence[WorkerView]:
        """What a policy sees of the live workers."""
        return [worker.view(dispatch, overcommit) for worker in self.live_workers()]

    def versions(self) -> Sequence[int]:
        """Of each live worker, another one whenever anything of its engine requests has changed."""
        return [worker.rows.version for worker in self.live_workers()]

    def running(self, places: Iterable[int] | None = None) -> Running:
        """Engine requests that run on the live workers or are on their way, worker by view.

        Args:
            places: only those of the workers at these places, which are numbered in this order.
        """
        live = self.live_workers()
        if places is not None:
            live = [live[place] for place in places]
        shown = self._table.running([worker.rows.worker for worker in live])
        unseen = [(i, *row) for i, worker in enumerate(live) for row in worker.foreseen()]
        if not unseen:
            return shown
        worker, number, prompt, generated, cap, seen = np.array(unseen, dtype=np.int64).T
        left = np.where(generated == 0, prompt, 0)
        untold = np.full(len(unseen), np.nan)
        return joined(shown, Running(number, worker, prompt, generated, cap, untold, left, seen))

    def receive(self, event: SnapshotReceived) -> bool:
        """Take in a snapshot; True if all live workers have now reported the step."""
        worker = self.workers[event.worker_id]
        if worker.feed is None or worker.feed.epoch != event.snapshot.epoch:
            self._ledger.leave(event.worker_id)
        snapshot = worker.metered(event.snapshot, event.received_s)
        feed = worker.receive(snapshot, event.received_s)
        if feed is None or not feed.known or not worker.live:
            return False
        if self.serves is not None:
            self._ledger.energy.alone(event.worker_id, snapshot, idle=not feed.resident_tokens)
            return False
        state = PoolState.WAITING if self.waiting else PoolState.EMPTY
        shares = StepShares(
            feed.step_load_tokens,
            feed.resident_tokens,
            worker.open_slots(feed.step_running),
            feed.step_entered,
            feed.step_running,
            feed.step_asked,
        )
        self._ledger.report(event.worker_id, shares, snapshot, state)
        self._fed.add(event.worker_id)
        return self._ledger.complete(self._fed, state)

    def take_power(self, told: PowerTold) -> None:
        """A worker's agent has spoken; of a worker with a feed its next snapshot carries it."""
        worker = self.workers[told.worker_id]
        worker.power = told
        if worker.feed is None:
            self._ledger.energy.told(told.worker_id, told, idle=worker.live and not worker.requests)

    def energy_j(self, worker: Worker, request_id: str) -> float | None:
        """What a request that asks for it has used on a worker so far; None: not known."""
        return self._ledger.energy.of_request(worker.spec.id, request_id)

    def watch(self, on_step: Callable[[ClosedStep], None] | None) -> None:
        """Have each step told as it closes, from now on; None: no more."""
        feeds = {i: worker.feed for i, worker in self.workers.items() if worker.feed is not None}
        said = {i: Said(feed.step_running, feed.waiting, feed.power_w) for i, feed in feeds.items()}
        self._ledger.watch(on_step, said)

    def progress(self, worker: Worker, request: Request, generated_tokens: int) -> None:
        """A request's stream has shown so many output tokens."""
        new = worker.progress(request.id, generated_tokens)
        if new > 0:
            self._own_steps.receive(request, new)

    def enter(self, request: Request) -> None:
        """A request that waited has been given to one of the workers."""
        self.waiting -= 1
        self.held[request.tenant] += request.slots

    def leave(
        self, worker: Worker, request: Request, *, complete: bool, now_s: float | None
    ) -> None:
        """A request is no longer on a worker; None: nobody tells the time."""
        worker.remove(request.id, complete=complete, now_s=now_s)
        self.held[request.tenant] -= request.slots
        if not self.held[request.tenant]:
            del self.held[request.tenant]
        if request.metered:
            self._ledger.energy.forget(worker.spec.id, request.id)
        self._own_steps.leave(request.id)

    def own_steps(self, step_tokens: float) -> int:
        """Steps since this was asked last by own counts; none where a live worker has a feed."""
        steps = self._own_steps.take(step_tokens)
        return 0 if steps and any(worker.feed for worker in self.live_workers()) else steps

    def note_health(self, worker_id: str, trouble: str | None) -> None:
        """A worker's engine is healthy, or why it is not; in lockstep that concerns all."""
        self.workers[worker_id].trouble = trouble
        if trouble is None:
            self._newcomers.discard(worker_id)
        self._settle_health(worker_id)

    def _settle_health(self, told_of: str | None = None) -> None:
        """See who is live now; a worker that is told to be down again loses its feed again."""
        sick = [
            worker
            for worker_id, worker in self.workers.items()
            if worker.trouble is not None and worker_id not in self._newcomers
        ]
        for worker in self.workers.values():
            was_live, worker.down_reason = worker.live, worker.trouble
            if self.lockstep and sick and worker.trouble is None:
                worker.down_reason = f"in lockstep with {sick[0].spec.id}: {sick[0].trouble}"
            if not worker.live and (was_live or worker.spec.id == told_of):
                self.lose_feed(worker.spec.id)
                worker.foreign.clear()

    def lose_feed(self, worker_id: str) -> None:
        """The worker's snapshots no longer count."""
        if self.workers[worker_id].feed is not None:
            self.workers[worker_id].lose_feed()
            self._ledger.leave(worker_id)
            self._fed.discard(worker_id)
