"""Emulated ranks in virtual time that compute prompts in chunks, under a load that is swept.

Their messages go to the router's own core, as far as they tell what a step has cost.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from loadgen.engine.engine import Engine
from loadgen.engine.request import EngineRequest
from loadgen.engine.stepping import Step, StepGroup, WorkerModel, WorkerStep
from loadgen.model.power_model import PowerModel
from router.core.events import SnapshotReceived, WorkerUp
from router.core.state.cluster import Cluster
from router.core.state.group import Group
from router.core.step_time import StepTime
from router.core.types import RunningRequest, Snapshot, WorkerSpec
from tests.support.core import part

COST = StepTime(5e-3, 9.5e-8, 40e-6, 5e-5)
RANKS, SLOTS, CHUNK = 8, 64, 512
MEAN_PROMPT, MEAN_OUTPUT = 1000, 150
# Requests a second at which slots are always taken, measured on these ranks.
FULL_RATE = 80.0
FROM, TO = 0.3, 1.1
"""Share of that rate at the first step, and at the last."""

Slowness = Callable[[], float]


@dataclass
class SweptRanks:
    """Ranks behind one barrier; every arrival goes to the rank with the fewest requests.

    Attributes:
        factor: of each step's seconds: noise, hiccups.
        time_waits: ranks tell how long they waited.
        group: the router's view of them.
        idle_s: seconds that ranks have really waited for the slowest.
    """

    seed: int
    cost: StepTime = COST
    factor: Slowness = lambda: 1.0
    time_waits: bool = False
    group: Group = field(init=False)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)
        self._models = [
            WorkerModel(rank, Engine(SLOTS, 1_000_000, chunk=CHUNK + SLOTS, prompt_budget=CHUNK))
            for rank in range(RANKS)
        ]
        self._ranks = StepGroup(self._models, self.cost, PowerModel())
        self._cluster = Cluster([WorkerSpec(str(rank), "") for rank in range(RANKS)])
        self.group = self._cluster.groups["default"]
        for rank in range(RANKS):
            self._cluster.apply(WorkerUp(str(rank)))
            self._tell(rank, Snapshot("full", "default", str(rank), rank, "e", 1, 0, 0.0, 0.0))
        self._now_s = self._next_s = 0.0
        self._requests = 0
        self._prefilling: dict[int, set[str]] = {rank: set() for rank in range(RANKS)}
        self.idle_s = 0.0

    def take(self, steps: int) -> Iterator[Step]:
        """Steps under a rate that rises from ``FROM`` to ``TO``."""
        for number in range(steps):
            rate = FULL_RATE * (FROM + (TO - FROM) * number / steps)
            while self._next_s <= self._now_s or not self._ranks.unfinished:
                self._now_s = max(self._now_s, self._next_s)
                self._arrive()
                self._next_s += self._rng.exponential(1 / rate)
            step = self._ranks.begin(self._now_s)
            step = replace(step, seconds=step.seconds * self.factor())
            ended = self._ranks.finish(step, self._now_s)
            self._now_s += step.seconds
            slowest_s = max(each.needed_s for each in step.parts)
            self.idle_s += sum(slowest_s - each.needed_s for each in step.parts)
            for each, done in zip(step.parts, ended, strict=True):
                self._say(step, each, tuple(request.id for request in done))
            yield step

    def _arrive(self) -> None:
        self._requests += 1
        prompt = int(self._rng.lognormal(math.log(MEAN_PROMPT) - 0.32, 0.8)) + 1
        output = int(self._rng.geometric(1 / MEAN_OUTPUT))
        engines = [model.engine for model in self._models]
        fewest = min(engines, key=lambda engine: len(engine.running) + engine.waiting)
        fewest.add(EngineRequest(part(self._requests), min(prompt, 20_000), output))

    def _say(self, step: Step, each: WorkerStep, finished: tuple[str, ...]) -> None:
        """What a plug-in says: the requests that are new, or did not grow by one token."""
        rank, schedule = each.worker.rank, each.schedule
        told = {*schedule.admitted, *self._prefilling[rank]} - {*finished}
        running = {request.id: request for request in each.engine.running if request.id in told}
        self._prefilling[rank] = {i for i, request in running.items() if request.prefill_left}
        message = Snapshot(
            "delta",
            "default",
            str(rank),
            rank,
            "e",
            step.number + 1,
            step.number,
            self._now_s,
            step.seconds,
            running=tuple(
                RunningRequest(i, r.prompt_tokens, r.generated_tokens, 0, r.prefill_left)
                for i, r in running.items()
            ),
            finished=finished,
            preempted=schedule.preempted,
            slots=SLOTS,
            scheduled_prefill_tokens=schedule.prefill_tokens,
            scheduled_decode_tokens=schedule.decode_tokens,
            waited_s=step.seconds * (1 - each.needed_s / max(e.needed_s for e in step.parts))
            if self.time_waits
            else None,
        )
        self._tell(rank, message)

    def _tell(self, rank: int, message: Snapshot) -> None:
        self._cluster.apply(SnapshotReceived(str(rank), message, message.time_s))
