"""The rules that weigh prompts to compute and cached prefixes choose as their formulas say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from router.core.policies import prompts
from router.core.policies.baselines import Choose, PerRequest
from router.core.policies.policy_protocol import Known
from router.core.policies.policy_table import POLICIES, PolicySettings
from router.core.rounds import assignment
from router.core.step_time import StepTime
from router.core.types import Request, WorkerView
from tests.support.core import pairs, request, requests, views

STEP_TIME = StepTime(5e-3, 1e-7, per_prompt_token_s=5e-5)


@dataclass(frozen=True)
class Round:
    """One request of ``prompt`` tokens, the workers, and what each has cached of it."""

    prompt: int
    workers: list[WorkerView]
    hits: list[int]
    step_time: StepTime | None = STEP_TIME

    def pending(self, i: int) -> int:
        return self.workers[i].pending_prompt_tokens + self.prompt - self.hits[i]

    def chosen(self, policy: str | Choose) -> int:
        if isinstance(policy, str):
            rule = POLICIES[policy].make(PolicySettings())
        else:
            rule = PerRequest(policy)
        known = Known(step_time=self.step_time, hits=lambda _: self.hits)
        (done,) = rule.assign([request(0, self.prompt)], self.workers, known)
        return [worker.id for worker in self.workers].index(done.worker_id)


def a_round(prompt: int, rows: Sequence[Sequence[int]], step_time: StepTime | None) -> Round:
    """Rows: load, requests, pending, waiting, thousandths of KV memory used and of hits."""
    workers = [
        replace(view, pending_prompt_tokens=row[2], waiting=row[3], kv_usage=row[4] / 1000)
        for view, row in zip(
            views([row[0] for row in rows], 9, [row[1] for row in rows]), rows, strict=True
        )
    ]
    return Round(prompt, workers, [prompt * row[5] // 1000 for row in rows], step_time)


COSTS = st.one_of(
    st.none(),
    st.builds(
        StepTime,
        st.just(5e-3),
        st.sampled_from([0.0, 9.5e-8]),
        per_prompt_token_s=st.sampled_from([0.0, 5e-6, 5e-5]),
    ),
)
NUMBERS = (90_000, 150, 40_000, 9, 1000, 1000)
ROUNDS = st.builds(
    a_round,
    st.integers(0, 20_000),
    st.lists(st.tuples(*(st.integers(0, most) for most in NUMBERS)), min_size=1, max_size=6),
    COSTS,
)


def barrier_time(seen: Round) -> list[tuple[float, float]]:
    cost = seen.step_time
    if cost is None or not cost.per_prompt_token_s:
        cost = StepTime(0.0, 1.0, per_prompt_token_s=200.0)
    fullest = max(worker.load_tokens for worker in seen.workers)
    return [
        (
            cost.per_prompt_token_s * seen.pending(i)
            + 50 * cost.per_token_s * max(0, worker.load_tokens + seen.prompt - fullest),
            worker.load_tokens,
        )
        for i, worker in enumerate(seen.workers)
    ]


def least_prefill(seen: Round) -> list[tuple[float, float]]:
    return [(seen.pending(i), worker.requests) for i, worker in enumerate(seen.workers)]


def kv_cost(seen: Round) -> list[tuple[float, float]]:
    return [(seen.pending(i) + worker.load_tokens, 0) for i, worker in enumerate(seen.workers)]


def lmetric(seen: Round) -> list[tuple[float, float]]:
    return [(seen.pending(i) * (worker.requests + 1), 0) for i, worker in enumerate(seen.workers)]


@pytest.mark.parametrize("cost", [barrier_time, least_prefill, kv_cost, lmetric])
@given(seen=ROUNDS)
def test_the_first_worker_of_least_cost(
    cost: Callable[[Round], list[tuple[float, float]]], seen: Round
) -> None:
    costs = cost(seen)
    assert seen.chosen(cost.__name__) == costs.index(min(costs))


@given(seen=ROUNDS)
def test_prefix_score(seen: Round) -> None:
    queues = [worker.waiting for worker in seen.workers]
    spread = max(queues) - min(queues)
    scores = [
        3 * seen.hits[i] / max(1, seen.prompt)
        + 2 * ((max(queues) - queues[i]) / spread if spread else 1)
        + 2 * (1 - worker.kv_usage)
        for i, worker in enumerate(seen.workers)
    ]
    assert scores[seen.chosen("prefix_score")] == pytest.approx(max(scores))


@given(seen=ROUNDS)
def test_cache_aware(seen: Round) -> None:
    counts = [worker.requests for worker in seen.workers]
    unbalanced = max(counts) - min(counts) > 64 and max(counts) > 1.5 * min(counts)
    longest = max(seen.hits)
    among = list(range(len(counts)))
    if not unbalanced and longest > 0.3 * seen.prompt:
        among = [i for i in among if seen.hits[i] == longest]
    assert seen.chosen("cache_aware") == min(among, key=counts.__getitem__)


def test_among_equal_scores_one_is_drawn() -> None:
    seen = a_round(100, [(0,) * 6] * 4, None)
    choose = prompts.prefix_score(seed=3)
    assert {seen.chosen(choose) for _ in range(40)} == {0, 1, 2, 3}


def test_peers_rules_take_other_weights() -> None:
    seen = a_round(100, [(900, 1, 0, 0, 900, 0), (0, 1, 500, 0, 0, 0)], None)
    assert (seen.chosen(prompts.kv_cost()), seen.chosen(prompts.kv_cost(3))) == (1, 0)
    cached = a_round(100, [(0, 0, 0, 0, 0, 400), (0, 9, 0, 0, 900, 900)], None)
    assert cached.chosen(prompts.prefix_score(0, memory=0)) == 1
    assert cached.chosen(prompts.prefix_score(0)) == 0
    assert cached.chosen(prompts.cache_aware()) == 1
    assert cached.chosen(prompts.cache_aware(balance_abs=8)) == 0


@pytest.mark.parametrize("name", ["barrier_time", "least_prefill", "lmetric"])
def test_prompts_of_one_round_spread_and_the_cached_part_is_free(name: str) -> None:
    """Each placement counts for the next, within a tier and between tiers."""

    def hits(asked: Request) -> Sequence[int]:
        return [0, 900 if asked.prompt_tokens == 1000 else 0]

    waiting = requests([1000, 150, 300])
    policy = POLICIES[name].make(PolicySettings())
    known = Known(step_time=STEP_TIME, hits=hits)
    # 100 of 1,000 tokens are left to b; with them it has less to do than a has with 150 more.
    done = policy.assign(waiting, views([0, 0], 9), known)
    assert pairs(done, waiting)[0] == (0, "b")
    apart = assignment.assign(policy, [[one] for one in waiting], views([0, 0], 9), known)
    assert apart == list(done)


def test_a_prompt_computed_elsewhere_leaves_the_load_alone_to_decide() -> None:
    waiting, workers = requests([500]), views([40, 30, 90], 9)
    known = Known(step_time=STEP_TIME, hits=lambda one: [one.prompt_tokens] * 3)
    done = POLICIES["barrier_time"].make(PolicySettings()).assign(waiting, workers, known)
    assert pairs(done, waiting) == [(0, "b")]
