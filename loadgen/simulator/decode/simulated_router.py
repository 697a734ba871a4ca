"""Router of a simulation: the live pool, look-ahead, rounds and policies, in steps."""

import heapq
import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, fields, replace

import numpy as np

from loadgen.simulator.decode.decode_config import DecodeConfig
from loadgen.simulator.decode.decode_engines import Engines, Residence
from loadgen.simulator.decode.decode_results import Recorder, Report
from loadgen.simulator.decode.oracle import Drift
from loadgen.simulator.decode.request_streams import Job
from router.core.clock import Clock
from router.core.forecast.end_signals import Departure
from router.core.forecast.forecast import NO_CAP, Outlook, Running, WorkProfile
from router.core.forecast.learned_profile import Shown, learned
from router.core.forecast.look_ahead import LookAhead, Parameters
from router.core.policies.policy_protocol import Policy
from router.core.policies.policy_table import POLICIES, PolicySettings
from router.core.queue.pool import Pool
from router.core.rounds.decider import RoundDecider
from router.core.rounds.overcommit import Overcommit
from router.core.state.barrier import StepTotals
from router.core.state.wanted import Wanted
from router.core.state.worker import UNBOUNDED
from router.core.step_fit import StepFit
from router.core.step_time import StepTime
from router.core.types import Dispatch, PoolState, Request, WorkerView

GROUP = "default"
# Of the look-ahead.
PARAMETERS = tuple(each.name for each in fields(Parameters))


class SimulatedWorkers:
    """Simulated engines as rounds see them (``decider.Workers``); all of them are always up."""

    name = GROUP
    barrier = True
    steps_told = True
    hits = None  # no prompt is cached
    version = None  # each step's end changes all

    def __init__(self, config: DecodeConfig, engines: Engines, clock: Clock | None) -> None:
        self._config = config
        self._engines = engines
        self._clock = clock
        # Time at which the last round began; views are made before, for they cost more here than in
        # the live router.
        self.begun_s = 0.0
        # One cap for all, as replay sends it; it cuts nothing.
        self._cap_tokens = config.lengths.max_output_tokens or NO_CAP
        self.ids = [f"w{index:04}" for index in range(config.workers)]
        self.askable: Set[str] = set(self.ids)
        self.slots = config.workers * config.slots
        self.steps_under_way = config.dispatch_delay
        self.step = 0  # coming step
        self.wanted = Wanted()  # nobody wants tokens at a time
        self.departures: list[Departure] = []  # requests that ended with the last step
        self.held: Counter[str] = Counter()  # slots in use, by tenant
        # Sums over the steps in which requests waited.
        self.totals: Mapping[PoolState, StepTotals] = {PoolState.WAITING: StepTotals()}
        self._fit = StepFit()

    @property
    def step_time(self) -> StepTime | None:
        """Learned from the simulated steps, as live."""
        return self._fit.fitted

    @property
    def stepping(self) -> bool:
        return not self._engines.empty

    def profile(self, before: WorkProfile) -> WorkProfile:
        """Learned, unless it is configured; what engines report of the model is true at once."""
        if self._config.known_profile is not None:
            return before
        model = self._config.profile
        shown = Shown(model.growth, model.prefill_chunk, model.window, model.window_share)
        return learned(before, self.step_time, shown)

    def own_steps(self, step_tokens: float) -> int:
        """None: each step's end is reported."""
        return 0

    def review(self, now_s: float) -> bool:
        """Nothing depends on time alone."""
        return False

    def views(self, dispatch: Dispatch, overcommit: int) -> Sequence[WorkerView]:
        engines, config = self._engines, self._config
        room = config.slots + overcommit
        tokens = engines.known_tokens(self.step).tolist()
        usage = [0.0] * config.workers
        if config.kv_tokens:
            usage = np.minimum(1.0, engines.tokens(self.step) / config.kv_tokens).tolist()
        requests = (engines.running + engines.queued).tolist()
        pooled = dispatch is Dispatch.POOL
        capacity = [max(0, room - here) if pooled else UNBOUNDED for here in requests]
        columns = {
            "id": self.ids,
            "load_tokens": tokens,
            "requests": requests,
            "capacity": capacity,
            "waiting": engines.waiting,
            "kv_usage": usage,
            "admissible_tokens": engines.admissible_tokens(self.step),
            "slots": [config.slots] * config.workers,
            "pending_prompt_tokens": engines.pending_prompts(self.step).tolist(),
        }
        rows = zip(*columns.values(), strict=True)
        views = [WorkerView(**dict(zip(columns, row, strict=True))) for row in rows]
        if self._clock and any(capacity):
            self.begun_s = self._clock()
        return views

    def outlook(self, look_ahead: LookAhead, views: Sequence[WorkerView]) -> Outlook:
        engines, config = self._engines, self._config
        if look_ahead.needs_running:
            running = engines.foreseen(self.step, self._cap_tokens)
            return look_ahead.outlook(running, config.workers, config.slots)
        loads = np.array([view.load_tokens for view in views], dtype=np.float64)
        requests = np.array([view.requests for view in views])
        return look_ahead.outlook_from_loads(loads, requests, config.slots)

    def running(self, places: Iterable[int]) -> Running:
        """Of these workers alone, not renumbered."""
        foreseen = self._engines.foreseen(self.step, self._cap_tokens)
        return foreseen.take(np.isin(foreseen.worker, list(places)))

    def stepped(self, started: int, seconds: float, *, waiting: bool) -> None:
        """Report a step before its ends; where requests wait, first steps show empty slots."""
        loads, running, prompts, contexts = self._engines.shown(self.step)
        likely = None
        if (cost := self._fit.fitted) is not None:
            work = list(map(cost.work_s, loads, running, prompts))
            likely = work.index(max(work))
        self._fit.observe(loads, running, prompts, contexts, seconds, likely=likely)
        if not waiting:
            return
        seen = self.totals[PoolState.WAITING]
        counted = replace(
            seen,
            steps=seen.steps + 1,
            step_s=seen.step_s + seconds,
            entered=seen.entered + started,
            free_slots=seen.free_slots + self.slots - sum(running),
        )
        self.totals = {PoolState.WAITING: counted}

    def ended(self, job: Job) -> None:
        self.held[job.tenant] -= 1
        if not self.held[job.tenant]:
            del self.held[job.tenant]
        self.departures.append(
            Departure(job.number, job.prompt_tokens, job.output_tokens, True, self._cap_tokens)
        )


