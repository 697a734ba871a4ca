"""Every policy of the pool with every admission policy: nobody waits for the other for ever.

The router's pool, rounds and memory beside emulated engines, in virtual time. As in the live
system, a request leaves the pool when a worker has a slot and admission would let it in, and then
waits in the engine until admission does.
"""

import random
from itertools import product

import pytest

from engine_patches.admission import ADMISSIONS, clearing_of, make_admission, read_admission
from loadgen.engine.engine import Engine
from loadgen.engine.queues import Eviction, PolicyOrder
from loadgen.engine.request import EngineRequest
from router.core.policies.policy_table import POLICIES, PolicySettings
from router.core.queue.pool import Pool
from router.core.rounds import assignment
from router.core.types import Request, WorkerView
from tests.support.core import request, token

KV_TOKENS, SLOTS, WORKERS = 200, 6, 3
REQUESTS = 40
STEP_S = 0.05
PATIENCE_S = 20.0
STEPS = 8000

PAIRS = list(product(POLICIES, ADMISSIONS))


@pytest.mark.parametrize(("policy", "admission"), PAIRS)
def test_everybody_is_served(policy: str, admission: str) -> None:
    world = World(policy, admission)
    steps = 0
    while world.left:
        assert steps < STEPS, f"{world.left} requests are left: {world.describe()}"
        world.step()
        steps += 1
    assert not any(engine.used_tokens for engine in world.engines)


@pytest.mark.parametrize("policy", POLICIES)
def test_small_requests_do_not_keep_a_large_one_out_for_ever(policy: str) -> None:
    """They come without end and lose patience too; memory runs out long before the slots do."""
    chooser = POLICIES[policy].make(PolicySettings())
    pool, ends = Pool(1000, 1.0), [[1, 3, 5, 7], [2, 4, 6, 8]]
    for number in range(30):
        pool.add(request(number, 200 if number else 700))
    for step in range(400):
        now_s = step * STEP_S
        ends = [[end for end in running if end > step] for running in ends]
        pool.add(request(step + 1000, 200, arrival=now_s))
        if step % 2:
            pool.add(request(step + 2000, 200, arrival=now_s))
        views = [
            WorkerView(
                id=str(number),
                load_tokens=200 * len(running),
                requests=len(running),
                capacity=50 - len(running),
                admissible_tokens=900 - 200 * len(running),
            )
            for number, running in enumerate(ends)
        ]
        tiers = pool.tiers(now_s, 100, assignment.gap_tokens(views))
        for id_, worker in assignment.assign(chooser, tiers, views, late_since=now_s - pool.bound):
            if id_ == token(0):
                return
            pool.remove(id_)
            ends[int(worker)].append(step + 8)
    pytest.fail("it never got in")


class World:
    """A pool before three engines, and requests of which some fill an engine's whole memory."""

    def __init__(self, policy: str, admission: str) -> None:
        rng = random.Random(3)
        settings = read_admission({"policy": admission})
        eviction = Eviction(clearing=clearing_of(settings))
        self.engines = [
            Engine(
                SLOTS,
                KV_TOKENS,
                chunk=64,
                queue=PolicyOrder(make_admission(settings)),
                eviction=eviction,
            )
            for _ in range(WORKERS)
        ]
        self.pool = Pool(REQUESTS, PATIENCE_S)
        self.policy = POLICIES[policy].make(PolicySettings())
        self.now_s = 0.0
        self.left = REQUESTS
        self.outputs: dict[str, int] = {}
        for number in range(REQUESTS):
            prompt = rng.choice([5, 20, 60, 190])
            self.outputs[token(number)] = rng.randint(1, min(60, KV_TOKENS - prompt))
            self.pool.add(request(number, prompt))

    def step(self) -> None:
        self._round()
        for engine in self.engines:
            engine.schedule(self.now_s)
            self.left -= len(engine.advance(self.now_s))
            assert engine.used_tokens <= KV_TOKENS + len(engine.running)
        self.now_s += STEP_S

    def describe(self) -> str:
        engines = [
            (len(one.running), one.waiting, one.used_tokens, one.admissible_blocks)
            for one in self.engines
        ]
        return f"{len(self.pool)} in the pool; engines (run, wait, hold, let in): {engines}"

    def _round(self) -> None:
        views = [self._view(number) for number in range(WORKERS)]
        capacity = sum(view.capacity for view in views)
        if not self.pool or not capacity:
            return
        tiers = self.pool.tiers(self.now_s, capacity, assignment.gap_tokens(views))
        late_since = self.now_s - self.pool.bound
        for request_id, worker_id in assignment.assign(
            self.policy, tiers, views, late_since=late_since
        ):
            one = self.pool.remove(request_id)
            assert one is not None
            self._send(one, int(worker_id))

    def _view(self, number: int) -> WorkerView:
        engine = self.engines[number]
        requests = len(engine.running) + engine.waiting
        return WorkerView(
            id=str(number),
            load_tokens=engine.load_tokens + engine.waiting_tokens,
            requests=requests,
            capacity=max(0, SLOTS - requests),
            waiting=engine.waiting,
            admissible_tokens=max(0, engine.admissible_blocks - engine.waiting_tokens),
        )

    def _send(self, one: Request, worker: int) -> None:
        output = self.outputs[one.id]
        self.engines[worker].add(
            EngineRequest(
                one.id, one.prompt_tokens, output, hint_tokens=output, arrived_s=self.now_s
            )
        )
