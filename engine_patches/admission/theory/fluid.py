"""The equilibrium of an engine's fluid model.

Section 3 of arXiv 2504.11320, extended by costs per request and per prompt token. A type (l, l') of
the paper takes l' + 1 steps and holds l + s tokens in stage s = 0 … l'. On an engine it is a
request with a prompt of l tokens that returns l' + 1.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from router.core.step_time import StepTime


@dataclass(frozen=True, slots=True)
class Batch:
    """Work of a step, summed over its requests; prompts that are computed in it."""

    kv_tokens: float
    requests: float
    prompt_tokens: float

    def work_s(self, cost: StepTime) -> float:
        """Seconds that the work adds to a step."""
        return cost.work_s(self.kv_tokens, self.requests, self.prompt_tokens)


def combined(counts: Iterable[float], batches: Iterable[Batch]) -> Batch:
    """Sum of batches with these multiplicities."""
    kv_tokens = requests = prompt_tokens = 0.0
    for count, batch in zip(counts, batches, strict=True):
        kv_tokens += count * batch.kv_tokens
        requests += count * batch.requests
        prompt_tokens += count * batch.prompt_tokens
    return Batch(kv_tokens, requests, prompt_tokens)


@dataclass(frozen=True, slots=True)
class Flow:
    """Requests of one type."""

    rate: float  # lambda, requests per second; above 0
    prompt_tokens: float  # l
    decode_steps: int  # l', steps after the one that computes the prompt

    @property
    def everywhere(self) -> Batch:
        """One request in every stage."""
        stages = self.decode_steps + 1
        held = stages * (self.prompt_tokens + self.decode_steps / 2)
        return Batch(held, stages, self.prompt_tokens)


@dataclass(frozen=True, slots=True)
class Equilibrium:
    """State with equal rates of arrivals and ends."""

    # Share of the engine's time that the requests take in the limit of large batches; stable below
    # 1.
    load: float
    step_s: float  # infinite if unstable, as are the next two
    memory_tokens: float  # M*, (8)
    requests: tuple[float, ...]  # n*_j of each flow, in all of its stages
    decode_tok_s: float  # throughput*, (10): tokens after the first of each request

    @property
    def stable(self) -> bool:
        """Condition of Proposition 1."""
        return self.load < 1


def equilibrium(flows: Sequence[Flow], cost: StepTime) -> Equilibrium:
    """Solve (7) and (8)."""
    a_second = combined([flow.rate for flow in flows], [flow.everywhere for flow in flows])
    load = a_second.work_s(cost)
    step_s = cost.base_s / (1 - load) if load < 1 else math.inf
    return Equilibrium(
        load=load,
        step_s=step_s,
        memory_tokens=step_s * a_second.kv_tokens,
        requests=tuple(step_s * flow.rate * (flow.decode_steps + 1) for flow in flows),
        decode_tok_s=sum(flow.rate * flow.decode_steps for flow in flows),
    )


def sustainable_share(flows: Sequence[Flow], cost: StepTime, capacity_tokens: float) -> float:
    """Multiple of all rates for which M* equals the capacity (Proposition 2)."""
    a_second = combined([flow.rate for flow in flows], [flow.everywhere for flow in flows])
    needed = cost.base_s * a_second.kv_tokens + a_second.work_s(cost) * capacity_tokens
    return capacity_tokens / needed
