"""The simulator and the live router's core decide alike: the same requests, the same loads."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice

import numpy as np
import pytest

from loadgen.emulator.engine import Engine, EngineRequest
from loadgen.simulator.decode.barrier_decode import simulate
from loadgen.simulator.decode.decode_config import DecodeConfig
from loadgen.simulator.decode.length_sources import LawLengths
from loadgen.simulator.decode.oracle import Knowledge
from loadgen.simulator.decode.request_streams import FullStream, Job
from router.core.forecast.look_ahead import SIGNALS, LookAhead
from router.core.forecast.step_cost import WorkProfile
from router.core.policies.table import POLICIES, PolicySettings
from router.core.queue.pool import Pool
from router.core.rounds.decider import Decider
from router.core.state.cluster import Cluster
from router.core.types import (
    Arrived,
    Dispatch,
    Dispatched,
    Request,
    RunningRequest,
    Snapshot,
    SnapshotReceived,
    WorkerSpec,
    WorkerUp,
)
from tests.support.core import part, token

WORKERS, SLOTS, POOL, STEPS, DEADLINE = 3, 5, 9, 300, 40
LENGTHS = LawLengths.parse("geometric:200,15")
Snapshots = Callable[[Engine, int, list[EngineRequest], list[str]], Snapshot]


def stream(seed: int) -> FullStream:
    drawn = LENGTHS.draw(np.random.default_rng(seed), 4000)
    return FullStream(iter(list(zip(*(column.tolist() for column in drawn), strict=True))), POOL)


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

    def __init__(self, policy: str, look_ahead: LookAhead | None) -> None:
        self.ids = [f"w{index}" for index in range(WORKERS)]
        self.cluster = Cluster(WorkerSpec(i, i, slots=SLOTS) for i in self.ids)
        for worker_id in self.ids:
            self.cluster.apply(WorkerUp(worker_id))
        make = POLICIES[policy].make
        self.decider = Decider(
            self.cluster.groups["default"],
            Pool(POOL, DEADLINE),
            make(PolicySettings()),
            make(PolicySettings()),
            Dispatch.POOL,
            look_ahead,
        )
        self.engines = {worker_id: Engine(SLOTS, 1 << 30) for worker_id in self.ids}
        self.jobs: dict[str, Job] = {}
        for worker_id, engine in self.engines.items():  # as every engine does at first
            self.cluster.apply(SnapshotReceived(worker_id, full(engine, 0, [], []), 0.0))

    def arrive(self, job: Job, step: int) -> None:
        request = Request(token(job.number), "default", job.prompt_tokens, arrival_s=step)
        self.jobs[request.id] = job
        self.cluster.apply(Arrived(request))
        self.decider.pool.add(request)

    def decide(self, step: int) -> None:
        for assignment in self.decider.decide(step, lambda: 0.0):
            self.decider.pool.remove(assignment.request_id)
            self.cluster.apply(Dispatched(assignment.request_id, assignment.worker_id))
            job = self.jobs[assignment.request_id]
            admitted = EngineRequest(part(job.number), job.prompt_tokens, job.output_tokens)
            self.engines[assignment.worker_id].add(admitted)

    def step(self, step: int, snapshot: Snapshots) -> list[int]:
        loads = []
        for worker_id, engine in self.engines.items():
            entered = list(engine.schedule().admitted)
            loads.append(engine.load_tokens)
            message = snapshot(engine, step, engine.advance(), entered)
            complete = self.cluster.apply(SnapshotReceived(worker_id, message, 0.0))
            self.decider.learn(step_complete=complete)
        return loads


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
def test_the_same_loads_at_every_step(
    policy: str, signal: str | None, snapshots: Snapshots
) -> None:
    horizon = 0 if signal in ("none", None) else 6
    config = DecodeConfig(
        policy=policy,
        lengths=LENGTHS,
        workers=WORKERS,
        slots=SLOTS,
        pool=POOL,
        steps=STEPS,
        warmup=0,
        deadline_steps=DEADLINE,
        horizon=horizon,
        discount=0.7,
        tie_weight=0.1,
        lead_tokens=20,
        knowledge=Knowledge.parse(signal or "none"),
        overcommit=0,
    )
    simulated = simulate(config, stream=stream(7), keep_records=True).records
    assert simulated is not None

    look_ahead = None
    if signal is not None:
        look_ahead = LookAhead(
            SIGNALS[signal](WorkProfile()), None, horizon, 0.7, tie_weight=0.1, lead_tokens=20
        )
    live, source = Live(policy, look_ahead), stream(7)
    for step in range(STEPS):
        for job in source.due(math.inf, len(live.decider.pool)):
            live.arrive(job, step)
        live.decide(step)
        assert live.step(step + 1, snapshots) == simulated.loads[step].tolist(), step
    assert live.decider.stats.policy_errors == 0
    assert len(list(islice(live.jobs, 2 * WORKERS * SLOTS))) == 2 * WORKERS * SLOTS
