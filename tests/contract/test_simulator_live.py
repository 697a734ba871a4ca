"""The simulator and the live router's core decide alike: one event log, identical decisions.

Both have the requests of one stream. Each decision of the live core is compared with the
simulator's, and so are the loads at every step.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest

from loadgen.engine.engine import Engine
from loadgen.engine.request import EngineRequest
from loadgen.simulator.decode import barrier_decode
from loadgen.simulator.decode.decode_config import DecodeConfig
from loadgen.simulator.decode.decode_engines import Engines
from loadgen.simulator.decode.length_sources import LawLengths
from loadgen.simulator.decode.oracle import Knowledge
from loadgen.simulator.decode.request_streams import FullStream, Job
from router.core.events import Arrived, Dispatched, SnapshotReceived, WorkerUp
from router.core.forecast.forecast import WorkProfile
from router.core.forecast.look_ahead import SIGNALS, LookAhead
from router.core.policies.policy_table import POLICIES, PolicySettings
from router.core.queue.fair_share import FairShare
from router.core.queue.pool import Pool
from router.core.rounds.decider import Decider
from router.core.rounds.overcommit import Overcommit
from router.core.state.cluster import Cluster
from router.core.step_time import PAPER_STEP_TIME
from router.core.types import Dispatch, Request, RunningRequest, Snapshot, WorkerSpec
from tests.support.core import part, token

WORKERS, SLOTS, POOL, STEPS, DEADLINE = 3, 5, 9, 300, 40
MEMORY = 1100  # KV tokens; five requests of a mean length just fit
LENGTHS = LawLengths.parse("geometric:200,15")
Snapshots = Callable[[Engine, int, list[EngineRequest], list[str]], Snapshot]


@dataclass(frozen=True)
class Traits:
    """What may set requests and workers apart.

    Attributes:
        tenants: tenants by number of request, in turn.
        priorities: the same of priorities.
        kv_tokens: KV memory of a worker, which its snapshots report; None: it is not reported.
        patience: steps after which a request is late.
        prompt_tokens_worth: KV tokens that cost as much as a computed prompt token; 0: prompts are
            computed elsewhere.
    """

    tenants: str = "-"
    priorities: tuple[int, ...] = (0,)
    kv_tokens: int | None = None
    patience: int = DEADLINE
    prompt_tokens_worth: float = 0.0

    @property
    def profile(self) -> WorkProfile:
        return WorkProfile(prefill_beta=self.prompt_tokens_worth)

    def seconds(self, load_tokens: int, prompt_tokens: int) -> float:
        work = load_tokens + self.prompt_tokens_worth * prompt_tokens
        return PAPER_STEP_TIME.seconds(work, 0)


class TraitStream(FullStream):
    """A full stream of requests with traits."""

    def __init__(self, seed: int, traits: Traits) -> None:
        drawn = LENGTHS.draw(np.random.default_rng(seed), 4000)
        rows = list(zip(*(column.tolist() for column in drawn), strict=True))
        super().__init__(iter(rows), POOL)
        self._traits = traits

    def due(self, now_s: float, waiting: int, inside: int = 0) -> list[Job]:
        tenants, priorities = self._traits.tenants, self._traits.priorities
        return [
            job._replace(
                tenant=tenants[job.number % len(tenants)].strip("-"),
                priority=priorities[job.number % len(priorities)],
            )
            for job in super().due(now_s, waiting, inside)
        ]


class WatchedEngines(Engines):
    """Simulated engines that report their memory, and keep each step's decisions in order."""

    kv_tokens: int | None = None

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self.sent: dict[int, list[tuple[int, int]]] = {}

    def admissible_tokens(self, step: int) -> Sequence[int | None]:
        if self.kv_tokens is None:
            return super().admissible_tokens(step)
        return [max(0, self.kv_tokens - held) for held in self.known_tokens(step).tolist()]

    def send(self, job: Job, worker: int, arrives_step: int) -> None:
        self.sent.setdefault(arrives_step, []).append((job.number, worker))
        super().send(job, worker, arrives_step)


def told(request: EngineRequest) -> RunningRequest:
    return RunningRequest(request.id, request.prompt_tokens, request.generated_tokens)


