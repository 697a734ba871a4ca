"""Per-request rules for workers of unequal speed.

``jffc`` is from "Serving Chain-structured Jobs with Large Memory Footprints", section 3.2; the
others are its baselines in section 4. They count slots (c) and completions per second and slot
(mu).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import hypot

from router.core.policies.baselines import PerRequest
from router.core.policies.policy_protocol import Policy
from router.core.policies.room import Room
from router.core.types import Request

# Learned rates within this many standard errors of their difference count as equal: with the
# thousand completions that ``service_rate`` remembers, within 7 %.
_TOLD_APART = 1.5


def jffc(request: Request, room: Room, open_: Sequence[int]) -> int:
    """Join the fastest free chain: the largest mu of the workers with a free slot.

    For pool dispatch: without a free slot, requests wait in the router.
    """
    return fastest(room, room.idle(request, open_))


def sa_jsq(request: Request, room: Room, open_: Sequence[int]) -> int:
    """Speed-aware JSQ: the fewest ahead, (Z - c + 1)^+, then the largest mu."""
    shortest = min(room.ahead(i, request) for i in open_)
    return fastest(room, [i for i in open_ if room.ahead(i, request) == shortest])


def sed(request: Request, room: Room, open_: Sequence[int]) -> int:
    """Smallest expected delay: the least 1 / mu + (Z - c + 1)^+ / (mu c)."""

    def delay_s(i: int) -> float:
        return (1 + room.ahead(i, request) / room.slots[i]) / room.rate[i]

    return min(open_, key=lambda i: (delay_s(i), _occupied(room, i)))


def jiq(seed: int) -> Policy:
    """Join the idle queue: a random worker with a free slot, else any at random."""
    rng = random.Random(seed)
    return PerRequest(lambda request, room, open_: rng.choice(room.idle(request, open_)))


def fastest(room: Room, among: Sequence[int]) -> int:
    """The worker of the largest mu, or the least occupied of those not significantly slower.

    Learned rates of equal workers differ by chance. The luckiest would otherwise be filled up,
    which slows its steps. Planned rates have no error.
    """
    best = max(among, key=room.rate.__getitem__)
    rate, error = room.rate[best], room.rate[best] * room.rate_error[best]

    def alike(i: int) -> bool:
        noise = hypot(error, room.rate[i] * room.rate_error[i])
        return rate - room.rate[i] <= _TOLD_APART * noise

    return min(filter(alike, among), key=lambda i: _occupied(room, i))


def _occupied(room: Room, index: int) -> float:
    return room.requests[index] / room.slots[index]
