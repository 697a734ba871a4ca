"""The rules that weigh prompts to compute and cached prefixes choose as their formulas say."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
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
    """One request of ``prompt`` tokens a slot, the workers, and what each has cached of it."""

    prompt: int
    workers: list[WorkerView]
    hits: list[int]
    step_time: StepTime | None = STEP_TIME
    slots: int = 1

    @property
    def open(self) -> list[int]:
        return [i for i, worker in enumerate(self.workers) if worker.capacity]

    def pending(self, i: int) -> int:
        return self.workers[i].pending_prompt_tokens + self.slots * (self.prompt - self.hits[i])

    def chosen(self, policy: str | Choose) -> int:
        if isinstance(policy, str):
            rule = POLICIES[policy].make(PolicySettings())
        else:
            rule = PerRequest(policy)
        known = Known(step_time=self.step_time, hits=lambda _: self.hits)
        (done,) = rule.assign([request(0, self.prompt, slots=self.slots)], self.workers, known)
        return [worker.id for worker in self.workers].index(done.worker_id)


def a_round(
    prompt: int,
    rows: Sequence[Sequence[int]],
    step_time: StepTime | None,
    full: Set[int] = frozenset(),
    slots: int = 1,
) -> Round:
    """Rows: load, requests, pending, waiting, thousandths of KV memory used and of hits."""
    workers = [
        replace(view, pending_prompt_tokens=row[2], waiting=row[3], kv_usage=row[4] / 1000)
        for view, row in zip(
            views(
                [row[0] for row in rows],
                [0 if i in full else 9 for i in range(len(rows))],
                [row[1] for row in rows],
            ),
            rows,
            strict=True,
        )
    ]
    return Round(prompt, workers, [prompt * row[5] // 1000 for row in rows], step_time, slots)


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
    st.sets(st.integers(1, 5), max_size=3),
    st.integers(1, 3),
)


def barrier_time(seen: Round) -> list[tuple[float, float]]:
    cost = seen.step_time
    if cost is None or not cost.per_prompt_token_s:
        cost = StepTime(0.0, 1.0, per_prompt_token_s=200.0)
    fullest = max(worker.load_tokens for worker in seen.workers)
    return [
        (
            cost.per_prompt_token_s * (3 * seen.pending(i) - 2 * worker.pending_prompt_tokens)
            + 50
            * cost.per_token_s
            * max(0, worker.load_tokens + seen.slots * seen.prompt - fullest),
            worker.load_tokens,
        )
        for i, worker in enumerate(seen.workers)
    ]


def least_prefill(seen: Round) -> list[tuple[float, float]]:
    return [(seen.pending(i), worker.requests) for i, worker in enumerate(seen.workers)]


def kv_cost(seen: Round) -> list[tuple[float, float]]:
    return [(seen.pending(i) + worker.load_tokens, 0) for i, worker in enumerate(seen.workers)]


def lmetric(seen: Round) -> list[tuple[float, float]]:
    return [
        (seen.pending(i) * (worker.requests + seen.slots), 0)
        for i, worker in enumerate(seen.workers)
    ]


@pytest.mark.parametrize("cost", [barrier_time, least_prefill, kv_cost, lmetric])
@given(seen=ROUNDS)
def test_the_first_worker_of_least_cost(
    cost: Callable[[Round], list[tuple[float, float]]], seen: Round
) -> None:
    costs = cost(seen)
    assert seen.chosen(cost.__name__) == min(seen.open, key=costs.__getitem__)


@given(seen=ROUNDS)
def test_prefix_score(seen: Round) -> None:
    queues = {i: seen.workers[i].waiting for i in seen.open}
    longest = max(queues.values())
    spread = longest - min(queues.values())
    scores = {
        i: 3 * seen.hits[i] / max(1, seen.prompt)
        + 2 * ((longest - queue) / spread if spread else 1)
        + 2 * (1 - seen.workers[i].kv_usage)
        for i, queue in queues.items()
    }
    assert scores[seen.chosen("prefix_score")] == pytest.approx(max(scores.values()))


@given(seen=ROUNDS)
def test_cache_aware(seen: Round) -> None:
    among, counts = seen.open, [worker.requests for worker in seen.workers]
    least, most = (bound(counts[i] for i in among) for bound in (min, max))
    unbalanced = most - least > 64 and most > 1.5 * least
    longest = max(seen.hits[i] for i in among)
    if not unbalanced and longest > 0.3 * seen.prompt:
        among = [i for i in among if seen.hits[i] == longest]
    assert seen.chosen("cache_aware") == min(among, key=counts.__getitem__)


@pytest.mark.parametrize(
    ("counts", "hit", "chosen"),
    [
        ((128, 192), 301, 1),
        ((127, 192), 301, 0),
        ((130, 195), 301, 1),
        ((130, 196), 301, 0),
        ((9, 10), 300, 0),
    ],
)
def test_bounds_of_cache_aware(counts: tuple[int, int], hit: int, chosen: int) -> None:
    fewer, more = counts
    seen = a_round(1000, [(0, fewer, 0, 0, 0, 0), (0, more, 0, 0, 0, hit)], None)
    assert seen.chosen("cache_aware") == chosen


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