def full(engine: Engine, step: int, finished: list[EngineRequest], entered: list[str]) -> Snapshot:
    running = tuple(told(each) for each in engine.running)
    ended = tuple(each.id for each in finished)
    return Snapshot(
        "full", "default", "", 0, "e", step, step, 0.0, 0.0, running=running, finished=ended,
        slots=SLOTS,
    )  # fmt: skip


def delta(engine: Engine, step: int, finished: list[EngineRequest], entered: list[str]) -> Snapshot:
    """Lists whom the engine has just admitted; all others grew by one, those that ended too."""
    everybody = [*engine.running, *finished]
    running = tuple(told(each) for each in everybody if each.id in entered)
    ended = tuple(each.id for each in finished)
    return Snapshot(
        "delta", "default", "", 0, "e", step, step, 0.0, 0.0, running=running, finished=ended,
        slots=SLOTS,
    )  # fmt: skip


class Live:
    """Cluster and decider of the router, with engines that step at once."""

    def __init__(self, policy: str, look_ahead: LookAhead | None, traits: Traits) -> None:
        self.kv_tokens, self.traits = traits.kv_tokens, traits
        self.ids = [f"w{index}" for index in range(WORKERS)]
        self.cluster = Cluster(WorkerSpec(i, i, slots=SLOTS) for i in self.ids)
        for worker_id in self.ids:
            self.cluster.apply(WorkerUp(worker_id))
        make = POLICIES[policy].make
        self.decider = Decider(
            self.cluster.groups["default"],
            Pool(POOL, traits.patience),
            make(PolicySettings()),
            make(PolicySettings()),
            Dispatch.POOL,
            look_ahead,
            Overcommit(0),
        )
        self.engines = {worker_id: Engine(SLOTS, 1 << 30) for worker_id in self.ids}
        self.jobs: dict[str, Job] = {}
        for worker_id, engine in self.engines.items():  # as every engine does at first
            self.receive(worker_id, engine, full(engine, 0, [], []))

    def arrive(self, job: Job, step: int) -> None:
        request = Request(
            token(job.number),
            "default",
            job.prompt_tokens,
            priority=job.priority,
            arrival_s=step,
            tenant=job.tenant,
        )
        self.jobs[request.id] = job
        self.cluster.apply(Arrived(request))
        self.decider.pool.add(request)

    def decide(self, step: int) -> list[tuple[int, int]]:
        decided = []
        for assignment in self.decider.decide(step, lambda: 0.0):
            self.decider.pool.remove(assignment.request_id)
            self.cluster.apply(Dispatched(assignment.request_id, assignment.worker_id))
            job = self.jobs[assignment.request_id]
            admitted = EngineRequest(part(job.number), job.prompt_tokens, job.output_tokens)
            self.engines[assignment.worker_id].add(admitted)
            decided.append((job.number, self.ids.index(assignment.worker_id)))
        return decided

    def step(self, step: int, snapshot: Snapshots) -> list[int]:
        schedules = [engine.schedule() for engine in self.engines.values()]
        loads = [engine.load_tokens for engine in self.engines.values()]
        prompts = [schedule.prefill_tokens for schedule in schedules]
        seconds = max(map(self.traits.seconds, loads, prompts))
        for (worker_id, engine), schedule in zip(self.engines.items(), schedules, strict=True):
            message = snapshot(engine, step, engine.advance(), list(schedule.admitted))
            if self.traits.prompt_tokens_worth:
                computed = schedule.prefill_tokens
                message = msgspec.structs.replace(
                    message, step_s=seconds, scheduled_prefill_tokens=computed
                )
            self.decider.learn(step_complete=self.receive(worker_id, engine, message))
        return loads

    def receive(self, worker_id: str, engine: Engine, message: Snapshot) -> bool:
        if self.kv_tokens is not None:
            free = max(0, self.kv_tokens - engine.load_tokens)
            message = msgspec.structs.replace(message, admissible_kv_tokens=free)
        return self.cluster.apply(SnapshotReceived(worker_id, message, 0.0))


