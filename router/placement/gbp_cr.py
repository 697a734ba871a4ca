"""GBP-CR: greedy block placement with cache reservation.

Algorithm 1 of "Serving Chain-structured Jobs with Large Memory Footprints": servers are chained in
the order of their speed, each holding as many blocks as leave room for a given number of requests,
until the chains are fast enough for the arrivals. Optimal in its aim (the fewest chains) where all
servers have the same memory (Theorem 3.4).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from router.placement.model import Chain, Model, Placement, Server
from router.workload import Floats, Ints


@dataclass(frozen=True, slots=True)
class Grouping:
    """What GBP-CR found.

    Attributes:
        placement: where it put blocks; those of a last chain that holds not all blocks as well.
        chains: disjoint, in the order in which they were closed; each has at least the reserved
            slots.
        enough: whether they are fast enough for the arrivals, by (10b).
    """

    placement: Placement
    chains: tuple[Chain, ...]
    enough: bool


@dataclass(frozen=True, slots=True)
class Fleet:
    """Servers as arrays."""

    servers: Sequence[Server]
    memory_bytes: Ints
    hop_s: Floats
    block_s: Floats

    @classmethod
    def of(cls, servers: Sequence[Server]) -> Fleet:
        """The arrays of these servers."""
        return cls(
            servers,
            np.array([server.memory_bytes for server in servers], dtype=np.int64),
            np.array([server.hop_s for server in servers], dtype=np.float64),
            np.array([server.block_s for server in servers], dtype=np.float64),
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """Which servers form chains, before blocks have their places.

    Attributes:
        model: what is placed.
        fleet: on what.
        reserved: c, slots kept free for each block that is placed.
        order: servers that hold blocks, as they are chained.
        room: m(c), blocks that each of them holds; as many as order.
        ends: in order, where each chain ends; what comes after the last is a chain left short.
        scaled_rates: of so many chains, the sum of 1 / T, T as if each server computed all that it
            holds; one more than ends.
        enough: whether the last of these times c is fast enough for the arrivals.
    """

    model: Model
    fleet: Fleet
    reserved: int
    order: Ints
    room: Ints
    ends: tuple[int, ...]
    scaled_rates: tuple[float, ...]
    enough: bool


def gbp_cr(
    model: Model, servers: Sequence[Server], reserved: int, rate: float, load: float = 0.7
) -> Grouping:
    """Place blocks so that disjoint chains of servers hold them all.

    Args:
        model: what is placed.
        servers: in any order; those that hold no block beside the reserved slots stay empty.
        reserved: c, slots kept free for each block that is placed; at least 1.
        rate: lambda, requests per second that arrive; math.inf: chain all servers; 0: one chain.
        load: rho, the highest share of the chains' rate that arrivals may take.
    """
    return placed(lay_out(model, Fleet.of(servers), reserved, rate, load))


def lay_out(model: Model, fleet: Fleet, reserved: int, rate: float, load: float) -> Layout:
    """Chain servers, fastest per block first (12), until they are enough (10b); as gbp_cr."""
    room = rooms(model, fleet, reserved)
    time_s = fleet.hop_s + fleet.block_s * room  # equation (9)
    able = np.flatnonzero(room)
    order = able[np.argsort(time_s[able] / room[able], kind="stable")]
    blocks = np.cumsum(room[order])
    ends: list[int] = []
    rates = [0.0]
    start, before, enough = 0, 0, False
    while not enough:
        end = int(np.searchsorted(blocks, before + model.blocks)) + 1
        if end > len(order):
            start = len(order)
            break
        ends.append(end)
        rates.append(rates[-1] + 1 / float(time_s[order[start:end]].sum()))
        start, before = end, int(blocks[end - 1])
        enough = rates[-1] * reserved * load >= rate
    used = order[:start]
    return Layout(model, fleet, reserved, used, room[used], tuple(ends), tuple(rates), enough)


def rooms(model: Model, fleet: Fleet, reserved: int) -> Ints:
    """m(c), blocks that servers can hold if each block keeps c slots free: equation (8)."""
    one = model.block_bytes + model.slot_bytes * reserved
    return np.minimum(fleet.memory_bytes // one, model.blocks)


def placed(layout: Layout) -> Grouping:
    """Give blocks their places: along each chain, the last server's end with the model's."""
    model, servers = layout.model, layout.fleet.servers
    held = [range(0)] * len(servers)
    groups = [
        [*zip(layout.order[start:end].tolist(), layout.room[start:end].tolist(), strict=True)]
        for start, end in itertools.pairwise((0, *layout.ends, len(layout.order)))
    ]
    for group in groups:
        at = 0
        for server, room in group:
            first = min(at, model.blocks - room)
            held[server] = range(first, first + room)
            at = first + room
    placement = Placement(model, servers, tuple(held))
    closed = groups[: len(layout.ends)]
    chains = tuple(_alone(placement, [server for server, _ in group]) for group in closed)
    return Grouping(placement, chains, layout.enough)


def _alone(placement: Placement, group: Sequence[int]) -> Chain:
    """The chain of servers that no other chain uses: it has all their slots."""
    stops = [0, *(placement.held[server].stop for server in group)]
    blocks = tuple(stop - start for start, stop in itertools.pairwise(stops))
    pairs = list(zip(group, blocks, strict=True))
    return Chain(
        servers=tuple(group),
        blocks=blocks,
        service_s=math.fsum(placement.servers[server].time_s(count) for server, count in pairs),
        slots=min(placement.block_slots(server) // count for server, count in pairs),
    )
