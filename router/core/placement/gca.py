"""GCA: greedy cache allocation.

Algorithm 2 of "Serving Chain-structured Jobs with Large Memory Footprints". The fastest chain under
a placement takes all slots that it can, then the fastest of the rest, until none is left. By
Theorem 3.5 a policy that takes the fastest chain with a free slot needs no others.
"""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from router.core.placement.model import Chain, Placement

Edges = dict[tuple[int, int], list[tuple[float, int]]]


def gca(placement: Placement) -> tuple[Chain, ...]:
    """Chains, which may share servers, with their slots; fastest first."""
    return tuple(chain for chain, _ in allocation(placement))


def allocation(placement: Placement) -> Iterator[tuple[Chain, Sequence[int]]]:
    """Yield each chain with the slots left per server; the next chain changes that list."""
    paths = _Paths(placement)
    while chain := paths.fastest():
        paths.take(chain)
        yield chain, paths.free


class _Paths:
    """Shortest paths over the servers that have a slot left, ``free`` for a request in a block.

    A server's time in a chain depends on the next block, not on the server before. So a chain is a
    path over blocks; an edge leads from a block to the one after the last that a server holds. As
    slots are taken edges vanish, and no path gets shorter. So a path without such an edge stays the
    shortest. Known times are lower bounds for the rest, which are updated only where needed.
    """

    def __init__(self, placement: Placement) -> None:
        end = placement.model.blocks
        self._placement = placement
        self.free = [placement.block_slots(server) for server in range(len(placement.held))]
        self._edges = _edges(placement)
        self._edge_s = [np.full(end + 1, math.inf) for _ in range(end)]
        for (at, stop), servers in self._edges.items():
            servers.sort(reverse=True)
            self._edge_s[at][stop] = servers[-1][0]
        self._left_s = np.zeros(end + 1)
        self._via = {end: end}  # next node of each known shortest path

    def fastest(self) -> Chain | None:
        self._find()
        if self._left_s[0] == math.inf:
            return None
        via, servers, blocks = self._via, [], []
        at, end = 0, self._placement.model.blocks
        while at < end:
            servers.append(self._edges[at, via[at]][-1][1])
            blocks.append(via[at] - at)
            at = via[at]
        slots = min(
            self.free[server] // count for server, count in zip(servers, blocks, strict=True)
        )
        return Chain(tuple(servers), tuple(blocks), float(self._left_s[0]), slots)

    def take(self, chain: Chain) -> None:
        for server, blocks in zip(chain.servers, chain.blocks, strict=True):
            before = self.free[server]
            self.free[server] -= chain.slots * blocks
            held = self._placement.held[server]
            for at in range(max(held.start, held.stop - before), held.stop - self.free[server]):
                self._drop(at, held.stop)
        for at in sorted(self._via, reverse=True):
            if self._via[at] not in self._via:
                del self._via[at]

    def _find(self) -> None:
        """Find the shortest path from block 0, and so from all blocks on it."""
        edge_s, left_s, via = self._edge_s, self._left_s, self._via
        times_s = np.empty_like(left_s)
        path = [0]
        while path:
            at = path[-1]
            np.add(edge_s[at], left_s, out=times_s)
            stop = int(times_s.argmin())
            if stop in via or times_s[stop] == math.inf:
                left_s[at], via[at] = times_s[stop], stop
                path.pop()
            else:
                path.append(stop)

    def _drop(self, at: int, stop: int) -> None:
        """Update the fastest server of an edge; servers without enough slots are out."""
        servers = self._edges.get((at, stop), [])
        while servers and self.free[servers[-1][1]] < stop - at:
            servers.pop()
        time_s = servers[-1][0] if servers else math.inf
        if time_s > self._edge_s[at][stop]:
            self._edge_s[at][stop] = time_s
            if self._via.get(at) == stop:
                del self._via[at]


def _edges(placement: Placement) -> Edges:
    """Edges from reachable blocks to the ends of servers: (time in s, server) of each."""
    starts = sorted({0, *(held.stop for held in placement.held)})
    edges: Edges = defaultdict(list)
    for server, held in enumerate(placement.held):
        first = max(held.start, held.stop - placement.block_slots(server))
        for at in starts[bisect_left(starts, first) : bisect_left(starts, held.stop)]:
            edges[at, held.stop].append((placement.servers[server].time_s(held.stop - at), server))
    return dict(edges)