@dataclass
class Seen:
    """What made the rounds of one side special.

    Attributes:
        late: numbers of the requests that were late as they entered.
        turns: turns of the tenants.
        decider: the live one, at the end.
    """

    late: list[int] = field(default_factory=list)
    turns: list[Sequence[Any]] = field(default_factory=list)
    decider: Decider | None = field(default=None, compare=False)

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        entered, turns = Pool.entered, FairShare.turns

        def see_late(pool: Pool, requests: Sequence[Request], now: float) -> None:
            for request in requests:
                if pool.late(request, now):
                    live = request.id.startswith("es-")
                    self.late.append(int(request.id.removeprefix("es-"), 16 if live else 10))
            entered(pool, requests, now)

        def see_turns(fair: FairShare, *given: Any) -> Sequence[Any]:
            self.turns.append(turns(fair, *given))
            return self.turns[-1]

        patch.setattr(Pool, "entered", see_late)
        patch.setattr(FairShare, "turns", see_turns)


def compare(
    policy: str,
    signal: str | None,
    snapshots: Snapshots,
    traits: Traits,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[Seen, Seen]:
    """Run both sides on one stream; what was special is returned for both."""
    horizon = 0 if signal in ("none", None) else 6
    config = DecodeConfig(
        policy=policy,
        lengths=LENGTHS,
        workers=WORKERS,
        slots=SLOTS,
        pool=POOL,
        steps=STEPS,
        warmup=0,
        deadline_steps=traits.patience,
        horizon=horizon,
        discount=0.7,
        tie_weight=0.1,
        lead_tokens=20,
        knowledge=Knowledge.parse(signal or "none"),
        overcommit=0,
        profile=traits.profile,
    )
    made: list[WatchedEngines] = []

    def engines(*settings: Any) -> WatchedEngines:
        made.append(WatchedEngines(*settings))
        made[-1].kv_tokens = traits.kv_tokens
        return made[-1]

    seen_simulated, seen_live = Seen(), Seen()
    with monkeypatch.context() as patch:
        patch.setattr(barrier_decode, "Engines", engines)
        seen_simulated.watch(patch)
        result = barrier_decode.simulate(config, stream=TraitStream(7, traits), keep_records=True)
    simulated = result.records
    assert simulated is not None

    look_ahead = None
    if signal is not None:
        look_ahead = LookAhead(
            SIGNALS[signal](WorkProfile()), None, horizon, 0.7, tie_weight=0.1, lead_tokens=20
        )
    with monkeypatch.context() as patch:
        seen_live.watch(patch)
        live, source = Live(policy, look_ahead, traits), TraitStream(7, traits)
        for step in range(STEPS):
            for job in source.due(math.inf, len(live.decider.pool)):
                live.arrive(job, step)
            assert live.decide(step) == made[0].sent.get(step, []), step
            assert live.step(step + 1, snapshots) == simulated.loads[step].tolist(), step
    assert live.decider.stats.policy_errors == 0
    assert len(live.jobs) >= 2 * WORKERS * SLOTS
    seen_live.decider = live.decider
    return seen_simulated, seen_live


@pytest.mark.parametrize(
    ("policy", "signal", "snapshots"),
    [
        ("bfio", "none", full),
        ("bfio", "none", delta),
        # A full snapshot does not list who came and went within its step: nothing is learned of it.
        ("bfio", "survival", delta),
        ("balance_route", "survival", delta),
        ("jsq", None, full),
        ("least_tokens", None, delta),
    ],
)
def test_the_same_decisions_and_loads_at_every_step(
    policy: str, signal: str | None, snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(policy, signal, snapshots, Traits(), monkeypatch)


@pytest.mark.parametrize("policy", ["bfio", "balance_route", "least_tokens", "round_robin"])
def test_late_requests_and_turns_of_tenants_are_decided_alike(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    traits = Traits(tenants="aaab", priorities=(0, 0, 0, 0, -1), kv_tokens=MEMORY, patience=6)
    signal = "survival" if POLICIES[policy].looks_ahead else None
    simulated, live = compare(policy, signal, delta, traits, monkeypatch)
    assert simulated == live
    assert len(live.late) > 3
    assert sum(any(turn) for turn in live.turns) > 10


@pytest.mark.parametrize(("signal", "worth"), [("none", 30.0), ("none", 300.0), ("survival", 30.0)])
def test_the_cost_of_prompts_is_learned_and_decided_on_alike(
    signal: str, worth: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, live = compare("bfio", signal, delta, Traits(prompt_tokens_worth=worth), monkeypatch)
    assert live.decider is not None
    assert live.decider.look_ahead is not None
    assert live.decider.look_ahead.profile.prefill_beta == pytest.approx(worth, rel=0.1)
    assert live.decider.stats.held_rounds > 5
