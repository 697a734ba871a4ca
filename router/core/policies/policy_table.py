"""All policies by name: to add one, write a function or class, a row here, and a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from router.core.policies import baselines, prompts, unequal
from router.core.policies.balance_route import BalanceRoute
from router.core.policies.baselines import PerRequest
from router.core.policies.bfio.policy import BfIo
from router.core.policies.bfio.solver import DEFAULT_MOVES
from router.core.policies.policy_protocol import Policy
from router.core.types import Dispatch

ANY = frozenset(Dispatch)
POOL_ONLY = frozenset({Dispatch.POOL})


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Settings of a policy.

    Attributes:
        moves: budget of BF-IO's local search per decision.
    """

    seed: int = 0
    moves: int = DEFAULT_MOVES


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """A policy's factory, its summary, its forms of dispatch, and its use of an outlook."""

    make: Callable[[PolicySettings], Policy]
    summary: str
    dispatch: frozenset[Dispatch] = ANY
    looks_ahead: bool = False


POLICIES: Mapping[str, PolicyRow] = {
    "balance_route": PolicyRow(
        lambda _: BalanceRoute(),
        "each worker takes what fits below the most loaded one, now and over the look-ahead",
        dispatch=POOL_ONLY,
        looks_ahead=True,
    ),
    "barrier_time": PolicyRow(
        lambda _: PerRequest(prompts.barrier_time),
        "least time added at the barrier, by prompt to compute and load, at their learned cost",
    ),
    "bfio": PolicyRow(
        lambda settings: BfIo(moves=settings.moves),
        "the whole pool at once, so that the most loaded worker waits least for the others",
        looks_ahead=True,
    ),
    "cache_aware": PolicyRow(
        lambda _: PerRequest(prompts.cache_aware),
        "longest cached prefix while requests are balanced, as in SGLang's gateway",
    ),
    "fcfs": PolicyRow(
        lambda _: PerRequest(baselines.fcfs),
        "first worker with a free slot",
        dispatch=POOL_ONLY,
    ),
    "jffc": PolicyRow(
        lambda _: PerRequest(unequal.jffc),
        "fastest worker with a free slot, by the rate at which each completes requests",
        dispatch=POOL_ONLY,
    ),
    "jiq": PolicyRow(
        lambda settings: unequal.jiq(settings.seed), "drawn among those with a free slot"
    ),
    "jsq": PolicyRow(lambda _: PerRequest(baselines.jsq), "fewest requests"),
    "kv_cost": PolicyRow(
        lambda _: PerRequest(prompts.kv_cost()),
        "fewest prompt tokens to compute plus resident tokens, as in NVIDIA Dynamo",
    ),
    "least_prefill": PolicyRow(
        lambda _: PerRequest(prompts.least_prefill),
        "fewest prompt tokens to compute, as in vLLM on TPU",
    ),
    "least_tokens": PolicyRow(lambda _: PerRequest(baselines.least_tokens), "fewest KV tokens"),
    "lmetric": PolicyRow(
        lambda _: PerRequest(prompts.lmetric),
        "least product of prompt tokens to compute and batch size",
    ),
    "power_of_two": PolicyRow(
        lambda settings: baselines.power_of_two(settings.seed),
        "fewest requests of two drawn at random",
    ),
    "prefix_score": PolicyRow(
        lambda settings: PerRequest(prompts.prefix_score(settings.seed)),
        "highest score of cached prefix, queue and free KV memory, as in llm-d",
    ),
    "random": PolicyRow(lambda settings: baselines.uniform(settings.seed), "drawn uniformly"),
    "round_robin": PolicyRow(lambda _: baselines.round_robin(), "each worker in turn"),
    "sa_jsq": PolicyRow(
        lambda _: PerRequest(unequal.sa_jsq), "shortest queue, the fastest worker among equals"
    ),
    "sed": PolicyRow(
        lambda _: PerRequest(unequal.sed), "least time to be expected until the request is done"
    ),
    "vllm_score_2025": PolicyRow(
        lambda _: PerRequest(baselines.vllm_score_2025),
        "fewest requests, a queued one counting four times, as in vLLM up to 2025",
    ),
    "vllm_score_2026": PolicyRow(
        lambda _: baselines.vllm_score_2026(),
        "fewest requests, more for a queue that waits for KV memory, as in vLLM since 2026",
    ),
}
