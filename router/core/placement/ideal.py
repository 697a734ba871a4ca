from collections.abc import Sequence

import numpy as np

from router.core.forecast.forecast import Floats, Ints
from router.core.placement.gbp_cr import Layout
from router.core.placement.model import Chain


def ideal_rates(layout: Layout, free: Sequence[int] | None = None) -> Floats:
    """Upper bounds on the rates of slots, fastest first, of any chains under a layout.

    They assume blocks everywhere: each slot takes the L cheapest block slots left, at the time per
    block of a server that computes all its blocks. The k fastest slots of real chains take as many
    block slots, so their times sum to no less, for each k. Then a convex decreasing function such
    as the rate 1 / T sums to no more over the n fastest real slots (weak majorization).

    ``free``: slots left per server, each for one request in one block; None: all.
    """
    fleet, model, at = layout.fleet, layout.model, layout.order
    if free is None:
        left_bytes = fleet.memory_bytes[at] - model.block_bytes * layout.room
        slots: Ints = left_bytes // model.slot_bytes
    else:
        slots = np.array(free, dtype=np.int64)[at]
    per_block_s = fleet.block_s[at] + fleet.hop_s[at] / layout.room
    used = np.concatenate([[0], np.cumsum(slots)])
    spent_s = np.concatenate([[0.0], np.cumsum(slots * per_block_s)])
    jobs = np.arange(used[-1] // model.blocks + 1)
    times_s: Floats = np.diff(np.interp(jobs * model.blocks, used, spent_s))
    return 1 / times_s


def ideal_end(layout: Layout, chains: Sequence[Chain], free: Sequence[int]) -> Floats:
    """The same bounds after GCA's first chains; none of the rest is faster than the last."""
    rates = [chain.service_rate for chain in chains]
    found = np.repeat(rates, [chain.slots for chain in chains])
    more = np.cumsum(ideal_rates(layout, free))
    more = np.minimum(more, rates[-1] * np.arange(1, len(more) + 1))
    return np.concatenate([found, np.diff(more, prepend=0.0)])