class Front:
    """Handles requests from arrival to dispatch; decisions are timed by ``clock``, if any."""

    def __init__(
        self,
        config: DecodeConfig,
        engines: Engines,
        recorder: Recorder,
        policy: Policy | None,
        clock: Clock | None,
    ) -> None:
        self._config = config
        self._engines = engines
        self._recorder = recorder
        self._clock = clock
        self._workers = SimulatedWorkers(config, engines, clock)
        policy = policy or POLICIES[config.policy].make(PolicySettings(seed=config.seed))
        self._decider = RoundDecider(
            self._workers,
            Pool(config.pool, config.patience),
            policy,
            policy,
            config.dispatch,
            _look_ahead(config) if POLICIES[config.policy].looks_ahead else None,
            Overcommit(config.overcommit),
            on_policy_error=end_by,
        )
        self._behind: list[tuple[int, int, Request]] = []
        self._jobs: dict[str, tuple[Job, int]] = {}  # and the step of its arrival
        self._index = {worker_id: index for index, worker_id in enumerate(self._workers.ids)}

    @property
    def waiting(self) -> int:
        """Visible to the policy or not."""
        return len(self._jobs)

    @property
    def parameters(self) -> Report:
        """Final parameters that were not configured, including the look-ahead's."""
        chosen: Report = {"overcommit": self._decider.overcommit.requests}
        look_ahead = self._decider.look_ahead
        if look_ahead is None:
            return chosen | dict.fromkeys((*PARAMETERS, "skill"))
        return chosen | asdict(look_ahead.parameters) | {"skill": look_ahead.skill}

    def arrive(self, job: Job, step: int, now_s: float) -> None:
        """Requests that the policy cannot see yet keep their order."""
        request = Request(
            str(job.number),
            GROUP,
            seen_prompt_tokens(job, self._config.size_error, self._config.seed),
            priority=job.priority,
            arrival_s=self._clocked(step, now_s),
            tenant=job.tenant,
        )
        self._jobs[request.id] = job, step
        heapq.heappush(self._behind, (job.priority, job.number, request))

    def decide(self, step: int, now_s: float) -> None:
        """Assign waiting requests to workers with free capacity, and send them.

        At instant dispatch each arrival is a round of its own, as in the live router.
        """
        self._workers.step, now = step, self._clocked(step, now_s)
        pool = self._decider.pool
        if self._config.dispatch is Dispatch.INSTANT:
            while self._behind:
                pool.add(heapq.heappop(self._behind)[2])
                self._round(step, now)
        else:
            while self._behind and not pool.full:
                pool.add(heapq.heappop(self._behind)[2])
            self._round(step, now)
        self._recorder.left_waiting(len(self._jobs))

    def stepped(self, started: int, seconds: float) -> None:
        self._workers.stepped(started, seconds, waiting=bool(self._jobs))

    def learn(self, ended: Sequence[Residence]) -> None:
        for job, *_ in ended:
            self._workers.ended(job)
        self._decider.learn(step_complete=True)

    def close(self, step: int) -> None:
        for _, arrived_step in self._jobs.values():
            self._recorder.waited(step, step - arrived_step)

    def _clocked(self, step: int, now_s: float) -> float:
        """In the unit of the deadline."""
        return now_s if self._config.deadline_steps is None else step

    def _round(self, step: int, now: float) -> None:
        rounds = self._decider.stats.rounds
        assignments = self._decider.decide(now, lambda: now)
        if self._clock and self._decider.stats.rounds > rounds:
            self._recorder.decided(step, self._clock() - self._workers.begun_s)
        for request_id, worker_id in assignments:
            request = self._decider.pool.remove(request_id)
            assert request is not None
            job, arrived_step = self._jobs.pop(request_id)
            self._workers.held[request.tenant] += request.slots
            self._recorder.waited(step, step - arrived_step)
            arrives_step = step + self._config.dispatch_delay
            self._engines.send(job, self._index[worker_id], arrives_step)


def seen_prompt_tokens(job: Job, sigma: float, seed: int) -> int:
    """A prompt's size with an error, the same at every call, at least 1.

    The live router estimates sizes from bytes of text by a ratio of sums, so the mean is right.
    """
    if sigma == 0:
        return job.prompt_tokens
    factor = random.Random(f"{seed} {job.number}").lognormvariate(-(sigma**2) / 2, sigma)
    return max(1, math.ceil(job.prompt_tokens * factor))


def end_by(error: Exception) -> None:
    """A simulation ends with the error of a policy."""
    raise error


def _look_ahead(config: DecodeConfig) -> LookAhead:
    known = config.known_profile
    if known is None:  # its costs are learned
        known = replace(config.profile, request_tokens=0.0, prefill_beta=0.0)
    profile = Drift(**asdict(known))
    return LookAhead(
        config.knowledge.signal(profile, config.seed),
        profile,
        config.horizon,
        config.discount,
        config.tie_weight,
        config.lead_tokens,
    )
