"""Router of a simulation: the live pool, look-ahead, rounds and policies, in steps."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import numpy as np

from loadgen.simulator.decode.decode_config import DecodeConfig
from loadgen.simulator.decode.decode_engines import Engines, Residence
from loadgen.simulator.decode.decode_results import Recorder, Report
from loadgen.simulator.decode.estimates import seen_prompt_tokens
from loadgen.simulator.decode.oracle import Drift
from loadgen.simulator.decode.request_streams import Job
from router.core.forecast.end_signals import Departure
from router.core.forecast.forecast import NO_CAP, Outlook
from router.core.forecast.look_ahead import LookAhead
from router.core.policies.protocol import Policy
from router.core.policies.table import POLICIES, PolicySettings
from router.core.queue.pool import Pool
from router.core.rounds import assignment as rounds
from router.core.rounds.overcommit import Overcommit
from router.core.rounds.reservations import Reservations
from router.core.state.barrier import StepTotals
from router.core.state.worker import UNBOUNDED
from router.core.types import Dispatch, Request, WorkerView

GROUP = "default"


class Front:
    """Handles requests from arrival to dispatch.

    Args:
        config: configuration.
        engines: destination of the requests.
        recorder: recorder of decisions and waits.
        policy: policy in place of the configured one.
        clock: clock for decision times.
    """

    def __init__(
        self,
        config: DecodeConfig,
        engines: Engines,
        recorder: Recorder,
        policy: Policy | None,
        clock: Callable[[], float] | None,
    ) -> None:
        self._config = config
        self._engines = engines
        self._recorder = recorder
        self._clock = clock
        self._policy = policy or POLICIES[config.policy].make(PolicySettings(seed=config.seed))
        self._pool = Pool(config.pool, config.patience)
        self._overcommit = Overcommit(config.overcommit)
        self._totals = StepTotals()
        self._reservations = Reservations()
        self._behind: list[tuple[int, int, Request]] = []
        self._jobs: dict[str, tuple[Job, int]] = {}  # and the step of its arrival
        self._ids = [f"w{index:04}" for index in range(config.workers)]
        self._index = {worker_id: index for index, worker_id in enumerate(self._ids)}
        # One cap for all, as replay sends it; it cuts nothing.
        self._cap_tokens = config.lengths.max_output_tokens or NO_CAP
        self._look_ahead = _look_ahead(config) if POLICIES[config.policy].looks_ahead else None

    @property
    def waiting(self) -> int:
        """Number of requests that wait here, visible to the policy or not."""
        return len(self._jobs)

    @property
    def parameters(self) -> Report:
        """Final parameters that were not configured, including the look-ahead's."""
        chosen: Report = {"overcommit": self._overcommit.requests}
        if self._look_ahead is None:
            names = ("horizon", "discount", "tie_weight", "lead_tokens", "skill")
            return chosen | dict.fromkeys(names)
        used = self._look_ahead.parameters
        return chosen | {
            "horizon": used.horizon,
            "discount": used.discount,
            "tie_weight": used.tie_weight,
            "lead_tokens": used.lead_tokens,
            "skill": self._look_ahead.skill,
        }

    def arrive(self, job: Job, step: int, now_s: float) -> None:
        """Add an arrival; requests that the policy cannot see yet keep their order."""
        seen_tokens = seen_prompt_tokens(job, self._config.size_error, self._config.seed)
        request = Request(
            str(job.number),
            GROUP,
            seen_tokens,
            priority=job.priority,
            arrival_s=self._clocked(step, now_s),
        )
        self._jobs[request.id] = job, step
        heapq.heappush(self._behind, (job.priority, job.number, request))

    def decide(self, step: int, now_s: float) -> None:
        """Assign waiting requests to workers with free capacity, and send them."""
        instant = self._config.dispatch is Dispatch.INSTANT
        while self._behind and (instant or not self._pool.full):
            self._pool.add(heapq.heappop(self._behind)[2])
        if len(self._pool):
            self._round(step, self._clocked(step, now_s))
        self._recorder.left_waiting(len(self._jobs))

    def started(self, count: int) -> None:
        """Record the number of first steps, which shows the empty slots."""
        if not self._jobs:
            return
        seen, slots = self._totals, self._config.workers * self._config.slots
        self._totals = replace(
            seen,
            steps=seen.steps + 1,
            entered=seen.entered + count,
            free_slots=seen.free_slots + slots - int(self._engines.running.sum()),
        )
        self._overcommit.review(self._totals, slots)

    def learn(self, ended: Sequence[Residence]) -> None:
        """Pass a step and its ended requests to the look-ahead."""
        if self._look_ahead is None:
            return
        cap = self._cap_tokens
        for job, *_ in ended:
            self._look_ahead.ended(
                Departure(job.number, job.prompt_tokens, job.output_tokens, True, cap)
            )
        self._look_ahead.advance()

    def close(self, step: int) -> None:
        """Record the waits of requests that still wait."""
        for _, arrived_step in self._jobs.values():
            self._recorder.waited(step, step - arrived_step)

    def _clocked(self, step: int, now_s: float) -> float:
        """Return the time in the unit of the deadline."""
        return now_s if self._config.deadline_steps is None else step

    def _round(self, step: int, now: float) -> None:
        views = self._views(step)
        capacity = sum(view.capacity for view in views)
        if not capacity:
            return
        begun_s = self._clock() if self._clock else 0.0
        outlook, gap_tokens = self._outlook(step), rounds.gap_tokens(views)
        tiers = self._tiers(now, capacity, gap_tokens)
        if outlook is not None:
            wanted = self._pool.room_wanted(now, gap_tokens)
            outlook = self._reservations.make_room(wanted, views, outlook)
        assignments = rounds.assign(self._policy, tiers, views, outlook)
        if self._clock:
            self._recorder.decided(step, self._clock() - begun_s)
        for assignment in assignments:
            self._send(assignment.request_id, self._index[assignment.worker_id], step)

    def _tiers(self, now: float, capacity: int, gap_tokens: int) -> Sequence[Sequence[Request]]:
        if self._config.dispatch is Dispatch.POOL:
            return self._pool.tiers(now, capacity, gap_tokens)
        return [[request] for request in self._pool]

    def _send(self, request_id: str, worker: int, step: int) -> None:
        request = self._pool.remove(request_id)
        assert request is not None
        job, arrived_step = self._jobs.pop(request_id)
        self._recorder.waited(step, step - arrived_step)
        self._engines.send(job, worker, step + self._config.dispatch_delay)

    def _views(self, step: int) -> list[WorkerView]:
        engines, config = self._engines, self._config
        room = config.slots + self._overcommit.requests
        tokens = engines.known_tokens(step).tolist()
        usage = [0.0] * config.workers
        if config.kv_tokens:
            usage = np.minimum(1.0, engines.tokens(step) / config.kv_tokens).tolist()
        requests = (engines.running + engines.queued).tolist()
        instant = config.dispatch is Dispatch.INSTANT
        capacity = [UNBOUNDED if instant else room - here for here in requests]
        room_told, slots = [None] * config.workers, [config.slots] * config.workers
        columns = (self._ids, tokens, requests, capacity, engines.waiting, usage, room_told, slots)
        return [WorkerView(*row) for row in zip(*columns, strict=True)]

    def _outlook(self, step: int) -> Outlook | None:
        look_ahead, engines, config = self._look_ahead, self._engines, self._config
        if look_ahead is None:
            return None
        if look_ahead.needs_running:
            running = engines.foreseen(step, self._cap_tokens)
            return look_ahead.outlook(running, config.workers, config.slots)
        loads = engines.known_tokens(step).astype(np.float64)
        requests = engines.running + engines.queued
        return look_ahead.outlook_from_loads(loads, requests, config.slots)


def _look_ahead(config: DecodeConfig) -> LookAhead:
    profile = Drift(**asdict(config.known_profile or config.true_profile))
    return LookAhead(
        config.knowledge.signal(profile, config.seed),
        profile,
        config.horizon,
        config.discount,
        config.tie_weight,
        config.lead_tokens,
    )
