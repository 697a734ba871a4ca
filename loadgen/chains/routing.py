"""Routing without fixed chains: each request takes the fastest path that has memory at its start.

PETALS and BPRR serve like this and compose no chains ahead ("Serving Chain-structured Jobs with
Large Memory Footprints", section 4.1.3). Here a request without a path waits in one FIFO queue, and
all free memory is known. Clients of PETALS do not know it, so both do better here than in practice.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from math import inf

import numpy as np

from loadgen.chains.work import Served, Work
from router.core.errors import InputError
from router.core.placement.model import Placement

_MOST_REMEMBERED = 500_000


@dataclass(frozen=True, slots=True)
class Path:
    """Servers that hold all blocks together, each with the number that a request uses there."""

    used: tuple[tuple[int, int], ...]
    service_s: float


class Paths:
    """The fastest path for the free memory."""

    def __init__(self, placement: Placement) -> None:
        self._blocks = placement.model.blocks
        ends = {held.stop for held in placement.held if held}
        # (first block, next block, server, time in s), in the order of the first block.
        self._hops = [
            (begin, held.stop, at, server.time_s(held.stop - begin))
            for begin in sorted({0} | ends)
            for at, (server, held) in enumerate(zip(placement.servers, placement.held, strict=True))
            if begin in held
        ]
        self._known = lru_cache(_MOST_REMEMBERED)(self._shortest)

    def fastest(self, free: Sequence[int]) -> Path | None:
        """None if no path has memory; ``free``: pairs of a request and a block, by server."""
        return self._known(tuple(free))

    def _shortest(self, free: tuple[int, ...]) -> Path | None:
        reached_s = [inf] * (self._blocks + 1)
        reached_s[0] = 0.0
        last: list[tuple[int, int]] = [(-1, 0)] * (self._blocks + 1)
        for begin, end, server, time_s in self._hops:
            arrived_s = reached_s[begin] + time_s
            if arrived_s < reached_s[end] and free[server] >= end - begin:
                reached_s[end] = arrived_s
                last[end] = server, end - begin
        if reached_s[-1] == inf:
            return None
        used = []
        at = self._blocks
        while at:
            used.append(last[at])
            at -= last[at][1]
        return Path(tuple(reversed(used)), reached_s[-1])


def simulate_routing(placement: Placement, work: Work) -> Served:
    """Serve all requests, each on the fastest path that is free as it starts.

    InputError if no path has memory for a single request.
    """
    paths = Paths(placement)
    free = [placement.block_slots(server) for server in range(len(placement.servers))]
    if paths.fastest(free) is None:
        raise InputError(
            "no path through all blocks has memory for a request; reserve more slots per block"
        )
    arrival_s, size = work.arrival_s.tolist(), work.size.tolist()
    waiting_s, service_s = np.zeros(len(size)), np.zeros(len(size))
    ends: list[tuple[float, int, Path]] = []
    queue: deque[int] = deque()
    coming = deque(enumerate(arrival_s))
    while coming or ends:
        if coming and (not ends or coming[0][1] < ends[0][0]):
            number, now_s = coming.popleft()
            queue.append(number)
        else:
            now_s, _, path = heappop(ends)
            for server, blocks in path.used:
                free[server] += blocks
        while queue and (found := paths.fastest(free)):
            first = queue.popleft()
            for server, blocks in found.used:
                free[server] -= blocks
            waiting_s[first] = now_s - arrival_s[first]
            service_s[first] = size[first] * found.service_s
            heappush(ends, (now_s + size[first] * found.service_s, first, found))
    return Served(waiting_s, service_s)
