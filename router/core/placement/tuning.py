"""Number of slots to reserve when blocks are placed.

Few reserved slots make short, fast chains; many admit more requests at once ("Serving
Chain-structured Jobs with Large Memory Footprints", Figure 1). The best number depends on the
arrivals, so all numbers that change a placement are compared. Few are computed to the end, since
bounds come cheap (``ideal_rates``).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from router.core.errors import PlacementError
from router.core.forecast.forecast import Floats, Ints
from router.core.placement.bounds import ResponseBounds, chain_bounds, response_bounds
from router.core.placement.gbp_cr import Fleet, Layout, lay_out, placed, rooms
from router.core.placement.gca import allocation
from router.core.placement.model import Chain, Model, Placement, Server, total_rate


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


class Criterion(StrEnum):
    """Objective: a bound on the mean response time (section 3.2.3), or c K(c) (14)."""

    LOWER = "lower"
    UPPER = "upper"
    SURROGATE = "surrogate"


# Chains of GCA between two checks of the bound.
_LOOK_EVERY = 25


@dataclass(frozen=True, slots=True)
class Composition:
    """Its bounds are of GCA's ``overlapping`` chains, if requested, else of GBP-CR's."""

    reserved_slots: int
    placement: Placement
    disjoint: tuple[Chain, ...]
    overlapping: tuple[Chain, ...]
    bounds: ResponseBounds


# Order of compositions: the criterion, then the negative total rate.
Cost = tuple[float, float]


def compose(
    model: Model,
    servers: Sequence[Server],
    rate: float,
    load: float = 0.7,
    criterion: Criterion = Criterion.LOWER,
    overlapping: bool = True,
) -> Composition:
    """The best placement over all numbers of reserved slots, and its chains.

    ``overlapping`` chains are those of GCA, else of GBP-CR alone. If no composition suffices for
    lambda, ``rate``, at rho, ``load``, the fastest wins. UPPER takes ten times as long or more on a
    large fleet, since the best case of a placement says little about its worst. PlacementError: the
    servers cannot hold the model and one request.
    """
    # For each number of reserved slots; equal ones are skipped.
    fleet, layouts = Fleet.of(servers), list[Layout]()
    layout = lay_out(model, fleet, 1, rate, load)
    while layout.ends:
        layouts.append(layout)
        layout = lay_out(model, fleet, _next_reserved(layout, rate, load), rate, load)
    if not layouts:
        raise _too_small(model, servers)
    asked = _Question(rate, criterion, overlapping)
    promised = sorted(
        ((asked.least_cost(layout, ideal_rates(layout)), layout) for layout in layouts),
        key=lambda pair: (pair[0], pair[1].reserved),
    )
    lowest: Cost = (math.inf, math.inf)
    best: Composition | None = None
    for least, layout in promised:
        if least >= lowest:
            break
        found = asked.composition(layout, lowest)
        if found and (cost := asked.cost(layout, found)) < lowest:
            lowest, best = cost, found
    assert best is not None
    return best


def _next_reserved(layout: Layout, rate: float, load: float) -> int:
    """The next number at which a server holds fewer blocks, or fewer chains suffice."""
    model, memory = layout.model, layout.fleet.memory_bytes
    room = rooms(model, layout.fleet, layout.reserved)
    able = room > 0
    weights = model.block_bytes * room[able]
    last = ((memory[able] - weights) // (model.slot_bytes * room[able])).min()
    fewer = layout.scaled_rates[-2] if layout.enough else layout.scaled_rates[-1]
    enough = rate / (load * fewer) if fewer else math.inf
    return max(layout.reserved + 1, int(min(last + 1, enough)))


@dataclass(frozen=True, slots=True)
class _Question:
    rate: float
    criterion: Criterion
    overlapping: bool

    def composition(self, layout: Layout, lowest: Cost) -> Composition | None:
        """The chains under a layout; None once they cannot cost less."""
        grouping = placed(layout)
        found: list[Chain] = []
        for chain, free in allocation(grouping.placement) if self.overlapping else ():
            found.append(chain)
            if len(found) % _LOOK_EVERY == 0:
                rates = ideal_end(layout, found, free)
                if self.least_cost(layout, rates) >= lowest:
                    return None
        used = found or grouping.chains
        bounds = chain_bounds(used, self.rate)
        placement, reserved = grouping.placement, layout.reserved
        return Composition(reserved, placement, grouping.chains, tuple(found), bounds)

    def cost(self, layout: Layout, composition: Composition) -> Cost:
        bounds = composition.bounds
        values = {Criterion.LOWER: bounds.lower_s, Criterion.UPPER: bounds.upper_s}
        rate = total_rate(composition.overlapping or composition.disjoint)
        return values.get(self.criterion, _surrogate(layout)), -rate

    def least_cost(self, layout: Layout, rates: Floats) -> Cost:
        """Lower bound on the cost of chains whose slots are no faster than these."""
        if self.criterion is Criterion.SURROGATE:
            value = _surrogate(layout)
        else:
            value = response_bounds(rates, np.ones(len(rates), dtype=int), self.rate).lower_s
        # Equal up to rounding does not count as more.
        return value * (1 - 1e-9), -float(rates.sum()) * (1 + 1e-9)


def _surrogate(layout: Layout) -> float:
    """C K(c), objective of (10); infinite if its chains do not suffice."""
    return layout.reserved * len(layout.ends) if layout.enough else math.inf


def _too_small(model: Model, servers: Sequence[Server]) -> PlacementError:
    one = model.block_bytes + model.slot_bytes
    room = int(rooms(model, Fleet.of(servers), 1).sum())
    missing = model.blocks - room
    return PlacementError(
        f"{len(servers)} servers cannot hold the model and a request: they have room for {room} of "
        f"its {model.blocks} blocks, and each takes {one / 1e9:,.3f} GB with one slot; "
        f"{missing * one / 1e9:,.3f} GB more are needed at least: add servers or memory, or "
        "shorten the requests",
        missing_bytes=missing * one,
        missing_blocks=missing,
    )
