"""However others arrive, and whatever is known of their lengths, a giant gets in."""

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.core.forecast.end_signals import CapSignal, Departure, NoSignal, Signal, SurvivalSignal
from router.core.forecast.forecast import NO_CAP, Running, WorkProfile
from router.core.forecast.look_ahead import LookAhead
from router.core.policies.policy_table import POLICIES, PolicySettings
from router.core.queue.pool import Pool
from router.core.rounds import assignment
from router.core.rounds.backfill import Backfill
from router.core.types import Request, WorkerView
from tests.support.core import request, token

MEMORY, SLOTS, LONGEST, PATIENCE, WAITING = 1000, 30, 25, 10, 60
STILL = WorkProfile(growth=0)
GIANT = token(0)


def survival(output: int) -> SurvivalSignal:
    """It has seen this length alone, whether or not that is true."""
    signal = SurvivalSignal(STILL)
    for _ in range(2000):
        signal.ended(Departure(1, 50, output, True, NO_CAP))
    signal.advance(256)
    signal.observe(running_of([[]], [0]))
    return signal


SIGNALS: Mapping[str, Callable[[], Signal]] = {
    "caps": lambda: CapSignal(STILL),
    "nothing": lambda: NoSignal(STILL),
    "short": lambda: survival(2),
    "long": lambda: survival(200),
}


@dataclass
class Run:
    """A request that runs."""

    number: int
    tokens: int
    cap: int
    ends: int
    began: int


def running_of(workers: list[list[Run]], places: Iterable[int], step: int = 0) -> Running:
    here = [(place, one) for place in places for one in workers[place]]
    rows = [(one.number, i, one.tokens, step - one.began, one.cap) for i, one in here]
    number, worker, tokens, age, cap = np.array(rows, dtype=np.int64).reshape(-1, 5).T
    none = np.zeros(len(here), dtype=np.int64)
    untold = np.full(len(here), np.nan)
    return Running(number, worker, tokens, age, cap, untold, none, none)


@dataclass
class World:
    """A pool that is never empty before workers whose memory is full."""

    rng: random.Random
    workers: list[list[Run]]
    signal: Signal
    policy: str
    caps: bool
    pool: Pool = field(default_factory=lambda: Pool(10_000, PATIENCE))
    arrived: int = 1
    step_: int = 0

    def __post_init__(self) -> None:
        self.backfill = Backfill(self.running, LookAhead(self.signal, STILL))

    def running(self, places: Iterable[int]) -> Running:
        return running_of(self.workers, places, self.step_)

    def arrive(self, step: int) -> None:
        while len(self.pool) < WAITING:
            one = request(self.arrived, self.rng.choice([5, 20, 60, 200]), arrival=step)
            cap = self.rng.randint(1, LONGEST) if self.caps else None
            self.pool.add(replace(one, max_tokens=cap))
            self.arrived += 1

    def step(self, step: int) -> bool:
        """True once the giant has entered."""
        self.workers = [[one for one in each if one.ends > step] for each in self.workers]
        self.arrive(step)
        views = [self.view(i) for i in range(len(self.workers))]
        self.step_ = step
        self.backfill.begin(self.backfill.look_ahead, step, 1.0, self.pool.__contains__)
        tiers = self.pool.tiers(step, sum(view.capacity for view in views), 0)
        done = assignment.assign(
            POLICIES[self.policy].make(PolicySettings(moves=300)),
            tiers,
            views,
            late_since=step - self.pool.bound,
            backfill=self.backfill,
        )
        for request_id, worker_id in done:
            one = self.pool.remove(request_id)
            assert one is not None
            self.run(one, int(worker_id), step)
        return GIANT not in self.pool

    def run(self, one: Request, worker: int, step: int) -> None:
        cap = one.max_tokens or NO_CAP
        output = self.rng.randint(1, min(LONGEST, cap))
        number = int(one.id.removeprefix("es-"), 16)
        here = self.workers[worker]
        alone = not here
        here.append(Run(number, one.prompt_tokens, cap, step + output, step))
        assert alone or sum(each.tokens for each in here) <= MEMORY
        assert len(here) <= SLOTS

    def view(self, worker: int) -> WorkerView:
        here = self.workers[worker]
        load = sum(one.tokens for one in here)
        plain = WorkerView(str(worker), load, len(here), SLOTS - len(here))
        return msgspec.structs.replace(plain, admissible_tokens=MEMORY - load)


@pytest.mark.parametrize("knows", SIGNALS)
@given(
    seed=st.integers(0, 2**32),
    workers=st.integers(1, 3),
    size=st.integers(300, MEMORY),
    policy=st.sampled_from(["bfio", "least_tokens", "fcfs"]),
    caps=st.booleans(),
)
@example(seed=1, workers=2, size=681, policy="least_tokens", caps=False)
@settings(max_examples=25, deadline=None)
def test_a_giant_waits_at_most_its_bound_and_twice_the_longest_request(
    knows: str, seed: int, workers: int, size: int, policy: str, caps: bool
) -> None:
    """What runs when its worker is reserved ends in that time, then what was let in beside it.

    Where nothing is known it is alone: nothing enters beside it.
    """
    fleet: list[list[Run]] = [[] for _ in range(workers)]
    world = World(random.Random(seed), fleet, SIGNALS[knows](), policy, caps)
    for step in range(-LONGEST, 0):
        world.step(step)
    for one in list(world.pool):  # of which none is older
        world.pool.remove(one.id)
    world.pool.add(request(0, size, arrival=0))
    times = 1 if knows == "nothing" and not caps else 2
    until = PATIENCE + times * LONGEST
    assert any(world.step(step) for step in range(until + 1)), "it still waits"
