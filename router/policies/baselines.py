"""Per-request rules, the ones that routers and engines use today.

Each takes the request, the room and the workers open to it, and names one of these.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from router.policies.room import Room
from router.types import Assignment, Policy, Request, WorkerView

Choose = Callable[[Request, Room, Sequence[int]], int]


class PerRequest:
    """Makes a policy of a rule: requests in order of arrival, each placed before the next."""

    def __init__(self, choose: Choose) -> None:
        self._choose = choose

    def assign(
        self, waiting: Sequence[Request], workers: Sequence[WorkerView]
    ) -> Sequence[Assignment]:
        """See ``types.Policy.assign``."""
        room = Room(workers)
        for request in waiting:
            open_ = room.open_to(request)
            if not open_:
                break
            room.place(self._choose(request, room, open_), request)
        return room.assignments


def fcfs(request: Request, room: Room, open_: Sequence[int]) -> int:
    """The first worker with a free slot, in index order (BF-IO, arXiv 2601.17855, section 6)."""
    return open_[0]


def jsq(request: Request, room: Room, open_: Sequence[int]) -> int:
    """Join the shortest queue: the fewest requests."""
    return min(open_, key=room.requests.__getitem__)


def least_tokens(request: Request, room: Room, open_: Sequence[int]) -> int:
    """The fewest KV tokens."""
    return min(open_, key=room.load_tokens.__getitem__)


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
