"""A flood of requests that share a long prefix, beside others: nobody starves."""

import random
from collections.abc import Sequence

from loadgen.simulator.serving.serving_config import ServingConfig
from loadgen.simulator.serving.serving_simulation import simulate_serving
from loadgen.traces.arrivals import Arrivals
from loadgen.traces.trace import Trace, TraceRequest
from router.core.policies.policy_protocol import NOTHING, Known, Policy
from router.core.policies.policy_table import POLICIES, PolicySettings
from router.core.step_time import StepTime
from router.core.types import Assignment, Dispatch, Request, WorkerView

PATIENCE_S = 1.0
SHARED = tuple(range(32))  # blocks of 512 tokens
FLOODING, OTHER = 32 * 512 + 500, 4000


class Waits(Policy):
    """bfio; it notes how long each request has waited in the pool, by the size of its prompt."""

    solves = True
    looks_ahead = True

    def __init__(self) -> None:
        self._policy = POLICIES["bfio"].make(PolicySettings())
        self.longest_s = {FLOODING: 0.0, OTHER: 0.0}

    def assign(
        self, waiting: Sequence[Request], workers: Sequence[WorkerView], known: Known = NOTHING
    ) -> Sequence[Assignment]:
        asked = {each.id: each for each in waiting}
        found = self._policy.assign(waiting, workers, known)
        for each in found:
            request = asked[each.request_id]
            waited_s = known.now_s - request.arrival_s
            kind = request.prompt_tokens
            self.longest_s[kind] = max(self.longest_s[kind], waited_s)
        return found


def longest_waits(flood: int) -> tuple[float, float]:
    """Of the flood, so many a second, and of ten others a second, for six seconds."""
    rng, at_s, rows = random.Random(0), 0.0, list[TraceRequest]()
    while at_s < 6:
        at_s += rng.expovariate(flood + 10)
        own = 1000 + 10 * len(rows)
        if rng.random() < flood / (flood + 10):
            rows.append(TraceRequest(FLOODING, 20, at_s, (*SHARED, own)))
        else:
            rows.append(TraceRequest(OTHER, 50, at_s, tuple(range(own, own + 8))))
    policy = Waits()
    config = ServingConfig(
        policy="bfio",
        trace=Trace("made", "Mooncake", tuple(rows)),
        arrivals=Arrivals("trace", 1.0),
        requests=len(rows),
        workers=8,
        slots=64,
        kv_tokens=600_000,
        batch_tokens=2112,
        prompt_budget=2048,
        step_time=StepTime(5e-3, 9.5e-8, 0, 5e-5),
        dispatch=Dispatch.POOL,
        starvation_s=PATIENCE_S,
        warmup=0.0,
    )
    simulate_serving(config, policy=policy)
    return policy.longest_s[FLOODING], policy.longest_s[OTHER]


def test_a_flood_that_workers_can_serve_makes_nobody_wait_beyond_patience() -> None:
    assert max(longest_waits(70)) <= PATIENCE_S


def test_where_workers_cannot_serve_all_the_others_wait_no_longer_than_the_flood() -> None:
    flood_s, others_s = longest_waits(150)
    assert flood_s > PATIENCE_S
    assert others_s <= 1.15 * flood_s
