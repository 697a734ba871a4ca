"""Per-request rules for workers of unequal speed.

``jffc`` is of "Serving Chain-structured Jobs with Large Memory Footprints", section 3.2; the others
are what it compares with, in section 4. They go by how many requests a worker runs at once (c) and
by how many of them each slot completes per second (mu), in place of KV tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import hypot

from router.policies.baselines import PerRequest
from router.policies.room import Room
from router.policy import Policy
from router.types import Request

# Learned rates that differ by fewer standard errors of the difference count as equal: at the
# thousand completions that ``service_rate`` remembers, by less than 7 %.
_TOLD_APART = 1.5


def jffc(request: Request, room: Room, open_: Sequence[int]) -> int:
    """Join the fastest free chain: of the workers with a free slot, the one with the largest mu.

    Who finds none free waits in the router, so it is for pool dispatch.
    """
    return fastest(room, room.idle(request, open_))


def sa_jsq(request: Request, room: Room, open_: Sequence[int]) -> int:
    """Speed-aware join the shortest queue: the fewest ahead, (Z - c + 1)^+, then the largest mu."""
    shortest = min(room.ahead(i, request) for i in open_)
    return fastest(room, [i for i in open_ if room.ahead(i, request) == shortest])


def sed(request: Request, room: Room, open_: Sequence[int]) -> int:
    """Smallest expected delay: the least 1 / mu + (Z - c + 1)^+ / (mu c)."""

    def delay_s(i: int) -> float:
        return (1 + room.ahead(i, request) / room.slots[i]) / room.rate[i]

    return min(open_, key=lambda i: (delay_s(i), _occupied(room, i)))


def jiq(seed: int) -> Policy:
    """Join the idle queue: one drawn among the workers with a free slot, among all if none has."""
    rng = random.Random(seed)
    return PerRequest(lambda request, room, open_: rng.choice(room.idle(request, open_)))


def fastest(room: Room, among: Sequence[int]) -> int:
    """The worker of the largest mu; the least occupied of those that cannot be told from it.

    Learned rates of equal workers differ by chance, and the luckiest would else be filled to the
    brim, which makes a step of it slower than of the others. Given rates are taken as they are.
    """
    best = max(among, key=room.rate.__getitem__)
    rate, error = room.rate[best], room.rate[best] * room.rate_error[best]

    def alike(i: int) -> bool:
        noise = hypot(error, room.rate[i] * room.rate_error[i])
        return rate - room.rate[i] <= _TOLD_APART * noise

    return min(filter(alike, among), key=lambda i: _occupied(room, i))


def _occupied(room: Room, index: int) -> float:
    return room.requests[index] / room.slots[index]
