"""Per-request rules of today's routers and engines."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from router.core.policies.policy_protocol import NOTHING, Known, Policy
from router.core.policies.room import Room
from router.core.types import Assignment, Request, WorkerView

Choose = Callable[[Request, Room, Sequence[int]], int]


class PerRequest(Policy):
    """Policy of a rule (request, room, open workers): places requests in order of arrival."""

    def __init__(self, choose: Choose) -> None:
        self._choose = choose

    def assign(
        self,
        waiting: Sequence[Request],
        workers: Sequence[WorkerView],
        known: Known = NOTHING,
    ) -> Sequence[Assignment]:
        room = Room(workers, known)
        for request, open_ in room.takers(waiting):
            room.place(self._choose(request, room, open_), request)
        return room.assignments


def fcfs(request: Request, room: Room, open_: Sequence[int]) -> int:
    """First come, first served: the first worker with a free slot, in index order.

    This is the text of BF-IO's Appendix B (arXiv 2601.17855). Its listing, Algorithm 2, takes a
    worker with the most free slots instead: ``jsq`` for workers of equal slots.
    """
    return open_[0]


def jsq(request: Request, room: Room, open_: Sequence[int]) -> int:
    """Join the shortest queue: the fewest requests, by index among equals.

    Running, queued and dispatched requests count, as in BF-IO's section 6 (arXiv 2601.17855).
    """
    return min(open_, key=room.requests.__getitem__)


def least_tokens(request: Request, room: Room, open_: Sequence[int]) -> int:
    """The fewest KV tokens."""
    return min(open_, key=room.load_tokens.__getitem__)


def vllm_score_2025(request: Request, room: Room, open_: Sequence[int]) -> int:
    """The lowest 4 * waiting + running, by index among equals.

    vLLM's balancer of data-parallel ranks (``DPLBAsyncMPClient``) up to 2025. Running means all
    that the engine has not reported as queued. vLLM's counts are up to 100 ms old, and it counts a
    sent request as waiting until the next report; here a sent request counts once.
    """
    return min(open_, key=lambda i: room.requests[i] + 3 * room.waiting[i])


def vllm_score_2026() -> Policy:
    """The lowest max(clients * own, waiting + running) + 6 * waiting * max(0, kv_usage - 0.5).

    The same balancer of vLLM since 2026. Own are one frontend's requests that have not ended; the
    router is the only frontend. As in vLLM, the scan starts one worker further at each request,
    which decides among equals. Waiting and KV usage are the engine's last report, for vLLM up to
    100 ms old; vLLM adds requests sent since then to waiting.
    """
    start = 0

    def choose(request: Request, room: Room, open_: Sequence[int]) -> int:
        nonlocal start
        workers = len(room.ids)
        first = start % workers
        start = first + 1

        def score(i: int) -> tuple[float, int]:
            pressure = max(0.0, room.kv_usage[i] - 0.5)
            return room.requests[i] + 6 * room.waiting[i] * pressure, (i - first) % workers

        return min(open_, key=score)

    return PerRequest(choose)


def round_robin() -> Policy:
    """The next worker in turn that has a free slot."""
    turn = 0

    def choose(request: Request, room: Room, open_: Sequence[int]) -> int:
        nonlocal turn
        index = min(open_, key=lambda i: (i - turn) % len(room.ids))
        turn = index + 1
        return index

    return PerRequest(choose)


def uniform(seed: int) -> Policy:
    """A worker drawn uniformly."""
    rng = random.Random(seed)
    return PerRequest(lambda request, room, open_: rng.choice(open_))


def power_of_two(seed: int) -> Policy:
    """The shorter queue of two workers drawn at random (Mitzenmacher, 2001)."""
    rng = random.Random(seed)

    def choose(request: Request, room: Room, open_: Sequence[int]) -> int:
        return jsq(request, room, rng.sample(open_, min(2, len(open_))))

    return PerRequest(choose)
