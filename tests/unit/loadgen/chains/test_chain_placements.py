"""Other placements of blocks than GBP-CR, each request's own way, and the fewest slots."""

from itertools import product

import numpy as np
import pytest

from loadgen.chains import routing
from loadgen.chains.ilp import fewest_slots
from loadgen.chains.placements import bprr, petals, whole
from loadgen.chains.routing import Paths, simulate_routing
from loadgen.chains.scenario import BLOOM_176B, LLAMA_2_7B
from loadgen.chains.work import Work, draw_work
from router.core.errors import InputError
from router.core.placement.gbp_cr import gbp_cr
from router.core.placement.gca import gca
from router.core.placement.model import Chain, Model, Placement, Server, total_rate

MODEL = Model(blocks=3, block_bytes=10, slot_bytes=1)


def server(memory_bytes: int, block_s: float = 1.0, hop_s: float = 0.0) -> Server:
    return Server("one", memory_bytes, hop_s, block_s)


def placements() -> list[Placement]:
    servers = BLOOM_176B.drawn(2)
    return [
        petals(BLOOM_176B.model, servers),
        bprr(BLOOM_176B.model, servers, rate=0.2)[0],
        gbp_cr(BLOOM_176B.model, servers, 5, rate=1.0).placement,
    ]


@pytest.mark.parametrize("placement", placements())
def test_all_blocks_have_a_place_and_memory_for_a_request(placement: Placement) -> None:
    assert {block for held in placement.held for block in held} == set(range(70))
    assert all(placement.block_slots(at) >= len(held) for at, held in enumerate(placement.held))


def test_petals_servers_join_where_the_model_is_slowest() -> None:
    servers = [server(24), server(24, 0.5), server(12), server(24), server(5)]
    held = petals(MODEL, servers, reserved=2).held

    # Blocks 0 and 1; then 1 and 2, of which 2 has nobody; 0 is served by the slow one alone.
    assert held == (range(2), range(1, 3), range(1), range(2), range(0))


def test_bprr_keeps_memory_for_those_that_are_there_at_once() -> None:
    servers = [server(24), server(24, 0.5), server(24)]
    assert bprr(MODEL, servers, rate=1.0, reserved=2) == (
        Placement(MODEL, servers, (range(1, 3), range(2), range(1, 3))),
        2,
    )
    # Both are passed, of 2 blocks each, in 0.5 * 2 + 1 * 2 s: at a rate of 3 by 9 at once.
    assert bprr(MODEL, [server(40), server(40, 0.5)], rate=3.0)[1] == 9
    # There is no memory for more than 10 of them.
    assert bprr(MODEL, [server(40), server(40, 0.5)], rate=100.0)[1] == 10


def test_the_whole_model_where_it_fits() -> None:
    placement, chains = whole(MODEL, [server(33), server(32), server(45, 2.0)])

    assert placement.held == (range(3), range(0), range(3))
    assert chains == (Chain((0,), (3,), 3.0, 1), Chain((2,), (3,), 6.0, 5))


def test_too_few_servers() -> None:
    with pytest.raises(InputError, match="1 servers leave 1 of 3 blocks without a place"):
        petals(MODEL, [server(26)])
    with pytest.raises(InputError, match="leave 3 of 3 blocks"):
        whole(MODEL, [server(32)])


def test_the_fastest_way_that_has_memory() -> None:
    """Server 1 after server 0 computes block 2 alone, and server 2 all of its own."""
    servers = [server(22), server(22), server(33, 3.0, 0.5)]
    placement = Placement(MODEL, servers, (range(2), range(1, 3), range(3)))
    paths = Paths(placement)

    first, second = paths.fastest([2, 2, 3]), paths.fastest([1, 2, 3])
    assert first is not None
    assert second is not None
    assert (first.used, first.service_s) == (((0, 2), (1, 1)), 3.0)
    assert (second.used, second.service_s) == (((2, 3),), 9.5)
    assert paths.fastest([1, 2, 2]) is None


def test_ways_are_found_anew_when_too_many_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    placement = placements()[0]
    work = draw_work(0.3, 500, 1)
    known = simulate_routing(placement, work)
    monkeypatch.setattr(routing, "_MOST_REMEMBERED", 2)

    assert np.array_equal(simulate_routing(placement, work).response_s, known.response_s)


def test_requests_wait_for_memory_in_their_order() -> None:
    placement = Placement(MODEL, [server(22), server(12)], (range(2), range(2, 3)))
    work = Work(np.array([0.0, 1.0, 2.0]), np.array([2.0, 1.0, 1.0]))
    served = simulate_routing(placement, work)

    assert served.waiting_s.tolist() == [0.0, 5.0, 7.0]
    assert served.service_s.tolist() == [6.0, 3.0, 3.0]


def test_no_memory_for_a_single_request() -> None:
    full = Placement(MODEL, [server(30)], (range(3),))
    with pytest.raises(InputError, match="no path through all blocks has memory"):
        simulate_routing(full, draw_work(1, 10, 0))


@pytest.mark.parametrize("share", [0.2, 0.6, 1.0])
def test_the_fewest_slots_are_the_fewest(share: float) -> None:
    servers = [server(26), server(26, 0.5), server(26), server(26), server(15, 0.2)]
    placement = gbp_cr(MODEL, servers, 2, rate=100.0).placement
    chains = gca(placement)
    rate = share * total_rate(chains)
    found = fewest_slots(chains, placement, rate * (1 - 1e-9))

    assert total_rate(found) >= rate * (1 - 1e-6)
    assert sum(chain.slots for chain in found) == brute_force(chains, placement, rate * (1 - 1e-9))


def brute_force(chains: tuple[Chain, ...], placement: Placement, rate: float) -> int:
    """The fewest slots, of all numbers of slots that fit."""
    most = range(1 + max(placement.block_slots(at) for at in range(len(placement.servers))))
    fitting = [
        sum(slots)
        for slots in product(most, repeat=len(chains))
        if sum(n * chain.service_rate for n, chain in zip(slots, chains, strict=True)) >= rate
        and all(used <= placement.block_slots(at) for at, used in taken(chains, slots).items())
    ]
    return min(fitting)


def taken(chains: tuple[Chain, ...], slots: tuple[int, ...]) -> dict[int, int]:
    used: dict[int, int] = {}
    for count, chain in zip(slots, chains, strict=True):
        for at, blocks in zip(chain.servers, chain.blocks, strict=True):
            used[at] = used.get(at, 0) + count * blocks
    return used


def test_gca_needs_hardly_more_than_the_fewest() -> None:
    servers = LLAMA_2_7B.drawn(0)
    grouping = gbp_cr(LLAMA_2_7B.model, servers, 30, rate=30.0)
    chains = gca(grouping.placement)
    fewest = sum(chain.slots for chain in fewest_slots(chains, grouping.placement, 20.0))
    by_speed, slots = 20.0, 0
    for chain in chains:
        count = min(chain.slots, int(np.ceil(max(0.0, by_speed) / chain.service_rate)))
        by_speed -= count * chain.service_rate
        slots += count

    assert fewest <= slots <= 1.05 * fewest


def test_more_than_all_slots_complete() -> None:
    placement = gbp_cr(MODEL, [server(26)] * 3, 1, rate=1.0).placement
    with pytest.raises(InputError, match="cannot complete 1000 requests per second"):
        fewest_slots(gca(placement), placement, 1000.0)
