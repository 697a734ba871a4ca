"""Laws of block placement, cache allocation and the bounds."""

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.errors import PlacementError
from router.core.forecast.forecast import Floats
from router.core.placement.bounds import response_bounds
from router.core.placement.exact_response import exact_response_s
from router.core.placement.gbp_cr import Fleet, gbp_cr, lay_out
from router.core.placement.gca import allocation, gca
from router.core.placement.model import Chain, Placement, total_rate
from router.core.placement.tuning import Criterion, compose, ideal_end, ideal_rates
from tests.support.placements import (
    check_chains,
    fewest_chains,
    gca_by_listing,
    random_model,
    random_servers,
)

seeds = st.integers(0, 2**32).map(Random)
loads = st.floats(0.05, 0.95)
job_servers = st.lists(st.tuples(st.floats(0.05, 20), st.integers(1, 6)), min_size=1, max_size=3)


@given(seeds, st.integers(1, 12), st.integers(1, 6), st.floats(0.01, 50))
def test_disjoint_chains_hold_all_blocks_and_what_was_reserved(
    rng: Random, count: int, reserved: int, rate: float
) -> None:
    model, servers = random_model(rng), random_servers(rng, count)
    grouping = gbp_cr(model, servers, reserved, rate)

    check_chains(grouping.placement, grouping.chains)
    members = [server for chain in grouping.chains for server in chain.servers]
    assert len(set(members)) == len(members)
    assert all(chain.slots >= reserved for chain in grouping.chains)
    assert not grouping.enough or total_rate(grouping.chains) * 0.7 >= rate * (1 - 1e-9)
    everything = gbp_cr(model, servers, reserved, math.inf).chains
    assert grouping.chains == everything[: len(grouping.chains)]
    assert grouping.enough or len(grouping.chains) == len(everything)


@given(seeds, st.integers(1, 6), st.integers(1, 4), st.floats(0.01, 10))
def test_no_grouping_has_fewer_chains_where_memory_is_equal(
    rng: Random, count: int, reserved: int, rate: float
) -> None:
    """Theorem 3.4, against all groupings."""
    model, servers = random_model(rng), random_servers(rng, count, alike=True)
    grouping = gbp_cr(model, servers, reserved, rate)
    fewest = fewest_chains(model, servers, reserved, rate / (0.7 * reserved))

    assert (len(grouping.chains) if grouping.enough else None) == fewest


@given(seeds, st.integers(1, 8), st.integers(1, 4))
def test_allocation_takes_the_fastest_of_all_chains_each_time(
    rng: Random, count: int, reserved: int
) -> None:
    """Wherever blocks lie: those of GBP-CR, then moved at random."""
    model, servers = random_model(rng), random_servers(rng, count)
    placement = gbp_cr(model, servers, reserved, math.inf).placement
    moved = replace(
        placement, held=tuple(_moved(rng, held, model.blocks) for held in placement.held)
    )
    for where in (placement, moved):
        chains = gca(where)

        check_chains(where, chains)
        listed = gca_by_listing(where)
        assert [chain.slots for chain in chains] == [slots for _, slots in listed]
        assert [chain.service_s for chain in chains] == pytest.approx([time for time, _ in listed])


def _moved(rng: Random, held: range, blocks: int) -> range:
    start = rng.randint(0, blocks - len(held))
    return range(start, start + len(held))


@given(seeds, st.integers(1, 8), st.integers(1, 4))
def test_no_chains_surpass_the_ideal(rng: Random, count: int, reserved: int) -> None:
    model, servers = random_model(rng), random_servers(rng, count)
    grouping = gbp_cr(model, servers, reserved, math.inf)
    layout = lay_out(model, Fleet.of(servers), reserved, math.inf, 0.7)
    overlapping = gca(grouping.placement)
    _check_none_surpasses(ideal_rates(layout), grouping.chains)
    _check_none_surpasses(ideal_rates(layout), overlapping)
    for found, (_, free) in enumerate(allocation(grouping.placement), 1):
        _check_none_surpasses(ideal_end(layout, overlapping[:found], free), overlapping)


