"""Baseline placements: PETALS, BPRR, and the whole model on every server that can hold it.

They follow sections 4.1.3 and 4.2.3 of "Serving Chain-structured Jobs with Large Memory
Footprints", and its references [6] and [29] for details.
"""

from collections.abc import Sequence

import numpy as np

from router.core.errors import InputError
from router.core.placement.gbp_cr import Fleet, rooms
from router.core.placement.model import Chain, Model, Placement, Server

PETALS_SLOTS = 2
"""PETALS keeps memory for 4,096 tokens in each block: two requests of the paper's length."""

_UNSERVED_S = 1e9  # Time of a block that no server holds: far above any server's.


def petals(model: Model, servers: Sequence[Server], reserved: int = PETALS_SLOTS) -> Placement:
    """PETALS: servers join one by one, each where the model has the least throughput so far.

    A server takes the window of blocks with the least throughputs, compared one by one in ascending
    order. Its own throughput is then added to theirs.
    """
    room = rooms(model, Fleet.of(servers), reserved).tolist()
    throughput = np.zeros(model.blocks)
    held = [range(0)] * len(servers)
    for at, server in enumerate(servers):
        if not room[at]:
            continue
        windows = np.sort(np.lib.stride_tricks.sliding_window_view(throughput, room[at]), axis=1)
        first = int(np.lexsort(windows.T[::-1])[0])
        held[at] = range(first, first + room[at])
        throughput[first : first + room[at]] += room[at] / server.time_s(room[at])
    return _covering(model, servers, held)


def bprr(
    model: Model, servers: Sequence[Server], rate: float, reserved: int | None = None
) -> tuple[Placement, int]:
    """Conservative greedy block placement, of "block placement and request routing" [29].

    Each server keeps memory for all concurrent requests; the rest limits its blocks. Servers choose
    fastest first. Each takes the window of blocks with the greatest need: the largest sum of the
    time per block, shared by the servers that already hold the block.

    Returns the number of requests that memory is kept for, too: ``reserved``, by default ``rate``
    per second times the time on a path, as far as memory allows.
    """
    if reserved is not None:
        return _conservative(model, servers, reserved), reserved
    placement, best = _conservative(model, servers, 1), 1
    while best < rate * _longest_s(placement):
        try:
            placement = _conservative(model, servers, best + 1)
        except InputError:
            break
        best += 1
    return placement, best


def whole(model: Model, servers: Sequence[Server]) -> tuple[Placement, tuple[Chain, ...]]:
    """The model on each server that can hold it with a request; each such server is a chain."""
    able = (rooms(model, Fleet.of(servers), 1) == model.blocks).tolist()
    held = [range(model.blocks if one else 0) for one in able]
    placement = _covering(model, servers, held)
    return placement, tuple(
        Chain(
            servers=(at,),
            blocks=(model.blocks,),
            service_s=server.time_s(model.blocks),
            slots=placement.block_slots(at) // model.blocks,
        )
        for at, server in enumerate(servers)
        if able[at]
    )


def _conservative(model: Model, servers: Sequence[Server], reserved: int) -> Placement:
    room = rooms(model, Fleet.of(servers), reserved).tolist()
    block_s = [s.time_s(m) / m if m else 0.0 for s, m in zip(servers, room, strict=True)]
    service_rate = np.full(model.blocks, 1 / _UNSERVED_S)
    held = [range(0)] * len(servers)
    for at in sorted((at for at, m in enumerate(room) if m), key=block_s.__getitem__):
        first = int(np.argmax(np.convolve(1 / service_rate, np.ones(room[at]), mode="valid")))
        held[at] = range(first, first + room[at])
        service_rate[first : first + room[at]] += 1 / block_s[at]
    return _covering(model, servers, held)


def _longest_s(placement: Placement) -> float:
    """Time in the fastest servers (per block) that could hold all blocks: [29], Theorem 2."""
    pairs = [
        (server.time_s(len(held)) / len(held), len(held))
        for server, held in zip(placement.servers, placement.held, strict=True)
        if held
    ]
    time_s, held_blocks = 0.0, 0
    for block_s, blocks in sorted(pairs):
        if held_blocks < placement.model.blocks:
            time_s += block_s * blocks
            held_blocks += blocks
    return time_s


def _covering(model: Model, servers: Sequence[Server], held: Sequence[range]) -> Placement:
    lacking = model.blocks - len({block for blocks in held for block in blocks})
    if lacking:
        raise InputError(
            f"{len(servers)} servers leave {lacking} of {model.blocks} blocks without a place; "
            "give more servers, or a --placement that spreads the model over several"
        )
    return Placement(model, servers, tuple(held))
