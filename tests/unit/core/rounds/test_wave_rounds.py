"""Rounds of a group whose workers compute prompts and wait for each other."""

from __future__ import annotations

import pytest

from router.core.events import Arrived, Dispatched, Ended, Progressed, WorkerUp
from router.core.forecast.end_signals import NoSignal
from router.core.forecast.forecast import WorkProfile
from router.core.forecast.look_ahead import LookAhead
from router.core.policies.baselines import PerRequest, fcfs
from router.core.policies.bfio.policy import BfIo
from router.core.policies.policy_protocol import Policy
from router.core.queue.pool import Pool
from router.core.rounds.decider import Decider
from router.core.rounds.overcommit import Overcommit
from router.core.state.cluster import Cluster
from router.core.step_time import StepTime
from router.core.types import Dispatch, Outcome, Request, WorkerSpec
from tests.support.core import token

SLOTS = 2
COST = StepTime(5e-3, 1e-7, 0.0, 1e-5)
PATIENCE = 50.0


class Rounds:
    """Three workers with two slots each, all full; five more requests wait."""

    def __init__(
        self,
        *,
        beta: float = 100.0,
        cost: StepTime | None = COST,
        lockstep: bool = True,
        policy: Policy | None = None,
        overcommit: int | None = None,
    ) -> None:
        names = ["default"] if lockstep else []
        specs = [WorkerSpec(i, i, slots=SLOTS) for i in "abc"]
        self.cluster = Cluster(specs, names, step_time=cost)
        for spec in specs:
            self.cluster.apply(WorkerUp(spec.id))
        profile = WorkProfile(prefill_beta=beta)
        self.decider = Decider(
            self.cluster.groups["default"],
            Pool(100, PATIENCE),
            policy or BfIo(0.1),
            PerRequest(fcfs),
            Dispatch.POOL,
            LookAhead(NoSignal(), profile),
            Overcommit(overcommit),
        )
        self.on: dict[str, list[str]] = {spec.id: [] for spec in specs}
        self.serial = 0
        self.arrive(3 * SLOTS)
        assert self.entered(0) == 3 * SLOTS
        if self.decider.overcommit.imposed:
            return
        self.arrive(5)

    def arrive(self, count: int) -> None:
        for _ in range(count):
            self.serial += 1
            sent = Request(token(self.serial), "default", 1000)
            self.cluster.apply(Arrived(sent))
            self.decider.pool.add(sent)

    def end(self, *workers: str) -> None:
        for worker in workers:
            self.cluster.apply(Ended(self.on[worker].pop(), Outcome.COMPLETED))

    def entered(self, now: float) -> int:
        chosen = self.decider.decide(now, lambda: now)
        for request_id, worker_id in chosen:
            self.decider.pool.remove(request_id)
            self.cluster.apply(Dispatched(request_id, worker_id))
            self.on[worker_id].append(request_id)
            self.cluster.apply(Progressed(request_id, 1))  # its prompt is computed
        return len(chosen)


def test_a_lone_prompt_waits_for_partners() -> None:
    rounds = Rounds()
    rounds.end("a")
    assert rounds.entered(1) == 0
    assert rounds.decider.stats.held_rounds == 1
    assert rounds.decider.solved is None
    rounds.end("b", "c")
    assert rounds.entered(2) == 3, "on all workers alike they delay nobody"
    assert rounds.decider.stats.held_rounds == 1


def test_nobody_waits_where_there_is_room_for_all() -> None:
    rounds = Rounds()
    rounds.end("a", "a", "b", "b", "c")
    assert rounds.entered(1) == 5


def test_nobody_waits_beyond_their_patience() -> None:
    rounds = Rounds()
    rounds.end("a")
    assert rounds.entered(PATIENCE - 1) == 0
    assert rounds.entered(PATIENCE) == 1


@pytest.mark.parametrize(
    "rounds",
    [
        Rounds(beta=0.0),
        Rounds(cost=None),
        Rounds(lockstep=False),
        Rounds(policy=PerRequest(fcfs)),
    ],
    ids=["no prompts", "cost unknown", "no barrier", "another policy"],
)
def test_elsewhere_requests_enter_one_by_one(rounds: Rounds) -> None:
    rounds.end("a")
    assert rounds.entered(1) == 1
    assert rounds.decider.stats.held_rounds == 0


def test_an_overcommit_that_is_fixed_holds() -> None:
    rounds = Rounds(overcommit=1)
    rounds.arrive(9)
    assert rounds.entered(1) == 3
    assert rounds.decider.stats.held_rounds == 0
