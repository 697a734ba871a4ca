"""A barrier domain: the workers of one model that step together, and their common state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial

import numpy as np

from router.core.energy.joules import PowerLevels
from router.core.events import PowerTold, SnapshotReceived
from router.core.forecast.end_signals import Departure
from router.core.forecast.forecast import DEFAULT_CHUNK, Outlook, Running, WorkProfile
from router.core.forecast.learned_profile import Shown, learned
from router.core.forecast.look_ahead import LookAhead
from router.core.prefix.hit_totals import HitTotals
from router.core.prefix.prefixes import Prefixes
from router.core.state import guesses
from router.core.state.barrier import StepLedger, StepTotals
from router.core.state.breaker import DEFAULTS, Breaker, BreakerSettings, may_open, review
from router.core.state.closed_step import ClosedStep
from router.core.state.line import Line
from router.core.state.lockstep import told_ranks
from router.core.state.own_steps import OwnSteps
from router.core.state.prefill_worker import PrefillWorker
from router.core.state.rates import GroupRates, Growth, TokenRate
from router.core.state.running_table import RunningTable, joined
from router.core.state.short_misses import fetched_or_cached
from router.core.state.wanted import Wanted
from router.core.state.worker import Worker
from router.core.step_fit import FittedStepTime
from router.core.step_time import StepBudget, StepTime
from router.core.types import PAUSED, Dispatch, Hits, PoolState, Request, WorkerSpec, WorkerView


class Group:
    """A barrier domain, or the prefill workers of one, which step independently."""

    def __init__(
        self,
        name: str,
        *,
        lockstep: bool | None = None,
        serves: Group | None = None,
        power_levels: PowerLevels | None = None,
        breakers: BreakerSettings = DEFAULTS,
    ) -> None:
        self.name = name
        self.imposed = lockstep  # whether it is in lockstep, whatever engines tell; None: unset
        self.serves = serves  # decode group, for a prefill group; else None
        self.prefills: Group | None = None  # group of its prefill workers, once it has had any
        # What its workers' snapshots tell of their prefix caches, or is guessed.
        self.prefixes = Prefixes()
        # What the live workers have cached of a prompt, instead; None: as told.
        self.prefix_hits: Hits | None = None
        self.hit_totals = HitTotals()
        # The largest budget of a worker's step; None: the engines' own bound.
        self.prompt_budget: StepBudget | None = None
        if serves is not None:
            serves.prefills = self
        self.workers: dict[str, Worker] = {}
        self.line = Line(self)
        self.held: Counter[str] = Counter()  # slots in use, by tenant
        self.wanted = Wanted()  # by requests at its workers
        self.departures: list[Departure] = []  # requests that stopped running; the reader clears it
        self.token_rate: TokenRate = TokenRate() if serves is None else serves.token_rate
        self._table = RunningTable()
        self._ledger = StepLedger(power_levels)
        self.energy = self._ledger.energy
        self._growth = Growth()
        self._own_steps = OwnSteps()
        self._fed: set[str] = set()  # live workers with a feed, which a step waits for
        self._newcomers: set[str] = set()  # joined beside live workers, and not live yet
        self._gone_gaps = self._gone_preemptions = 0  # of workers that have left
        self.ejections = 0
        self._breakers = breakers
        self.rates = GroupRates()
        self._watched: set[str] = set()  # workers whose breakers may hold requests back
        self._live: list[Worker] = []
        self._live_ids: tuple[str, ...] = ()

    @property
    def totals(self) -> Mapping[PoolState, StepTotals]:
        return self._ledger.totals

    @property
    def every_step(self) -> StepTotals:
        return sum(self.totals.values(), StepTotals())

    @property
    def lockstep(self) -> bool:
        """Whether no worker can step without all others: as imposed, else as the engines tell."""
        if self.imposed is not None:
            return self.imposed
        return told_ranks(self.workers.values()) >= max(2, len(self.workers))

    @property
    def barrier(self) -> bool | None:
        """True if its workers wait for each other, by steps or ``lockstep``; None: unknown."""
        shown = self._ledger.barrier
        return True if shown is None and self.lockstep else shown

    @property
    def growth(self) -> float:
        return self._growth.mean

    @property
    def gaps(self) -> int:
        seen = [w.gaps + (w.feed.gaps if w.feed else 0) for w in self.workers.values()]
        return self._gone_gaps + sum(seen)

    @property
    def preemptions(self) -> int:
        every = self.workers.values()
        seen = [w.preemptions + (w.feed.preemptions if w.feed else 0) for w in every]
        return self._gone_preemptions + sum(seen)

    @property
    def step_time(self) -> StepTime | None:
        return self._ledger.step_time

    @property
    def fitted(self) -> FittedStepTime | None:
        """What its steps have taught of their cost, even where another is fixed."""
        return self._ledger.step_fit.fitted

    @property
    def stepping(self) -> bool:
        return any(self.workers[each].requests for each in self._fed)

    @property
    def steps_told(self) -> bool:
        """True if all live workers tell of their steps."""
        return len(self._fed) == len(self._live)

    def fix_step_time(self, step_time: StepTime | None) -> None:
        self._ledger.fixed = step_time

    @property
    def shown(self) -> Shown:
        feeds = [worker.feed for worker in self._live if worker.feed is not None]
        told = max((feed.chunk_tokens for feed in feeds), default=0)
        chunk = self.prompt_budget.tokens if self.prompt_budget else told or DEFAULT_CHUNK
        attended = [feed.windows for feed in feeds if feed.windows]
        windows = [window for window in max(attended, default=()) if window]
        elsewhere = (steps := self.every_step).entered > 0 and not steps.prompt_tokens
        prompts = (self._cached is not None or not self._fed) and not elsewhere
        shown = Shown(self.growth, chunk, prompts=prompts)
        if not windows:
            return shown
        share = len(windows) / len(max(attended))
        return replace(shown, window=max(windows), window_share=share)

    def profile(self, before: WorkProfile) -> WorkProfile:
        """The work of requests, as the group's steps show it by now."""
        found = learned(before, self.step_time, self.shown)
        # What a worker computes of a prompt it has fetched is one token, however long it is.
        fetches = self.prefills is not None and self.prefills.serving
        return replace(found, prefill_beta=0.0) if fetches else found

    @property
    def hits(self) -> Hits | None:
        """Tokens of a prompt that each live worker need not compute; None: nothing is known."""
        if self.prefills is None:
            return self._cached
        return partial(fetched_or_cached, self._cached, len(self._live))

    @property
    def asks_for_content(self) -> bool:
        """Whether it can use the ids of a request's content: caches are told or guessed."""
        here = self.prefixes.told or any(guesses.guessed(self.prefixes, one) for one in self._live)
        return here or (self.prefills is not None and self.prefills.asks_for_content)

    @property
    def _cached(self) -> Hits | None:
        if self.prefix_hits is None and self.prefixes.known:
            return partial(self.prefixes.hits, worker_ids=self._live_ids)
        return self.prefix_hits

    @property
    def prefill_workers(self) -> list[PrefillWorker]:
        return [each for each in self.workers.values() if isinstance(each, PrefillWorker)]

    @property
    def most_slots(self) -> int | None:
        """Slots of the largest engine; None unless all report theirs."""
        reported = [worker.feed.slots if worker.feed else 0 for worker in self.workers.values()]
        return max(reported, default=None) if all(reported) else None

    @property
    def slots(self) -> int:
        return sum(worker.slots for worker in self._live)

    @property
    def steps_under_way(self) -> int:
        """Of the steps that may compute prompts."""
        every = self.prompt_budget.every if self.prompt_budget else 1
        return self.rates.delay.steps // every

    def live_workers(self) -> Sequence[Worker]:
        return self._live

    @property
    def serving(self) -> bool:
        return any(worker.takes for worker in self.workers.values())

    @property
    def paused(self) -> bool:
        return any(worker.trouble == PAUSED for worker in self.workers.values())

    def join(self, spec: WorkerSpec) -> None:
        """Add a worker; in lockstep it blocks no other before its first time up."""
        if self._live:
            self._newcomers.add(spec.id)
        make = Worker if self.serves is None else PrefillWorker
        worker = make(spec, self._table.worker(), self.departures, self.token_rate)
        worker.breaker = Breaker(self._breakers)
        worker.service = self.rates.join(spec.service_rate)
        worker.hit_totals = self.hit_totals
        self.workers[spec.id] = worker

    def amend(self, spec: WorkerSpec) -> None:
        worker = self.workers[spec.id]
        if (worker.spec.snapshots, worker.spec.kv_events) != (spec.snapshots, spec.kv_events):
            self.prefixes.lost(spec.id)
        worker.amend(spec)
        self.rates.amend(worker.service, spec.service_rate)

    def remove(self, worker_id: str) -> None:
        self.lose_feed(worker_id)
        self.prefixes.lost(worker_id)
        worker = self.workers.pop(worker_id)
        self.rates.leave(worker.service)
        assert worker.empty
        self._gone_gaps += worker.gaps
        self._gone_preemptions += worker.preemptions
        self._ledger.forget_worker(worker_id)
        self._table.release(worker.rows.worker)
        self._newcomers.discard(worker_id)
        self._watched.discard(worker_id)
        self._settle_health()

    def set_lockstep(self, imposed: bool | None) -> None:
        self.imposed = imposed
        self._settle_health()

    # Breakers.

    @property
    def askable(self) -> Set[str]:
        """Ids of workers that accept requests, if not at this moment."""
        return {i for i, w in self.workers.items() if w.takes and not w.breaker.ejected}

    def review(self, now_s: float) -> bool:
        """Update the breakers; true if one may have held requests back."""
        if not self._watched:
            return False
        review([worker.breaker for worker in self.workers.values() if worker.takes], now_s)
        self._watched = {i for i in self._watched if not self.workers[i].breaker.calm}
        return True

    def failed(self, worker_id: str, attempt: str, now_s: float, *, suspect: bool) -> None:
        """Failures of a worker that is down count once, as its outage."""
        worker = self.workers[worker_id]
        if worker.live:
            others = [w.breaker for w in self.workers.values() if w.takes and w is not worker]
            may = may_open(others, self._breakers.max_ejected)
            breaker = self.watched(worker_id)
            self.ejections += breaker.failed(attempt, now_s, suspect=suspect, may_open=may)

    def watched(self, worker_id: str) -> Breaker:
        """The breaker of a worker, to be changed."""
        self._watched.add(worker_id)
        return self.workers[worker_id].breaker

    def views(self, dispatch: Dispatch, overcommit: int = 0) -> Sequence[WorkerView]:
        return [worker.view(dispatch, overcommit) for worker in self._live]

    @property
    def version(self) -> int | None:
        """Another one after each change of the views; None: they change without notice."""
        return None if self._watched or self.serves else self._table.changes

    def outlook(self, look_ahead: LookAhead, views: Sequence[WorkerView]) -> Outlook:
        slots = sum([view.slots for view in views]) // len(views)
        if not look_ahead.needs_running:
            loads = np.array([view.load_tokens for view in views], dtype=np.float64)
            requests = np.array([view.requests for view in views])
            return look_ahead.outlook_from_loads(loads, requests, slots)
        versions = [worker.rows.version for worker in self._live]
        outlook = look_ahead.renewed(versions, self.running, slots)
        foreign = [worker.foreign.load_tokens for worker in self._live]
        if any(foreign):  # it is in the views, but not among the running requests
            outlook = replace(outlook, work=outlook.work + np.array(foreign)[:, None])
        return outlook

    def running(self, places: Iterable[int] | None = None) -> Running:
        """Requests on the live workers or on the way; ``places`` selects and renumbers workers."""
        live = self._live
        if places is not None:
            live = [live[place] for place in places]
        shown = self._table.running([worker.rows.worker for worker in live])
        unseen = [
            (i, *row) for i, worker in enumerate(live) if worker.unseen for row in worker.foreseen()
        ]
        if not unseen:
            return shown
        worker, number, prompt, generated, cap, seen = np.array(unseen, dtype=np.int64).T
        left = np.where(generated == 0, prompt, 0)
        untold = np.full(len(unseen), np.nan)
        return joined(shown, Running(number, worker, prompt, generated, cap, untold, left, seen))

    def receive(self, event: SnapshotReceived) -> bool:
        worker = self.workers[event.worker_id]
        if worker.ranks != event.snapshot.ranks:
            worker.ranks = event.snapshot.ranks
            self._settle_health()
        if worker.feed is None or worker.feed.epoch != event.snapshot.epoch:
            self._ledger.leave(event.worker_id)
        snapshot = worker.meter.added_to(event.snapshot, event.received_s)
        feed = worker.receive(snapshot, event.received_s)
        if feed is not None:
            self.prefixes.heard(event.worker_id, event.snapshot, event.received_s)
        if feed is None or not feed.known or not worker.live:
            return False
        if self.serves is not None:
            self.energy.alone(event.worker_id, snapshot, idle=not feed.resident_tokens)
            return False
        state = PoolState.WAITING if self.line.waiting else PoolState.EMPTY
        free_slots = worker.open_slots(feed.step_running)
        self._growth.add(feed.step_grown, feed.step_decoding)
        self._ledger.report(event.worker_id, feed, snapshot, state, free_slots)
        self._fed.add(event.worker_id)
        return self._ledger.complete(self._fed, state)

    def take_power(self, told: PowerTold) -> None:
        """With a feed, the next snapshot carries it."""
        worker = self.workers[told.worker_id]
        worker.meter.told = told
        if worker.feed is None:
            self.energy.told(told.worker_id, told, idle=worker.live and not worker.requests)

    def watch(self, on_step: Callable[[ClosedStep], None] | None) -> None:
        """Call it at each closing step; None ends it."""
        self._ledger.on_step = on_step

    def progress(self, worker: Worker, request: Request, generated_tokens: int) -> None:
        new = worker.progress(request.id, generated_tokens)
        if new > 0:
            self._own_steps.receive(request, new)

    def computed(self, worker: Worker, request: Request, now_s: float | None) -> None:
        """Its prompt is, or will not be seen to be."""
        guesses.computed(self.prefixes, worker, request, now_s)

    def enter(self, worker: Worker, request: Request, now_s: float | None) -> None:
        """Move a waiting request to a worker; ``now_s`` None (as in ``leave``): unknown."""
        self.withdraw(request, to=self)
        self.held[request.tenant] += request.slots
        self.wanted.add(request.targets)
        hits, cached = self._cached, None
        told = self.prefix_hits is not None or self.prefixes.tells(worker.spec.id)
        told = told or guesses.guessed(self.prefixes, worker)
        if hits is not None and told and worker in self._live:
            cached = hits(request)[self._live.index(worker)]
        guesses.sent(self.prefixes, worker, request, cached)
        worker.add(request, now_s, cached)

    def withdraw(self, request: Request, to: Group | None = None) -> None:
        """A request waits no longer; ``to`` None: it goes to no worker."""
        self.line.waiting -= 1
        for group in self.line.groups:
            if group is not to:
                group.prefixes.forget(request.id)

    def leave(
        self, worker: Worker, request: Request, *, complete: bool, now_s: float | None
    ) -> None:
        guesses.ended(self.prefixes, worker, request, complete=complete, now_s=now_s)
        worker.remove(request.id, complete=complete, now_s=now_s)
        self.held[request.tenant] -= request.slots
        if not self.held[request.tenant]:
            del self.held[request.tenant]
        self.wanted.remove(request.targets)
        if request.metered:
            self.energy.forget(worker.spec.id, request.id)
        self._own_steps.leave(request.id)

    def own_steps(self, step_tokens: float) -> int:
        """Steps since the last call; 0 if a live worker has a feed."""
        steps = self._own_steps.take(step_tokens)
        return 0 if steps and any(worker.feed for worker in self._live) else steps

    def note_health(self, worker_id: str, trouble: str | None) -> None:
        self.workers[worker_id].trouble = trouble
        if trouble is None:
            self._newcomers.discard(worker_id)
        self._settle_health(worker_id)

    def _settle_health(self, told_of: str | None = None) -> None:
        """In lockstep one sick worker takes the group down."""
        lockstep = self.lockstep
        sick = [w for i, w in self.workers.items() if w.trouble and i not in self._newcomers]
        for worker in self.workers.values():
            was_live, worker.down_reason = worker.down_reason is None, worker.trouble
            if lockstep and sick and worker.trouble is None:
                worker.down_reason = f"in lockstep with {sick[0].spec.id}: {sick[0].trouble}"
            down = worker.down_reason is not None
            if down and (was_live or worker.spec.id == told_of):
                self.lose_feed(worker.spec.id)
                self.prefixes.lost(worker.spec.id)
                worker.forget_others()
        self._live = [worker for worker in self.workers.values() if worker.down_reason is None]
        self._live_ids = tuple(worker.spec.id for worker in self._live)
        self._table.changes += 1

    def lose_feed(self, worker_id: str) -> None:
        if self.workers[worker_id].feed is not None:
            self.workers[worker_id].lose_feed()
            self._ledger.leave(worker_id)
            self._fed.discard(worker_id)
