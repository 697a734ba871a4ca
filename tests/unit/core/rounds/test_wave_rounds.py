"""Rounds of a group whose workers compute prompts and wait for each other."""

from collections.abc import Callable
from typing import Any

import pytest

from router.core.events import (
    Arrived,
    Dispatched,
    Ended,
    FeedStale,
    Progressed,
    SnapshotReceived,
    WorkerDown,
    WorkerUp,
)
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
from tests.support.core import part, running, snapshot, token

SLOTS = 2
COST = StepTime(5e-3, 1e-7, 0.0, 1e-5)
PATIENCE = 50.0


class Rounds:
    """Three workers with two slots each, all full; five more requests wait.

    Workers tell of their steps, unless ``told`` is false.
    """

    def __init__(
        self,
        *,
        beta: float = 100.0,
        cost: StepTime | None = COST,
        lockstep: bool = True,
        policy: Policy | None = None,
        overcommit: int | None = None,
        workers: str = "abc",
        told: bool = True,
    ) -> None:
        names = ["default"] if lockstep else []
        specs = [WorkerSpec(i, i, slots=SLOTS) for i in workers]
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
        self.serial = self.steps = 0
        self.together, self.told = lockstep, told
        self.arrive(len(specs) * SLOTS)
        assert self.entered(0) == len(specs) * SLOTS
        if self.decider.overcommit.imposed:
            return
        self.arrive(5)

    def arrive(self, count: int, prompt_tokens: int = 1000, **traits: Any) -> None:
        for _ in range(count):
            self.serial += 1
            sent = Request(token(self.serial), "default", prompt_tokens, **traits)
            self.cluster.apply(Arrived(sent))
            self.decider.pool.add(sent)

    def empty_pool(self) -> None:
        for request in list(self.decider.pool):
            self.decider.pool.remove(request.id)

    def end(self, *workers: str) -> None:
        for worker in workers:
            self.cluster.apply(Ended(self.on[worker].pop(), Outcome.COMPLETED))
        self.step(0.0)

    def step(self, seconds: float) -> None:
        """One of all workers; without a barrier, one of each."""
        self.steps += 1
        for worker, requests in self.on.items() if self.told else ():
            self.steps += not self.together
            shown = [running(part(int(each[3:], 16)), 1000, 1) for each in requests]
            message = snapshot("full", self.steps, *shown, slots=SLOTS, step_s=seconds)
            complete = self.cluster.apply(SnapshotReceived(worker, message, 0.0))
            self.decider.learn(step_complete=complete)

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


def test_a_wave_enters_once_its_empty_slots_have_cost_half_of_its_delay() -> None:
    rounds = Rounds()
    rounds.end("a")
    delay_s = COST.work_s(1000, 1, 1000) * 2 / 3
    wait_s = delay_s / 2 * 3 * SLOTS  # a sixth of the slots is empty
    assert rounds.entered(1) == 0
    rounds.step(0.9 * wait_s)
    assert rounds.entered(1) == 0
    rounds.step(0.2 * wait_s)
    assert rounds.entered(1) == 1
    rounds.end("b")
    assert rounds.entered(1) == 0, "the next wave pays for itself"


def full(rounds: Rounds) -> None:
    """The wave has entered, and later another slot becomes free."""
    rounds.end("b", "c")
    assert rounds.entered(1) == 3
    rounds.step(60.0)
    assert rounds.entered(1) == 0
    rounds.end("a")


def closed(rounds: Rounds) -> None:
    """The worker with the free slot takes nothing for a while."""
    worker = rounds.decider.group.workers["a"]
    worker.drain(draining=True)
    assert rounds.entered(1) == 0
    rounds.step(60.0)
    worker.drain(draining=False)


def unfit(rounds: Rounds) -> None:
    """Only requests wait that the worker with the free slot cannot serve."""
    rounds.empty_pool()
    rounds.arrive(5, lacks=frozenset("a"))
    assert rounds.entered(1) == 0
    rounds.step(60.0)
    rounds.arrive(5)


@pytest.mark.parametrize("passes", [full, closed, unfit])
def test_time_in_which_no_slot_waits_for_others_costs_nothing(
    passes: Callable[[Rounds], None],
) -> None:
    rounds = Rounds()
    rounds.end("a")
    assert rounds.entered(1) == 0
    passes(rounds)
    assert rounds.entered(1) == 0
    assert rounds.decider.stats.held_rounds == 2


def idle(rounds: Rounds) -> None:
    """All requests end, and the workers tell so."""
    rounds.end(*"abc" * SLOTS)


def silent(rounds: Rounds) -> None:
    """All feeds are lost; the last steps told of a barrier."""
    rounds.end("a")
    for worker in "abc":
        rounds.cluster.apply(FeedStale(worker))
    assert rounds.decider.group.barrier


def restarted(rounds: Rounds) -> None:
    """Their engines start anew, empty."""
    for worker in "abc":
        rounds.cluster.apply(WorkerDown(worker, "restarted"))
        while rounds.on[worker]:
            rounds.cluster.apply(Ended(rounds.on[worker].pop(), Outcome.FAILED))
    for worker in "abc":
        rounds.cluster.apply(WorkerUp(worker))


def untold(rounds: Rounds) -> None:
    """No worker has ever told of a step; a slot is free."""
    rounds.end("a")


@pytest.mark.parametrize(
    ("happens", "told", "free"),
    [(idle, True, 6), (silent, True, 1), (restarted, True, 6), (untold, False, 1)],
)
def test_nobody_waits_for_steps_that_do_not_come(
    happens: Callable[[Rounds], None], told: bool, free: int
) -> None:
    rounds = Rounds(told=told)
    rounds.empty_pool()
    for tokens in (9000, 70, 3000, 500, 123, 17, 2000):
        rounds.arrive(1, tokens)
    happens(rounds)
    assert rounds.entered(1) == free
    assert rounds.decider.stats.held_rounds == 0


def test_a_lone_worker_makes_nobody_wait() -> None:
    rounds = Rounds(workers="a", cost=StepTime(5e-3, 1e-7, 4e-5, 5e-5))
    for _ in range(4):
        rounds.end("a")
        assert rounds.entered(1) == 1


@pytest.mark.parametrize(
    "later",
    [{"priority": 1}, {"avoid": frozenset("b")}],
    ids=["of lower priority", "failed"],
)
def test_a_request_that_is_late_is_not_held_back_with_others(later: dict[str, Any]) -> None:
    rounds = Rounds()
    rounds.empty_pool()
    rounds.end("a", "a")
    now = 2 * PATIENCE
    rounds.arrive(1, arrival_s=now)
    assert rounds.entered(now) == 1, "there is room for all"
    rounds.arrive(1, arrival_s=now)
    rounds.arrive(2, arrival_s=now, priority=2)
    assert rounds.entered(now) == 0
    rounds.end("a")
    assert rounds.entered(now) == 0
    rounds.arrive(1, arrival_s=now - PATIENCE, **later)
    assert rounds.entered(now) == 2


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