def _check_none_surpasses(ideal: Floats, chains: Sequence[Chain]) -> None:
    slots = [chain.slots for chain in chains]
    each = np.sort(np.repeat([chain.service_rate for chain in chains], slots))[::-1]

    assert len(each) <= len(ideal)
    assert (np.cumsum(each) <= np.cumsum(ideal)[: len(each)] * (1 + 1e-9)).all()


@given(seeds, st.integers(1, 6), st.floats(0.01, 30), st.booleans(), st.sampled_from(Criterion))
def test_tuning_finds_what_trying_every_number_of_slots_finds(
    rng: Random, count: int, rate: float, overlapping: bool, criterion: Criterion
) -> None:
    model, servers = random_model(rng), random_servers(rng, count)
    most = max(server.memory_bytes for server in servers) // model.slot_bytes
    costs = []
    for reserved in range(1, most + 1):
        grouping = gbp_cr(model, servers, reserved, rate)
        if grouping.chains:
            chains = gca(grouping.placement) if overlapping else grouping.chains
            surrogate = reserved * len(grouping.chains) if grouping.enough else math.inf
            costs.append((*_limits(chains, rate), surrogate, -total_rate(chains)))
    if not costs:
        with pytest.raises(PlacementError, match="cannot hold the model"):
            compose(model, servers, rate, criterion=criterion, overlapping=overlapping)
        return
    best = compose(model, servers, rate, criterion=criterion, overlapping=overlapping)
    chains = best.overlapping if overlapping else best.disjoint

    check_chains(best.placement, best.disjoint)
    check_chains(best.placement, best.overlapping)
    assert bool(best.overlapping) == overlapping
    assert (best.bounds.lower_s, best.bounds.upper_s) == _limits(chains, rate)
    at = list(Criterion).index(criterion)
    surrogate = best.reserved_slots * len(best.disjoint)
    found = (best.bounds.lower_s, best.bounds.upper_s, surrogate)[at]
    least = min(cost[at] for cost in costs)
    if least < math.inf:
        assert found == pytest.approx(least)
    else:
        assert -total_rate(chains) == pytest.approx(min(cost[-1] for cost in costs))


def _limits(chains: tuple[Chain, ...], rate: float) -> tuple[float, float]:
    rates, slots = [chain.service_rate for chain in chains], [chain.slots for chain in chains]
    limits = response_bounds(rates, slots, rate)
    return limits.lower_s, limits.upper_s


@given(job_servers, loads)
def test_the_exact_time_lies_within_the_bounds(
    chains: list[tuple[float, int]], load: float
) -> None:
    rates, slots = zip(*chains, strict=True)
    arrivals = load * sum(rate * count for rate, count in chains)
    limits = response_bounds(rates, slots, arrivals)
    exact_s = exact_response_s(rates, slots, arrivals)

    assert exact_s is not None
    assert limits.lower_s <= exact_s * (1 + 1e-9)
    assert exact_s <= limits.upper_s * (1 + 1e-9)


@given(st.permutations([(1.0, 3), (0.5, 4), (2.0, 1)]), loads)
def test_the_order_of_chains_does_not_matter(chains: list[tuple[float, int]], load: float) -> None:
    rates, slots = zip(*chains, strict=True)
    there, here = ((1.0, 0.5, 2.0), (3, 4, 1), 7 * load), (rates, slots, 7 * load)

    assert response_bounds(*here) == response_bounds(*there)
    assert exact_response_s(*here) == exact_response_s(*there)


def test_a_placement_may_have_no_chain() -> None:
    rng = Random(0)
    model, servers = random_model(rng), random_servers(rng, 3)

    assert gca(Placement(model, servers, [range(0)] * 3)) == ()
