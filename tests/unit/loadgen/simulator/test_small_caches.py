"""Prompts before engines with little memory: conversations keep their caches, nobody starves."""

import random
from collections.abc import Sequence
from itertools import count
from statistics import mean
from typing import Any

from loadgen.simulator.serving.serving_config import ServingConfig
from loadgen.simulator.serving.serving_results import ServingResult
from loadgen.simulator.serving.serving_simulation import simulate_serving
from loadgen.traces.arrivals import Arrivals
from loadgen.traces.trace import Trace, TraceRequest
from router.core.policies.policy_protocol import NOTHING, Known, Policy
from router.core.policies.policy_table import POLICIES, PolicySettings
from router.core.step_time import StepTime
from router.core.types import Assignment, Dispatch, Request, WorkerView

BLOCK_TOKENS, ANSWER_TOKENS = 32, 64
CONVERSATIONS, TURNS = 10, 6
# About those of a small model on a CPU: a prompt may take longer than patience lasts.
SLOW = StepTime(0.03, 1e-6, 4e-3, 1.8e-3)
LARGE = 18_000


class Sticky(Policy):
    """Gives every other conversation to each engine, as a client that knows them does."""

    def assign(
        self, waiting: Sequence[Request], workers: Sequence[WorkerView], known: Known = NOTHING
    ) -> Sequence[Assignment]:
        numbers = [int(request.id.removeprefix("es-"), 16) for request in waiting]
        return [
            Assignment(request.id, workers[number % CONVERSATIONS % 2].id)
            for request, number in zip(waiting, numbers, strict=True)
        ]


class Entries(Policy):
    """bfio; it notes how long the large request has waited."""

    solves = True

    def __init__(self) -> None:
        self._policy = POLICIES["bfio"].make(PolicySettings())
        self.waited_s: float | None = None
        self.after = 0  # requests that enter after it

    def assign(
        self, waiting: Sequence[Request], workers: Sequence[WorkerView], known: Known = NOTHING
    ) -> Sequence[Assignment]:
        found = self._policy.assign(waiting, workers, known)
        sent = {each.request_id for each in found}
        for request in waiting:
            if request.id in sent and request.prompt_tokens == LARGE:
                self.waited_s = known.now_s - request.arrival_s
            self.after += request.id in sent and self.waited_s is not None
        return found


def conversations(seed: int) -> Trace:
    """Their turns take turns; each repeats what was said before it."""
    rng, ids = random.Random(seed), count()
    sizes, chains = [2000] * CONVERSATIONS, [list[int]() for _ in range(CONVERSATIONS)]
    rows = []
    for _ in range(TURNS):
        for number, chain in enumerate(chains):
            sizes[number] += rng.randrange(500, 930)
            while len(chain) < sizes[number] // BLOCK_TOKENS:
                chain.append(next(ids))
            blocks = tuple(chain)
            rows.append(TraceRequest(sizes[number], ANSWER_TOKENS, None, blocks, BLOCK_TOKENS))
            sizes[number] += ANSWER_TOKENS
    return Trace("made", "Mooncake", tuple(rows))


def served(policy: Policy, trace: Trace, arrivals: Arrivals, **facts: Any) -> ServingResult:
    config = ServingConfig(
        policy="least_tokens" if isinstance(policy, Sticky) else "bfio",
        trace=trace,
        arrivals=arrivals,
        requests=len(trace.requests),
        workers=2,
        barrier=False,
        kv_tokens=20_000,
        block_tokens=BLOCK_TOKENS,
        step_time=SLOW,
        warmup=0.0,
        **{"slots": 12, **facts},
    )
    return simulate_serving(config, policy=policy)


def test_conversations_find_more_than_if_each_stayed() -> None:
    """Caches hold three of the five conversations that stay at an engine."""
    shares, ttfts = [], []
    for seed in range(4):
        trace, at = conversations(seed), Arrivals("poisson", 4.0)
        bfio = POLICIES["bfio"].make(PolicySettings())
        ours = served(bfio, trace, at, think=1.0, seed=seed)
        sticky = served(Sticky(), trace, at, think=1.0, seed=seed, dispatch=Dispatch.INSTANT)
        shares.append(ours.prefix_hit_share / sticky.prefix_hit_share)
        ttfts.append(ours.ttft_mean_s / sticky.ttft_mean_s)
    assert mean(shares) >= 1.1
    assert mean(ttfts) <= 0.95


def test_small_requests_do_not_keep_a_large_one_out() -> None:
    """Each takes the memory that becomes free, until the large one has waited for too long."""
    rows = [TraceRequest(1000, 100, 0.4 * number) for number in range(400)]
    rows[50] = TraceRequest(LARGE, 10, 0.4 * 50)
    policy = Entries()
    trace, at = Trace("made", "Mooncake", tuple(rows)), Arrivals("trace", 1.0)
    served(policy, trace, at, slots=256)
    assert policy.waited_s is not None
    assert policy.after > 200
