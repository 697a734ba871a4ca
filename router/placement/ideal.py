"""What chains can promise at best, before they are known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from router.placement.gbp_cr import Layout
from router.placement.model import Chain
from router.workload import Floats, Ints


def ideal_rates(layout: Layout, free: Sequence[int] | None = None) -> Floats:
    """Rates of slots, fastest first, that no chains under a layout can surpass.

    As if blocks lay everywhere: each slot is made of the L cheapest block slots that are left, at
    the time per block of a server that computes all that it holds. The k fastest slots of real
    chains take as many block slots, so their times add up to no less, for each k; and of times in
    such an order those of the lesser have the greater sum of any convex decreasing function, the
    rate 1 / T for one (weak majorization). So for each n the n fastest real slots complete no more.

    Args:
        layout: which servers hold how many blocks.
        free: of each server, slots for one request in one block that are left; None: all.
    """
    fleet, model, at = layout.fleet, layout.model, layout.order
    slots = _all_slots(layout) if free is None else np.array(free, dtype=np.int64)[at]
    per_block_s = fleet.block_s[at] + fleet.hop_s[at] / layout.room
    used = np.concatenate([[0], np.cumsum(slots)])
    spent_s = np.concatenate([[0.0], np.cumsum(slots * per_block_s)])
    jobs = np.arange(used[-1] // model.blocks + 1)
    times_s: Floats = np.diff(np.interp(jobs * model.blocks, used, spent_s))
    return 1 / times_s


def ideal_end(layout: Layout, chains: Sequence[Chain], free: Sequence[int]) -> Floats:
    """The same where GCA has found chains, and none of what is left is faster than the last one."""
    rates = [chain.service_rate for chain in chains]
    found = np.repeat(rates, [chain.slots for chain in chains])
    more = np.cumsum(ideal_rates(layout, free))
    more = np.minimum(more, rates[-1] * np.arange(1, len(more) + 1))
    return np.concatenate([found, np.diff(more, prepend=0.0)])


def _all_slots(layout: Layout) -> Ints:
    left = layout.fleet.memory_bytes[layout.order] - layout.model.block_bytes * layout.room
    return left // layout.model.slot_bytes
