"""Per-request rules for engines that compute prompts and cache prefixes themselves.

They weigh the prompt tokens that a worker still has to compute, and those of a request that it has
cached. What is neither known nor guessed to be cached counts as not cached.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.core.forecast.learned_profile import PROMPT_RATIO
from router.core.policies.baselines import Choose
from router.core.policies.room import Room
from router.core.types import Request

EXCESS_STEPS = 50
"""D of ``barrier_time`` and BF-IO's plan: steps for which a load above the others' delays them.

25 to 100 give nearly the same.
"""

ANEW = 3.0
"""What a prompt token that a request computes weighs there, beside one that it only waits for.

It delays all that decode, and all prompts after it, not this request alone. From simulations of
conversations and agents: 2 to 10 are better than 1 in nearly all, and 3 to 10 alike.
"""


def barrier_time(request: Request, room: Room, open_: Sequence[int]) -> int:
    """The least time that a placement adds at the barrier; the smallest load among equals.

    That is t_p (pending_g + A (s_i - hit_ig)) + D t_l max(0, L_g + s_i - max L). The first term is
    the worker's prompt work with this request, whose own part weighs A times (``ANEW``). The second
    is what its load lengthens each of the next D steps of all workers. Costs are the learned ones;
    this rule is our own.
    """
    cost, fullest = room.known.step_time, max(room.load_tokens)
    token, prompt_token = 1.0, PROMPT_RATIO  # only their ratio counts
    if cost is not None and cost.per_prompt_token_s:
        token, prompt_token = cost.per_token_s, cost.per_prompt_token_s

    def added(i: int) -> tuple[float, int]:
        excess = max(0, room.load_tokens[i] + request.load_tokens - fullest)
        work = room.pending[i] + ANEW * room.own_work(i, request)
        return prompt_token * work + EXCESS_STEPS * token * excess, room.load_tokens[i]

    return min(open_, key=added)


def least_prefill(request: Request, room: Room, open_: Sequence[int]) -> int:
    """The fewest prompt tokens to compute with this request, then the fewest requests.

    vLLM's router of data-parallel ranks on TPU (vllm-project/tpu-inference #3315), without its last
    key: the fewest output tokens left, which a router does not know.
    """
    return min(open_, key=lambda i: (room.prompt_work(i, request), room.requests[i]))


def kv_cost(prompt_weight: float = 1.0) -> Choose:
    """The least w * (prompt tokens to compute with this request) + resident tokens.

    NVIDIA Dynamo's KV router with its defaults: weight 1, temperature 0. Dynamo counts in blocks.
    """

    def choose(request: Request, room: Room, open_: Sequence[int]) -> int:
        def cost(i: int) -> float:
            return prompt_weight * room.prompt_work(i, request) + room.load_tokens[i]

        return min(open_, key=cost)

    return choose


def lmetric(request: Request, room: Room, open_: Sequence[int]) -> int:
    """The least (prompt tokens to compute) * (batch size), both with this request.

    LMetric (arXiv 2603.15202): the product has no weight to tune.
    """

    def product(i: int) -> int:
        return room.prompt_work(i, request) * (room.requests[i] + request.slots)

    return min(open_, key=product)


def prefix_score(seed: int, prefix: float = 3.0, queue: float = 2.0, memory: float = 2.0) -> Choose:
    """The highest weighted sum of three scores from 0 to 1; drawn among equals.

    llm-d's endpoint picker with its defaults: share of the prompt cached (weight 3), queue length
    between the longest and the shortest (2), share of KV memory free (2).
    """
    rng = random.Random(seed)

    def choose(request: Request, room: Room, open_: Sequence[int]) -> int:
        queues = [room.waiting[i] for i in open_]
        longest, spread = max(queues), max(queues) - min(queues)

        def score(i: int) -> tuple[float, float]:
            shorter = (longest - room.waiting[i]) / spread if spread else 1.0
            cached = room.cached(i, request) / max(1, request.prompt_tokens)
            free = 1.0 - room.kv_usage[i]
            return prefix * cached + queue * shorter + memory * free, rng.random()

        return max(open_, key=score)

    return choose


def cache_aware(request: Request, room: Room, open_: Sequence[int]) -> int:
    """The longest cached prefix while requests are balanced, else the fewest requests.

    ``cache_aware`` of the SGLang model gateway (lightseekorg/smg) with its defaults. Requests are
    out of balance if the most exceed the least by more than 64 and by more than half. A prefix
    counts if it is more than 30 % of the prompt. The gateway guesses what is cached from what it
    has sent; here it is known.
    """
    counts = [room.requests[i] for i in open_]
    least, most = min(counts), max(counts)
    among = open_
    if most - least <= 64 or most <= 1.5 * least:
        longest = max(room.cached(i, request) for i in open_)
        if longest > 0.3 * request.prompt_tokens:
            among = [i for i in open_ if room.cached(i, request) == longest]
    return min(among, key=room.requests.__getitem__)
