"""GBP-CR: greedy block placement with cache reservation.

Algorithm 1 of "Serving Chain-structured Jobs with Large Memory Footprints". Servers form chains in
the order of their speed; each holds as many blocks as leave room for a given number of requests,
until the chains can serve the arrivals. It yields the fewest chains if all servers have equal
memory (Theorem 3.4).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from router.core.forecast.forecast import Floats, Ints
from router.core.placement.model import Chain, Model, Placement, Server


@dataclass(frozen=True, slots=True)
class Grouping:
    """Result of GBP-CR, with the blocks of an incomplete last chain."""

    placement: Placement
    # Disjoint, in the order of completion, each with at least the reserved slots.
    chains: tuple[Chain, ...]
    enough: bool  # true if they can serve the arrivals, by (10b)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Servers as arrays."""

    servers: Sequence[Server]
    memory_bytes: Ints
    hop_s: Floats
    block_s: Floats

    @classmethod
    def of(cls, servers: Sequence[Server]) -> Fleet:
        return cls(
            servers,
            np.array([server.memory_bytes for server in servers], dtype=np.int64),
            np.array([server.hop_s for server in servers], dtype=np.float64),
            np.array([server.block_s for server in servers], dtype=np.float64),
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """Servers grouped into chains, before blocks have places."""

    model: Model
    fleet: Fleet
    reserved: int  # c, slots kept free for each placed block
    order: Ints  # servers that hold blocks, in chain order
    room: Ints  # m(c), blocks on each of these
    ends: tuple[int, ...]  # end of each chain in ``order``; the rest is an incomplete chain
    # By number of chains from 0 up, the sum of 1 / T, with T as if each server computed all its
    # blocks.
    scaled_rates: tuple[float, ...]
    enough: bool  # true if the last of these times c can serve the arrivals


def gbp_cr(
    model: Model, servers: Sequence[Server], reserved: int, rate: float, load: float = 0.7
) -> Grouping:
    """Place blocks so that disjoint chains of servers hold them all.

    A server without room for a block and its slots stays empty. ``reserved``: c, slots kept free
    for each placed block; at least 1. ``rate``: lambda, requests per second; math.inf: chain all
    servers; 0: one chain. ``load``: rho, highest share of the chains' rate that arrivals may take.
    """
    return placed(lay_out(model, Fleet.of(servers), reserved, rate, load))


def lay_out(model: Model, fleet: Fleet, reserved: int, rate: float, load: float) -> Layout:
    """Chain servers, fastest per block first (12), until they suffice (10b)."""
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
    """m(c), blocks per server if each block keeps c slots free: equation (8)."""
    one = model.block_bytes + model.slot_bytes * reserved
    return np.minimum(fleet.memory_bytes // one, model.blocks)


def placed(layout: Layout) -> Grouping:
    """Place the blocks: along each chain, with the last server's end at the model's end."""
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
    stops = [0, *(placement.held[server].stop for server in group)]
    blocks = tuple(stop - start for start, stop in itertools.pairwise(stops))
    pairs = list(zip(group, blocks, strict=True))
    return Chain(
        servers=tuple(group),
        blocks=blocks,
        service_s=math.fsum(placement.servers[server].time_s(count) for server, count in pairs),
        slots=min(placement.block_slots(server) // count for server, count in pairs),
    )
