"""Server chains by hand: the paper's examples, queues with known formulas, edges."""

import math
from collections.abc import Sequence
from decimal import Decimal, getcontext
from random import Random

import numpy as np
import pytest

from router.core.errors import PlacementError
from router.core.placement.bounds import response_bounds
from router.core.placement.exact_response import exact_response_s
from router.core.placement.gbp_cr import gbp_cr
from router.core.placement.gca import gca
from router.core.placement.model import Model, Placement, Server, total_rate
from router.core.placement.tuning import compose
from tests.support.placements import fewest_chains, random_model, random_servers

State = tuple[int, ...]


def generator_response_s(
    rates: Sequence[float], slots: Sequence[int], arrivals: float, queue: int
) -> float:
    """Mean response time by the generator matrix of all states, with so many waiting at most."""
    chains = sorted(zip(rates, slots, strict=True), reverse=True)
    full = tuple(count for _, count in chains)
    found: dict[State, int] = {(0, *(0 for _ in chains)): 0}
    states = list(found)
    moves: list[tuple[int, int, float]] = []
    for state in states:  # which grows as states are found
        for to, rate in _transitions(state, chains, full, arrivals):
            if to[0] <= queue:
                if to not in found:
                    found[to] = len(found)
                    states.append(to)
                moves.append((found[state], found[to], rate))
    balance = np.zeros((len(states), len(states)))
    for at, there, rate in moves:
        balance[there, at] += rate
        balance[at, at] -= rate
    balance[0] = 1.0
    shares = np.linalg.solve(balance, np.eye(len(states))[0])
    return float(shares @ [sum(state) for state in states]) / arrivals


def _transitions(
    state: State, chains: Sequence[tuple[float, int]], full: State, arrivals: float
) -> list[tuple[State, float]]:
    """Section 3.2.2, equation (23); a state is the queue, then the requests of each chain."""
    queue, busy = state[0], state[1:]
    free = [at for at, count in enumerate(busy) if count < full[at]]
    if free:
        up = tuple(count + (at == free[0]) for at, count in enumerate(busy))
        moves = [((0, *up), arrivals)]
    else:
        moves = [((queue + 1, *busy), arrivals)]
    for chain, (rate, _) in enumerate(chains):
        if queue and busy[chain]:
            moves.append(((queue - 1, *busy), rate * busy[chain]))
        elif busy[chain]:
            down = tuple(count - (at == chain) for at, count in enumerate(busy))
            moves.append(((0, *down), rate * busy[chain]))
    return moves


def erlang_response_s(rate: float, servers: int, arrivals: float) -> float:
    """M/M/c by Erlang's C."""
    offered = arrivals / rate
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = offered * blocked / (count + offered * blocked)
    waiting = blocked / (1 - offered / servers * (1 - blocked))
    return 1 / rate + waiting / (servers * rate - arrivals)


def test_two_chains_at_seven_tenths() -> None:
    limits = response_bounds([1, 0.5], [3, 4], 3.5)

    assert limits.lower_s == pytest.approx(1.3998, rel=1e-3)
    assert limits.upper_s == pytest.approx(1.7881, rel=1e-3)
    assert exact_response_s([1, 0.5], [3, 4], 3.5) == pytest.approx(1.5388, rel=1e-3)


@pytest.mark.parametrize(
    ("rates", "slots", "load"),
    [
        ([1, 0.5], [3, 4], 0.7),
        ([1, 0.5], [3, 4], 0.2),
        ([0.1, 2, 0.7], [2, 1, 3], 0.8),
        ([3, 2, 1, 0.5], [1, 1, 2, 2], 0.6),
        ([2, 0.01], [1, 5], 0.9),
    ],
)
def test_the_exact_time_is_that_of_the_whole_markov_chain(
    rates: list[float], slots: list[int], load: float
) -> None:
    arrivals = load * sum(rate * count for rate, count in zip(rates, slots, strict=True))
    by_generator_s = generator_response_s(rates, slots, arrivals, queue=300)

    assert exact_response_s(rates, slots, arrivals) == pytest.approx(by_generator_s, rel=1e-8)


@pytest.mark.parametrize("servers", [1, 2, 30, 1000])
def test_slots_of_one_speed_are_a_queue_with_so_many_servers(servers: int) -> None:
    arrivals = 0.5 * servers * 0.95
    known_s = erlang_response_s(0.5, servers, arrivals)
    limits = response_bounds([0.5], [servers], arrivals)

    assert limits.lower_s == pytest.approx(known_s, rel=1e-9)
    assert limits.upper_s == pytest.approx(known_s, rel=1e-9)
    assert exact_response_s([0.5, 0.5], [servers - 1, 1], arrivals) == pytest.approx(known_s)


@pytest.mark.parametrize("load", [0.1, 0.7, 0.999])
def test_bounds_of_thousands_of_slots_are_those_of_exact_sums(load: float) -> None:
    rates = [Random(1).uniform(0.001, 10) for _ in range(5000)]
    arrivals = load * sum(rates)
    limits = response_bounds(rates, [1] * len(rates), arrivals)

    assert limits.lower_s == pytest.approx(_decimal_s(sorted(rates, reverse=True), arrivals))
    assert limits.upper_s == pytest.approx(_decimal_s(sorted(rates), arrivals))


def _decimal_s(rates: list[float], arrivals: float) -> float:
    """Equations (30) to (32) as they are printed, in numbers that do not overflow."""
    getcontext().prec = 40
    rate, total, phi = Decimal(arrivals), Decimal(0), Decimal(1)
    weight, requests = Decimal(0), Decimal(0)
    for count, mu in enumerate(rates):
        weight, requests = weight + phi, requests + count * phi
        total += Decimal(mu)
        phi *= rate / total
    load = rate / total
    weight += phi / (1 - load)
    requests += phi * (load / (1 - load) ** 2 + len(rates) / (1 - load))
    return float(requests / weight / rate)


@pytest.mark.parametrize("rates", [[2.0, 0.5], [0.5, 2.0]])
def test_the_ends_of_the_load(rates: list[float]) -> None:
    idle = response_bounds(rates, [1, 1], 0)

    assert (idle.lower_s, idle.upper_s) == (0.5, 2.0)
    assert exact_response_s(rates, [1, 1], 0) == 0.5
    assert response_bounds(rates, [1, 1], 1e-9).lower_s == pytest.approx(0.5)
    assert response_bounds(rates, [1, 1], 2.5).lower_s == math.inf
    assert exact_response_s(rates, [1, 1], 2.5) == math.inf
    assert response_bounds([], [], 1).upper_s == math.inf


@pytest.mark.parametrize("slots", [[400, 400], [20] * 3 + [1] * 5, [5] * 5, [10**6]])
def test_too_many_states_have_no_exact_answer(slots: list[int]) -> None:
    rates = [1 + at for at in range(len(slots))]

    assert exact_response_s(rates, slots, 0.5) is None


def test_more_reserved_slots_make_longer_chains_and_a_greater_rate() -> None:
    """The tradeoff of Figure 1: all blocks on each server, or one chain of all servers."""
    model = Model(blocks=3, block_bytes=10, slot_bytes=1)
    servers = [Server(name, 39, hop_s=1, block_s=0.1) for name in "abc"]
    short, long = gbp_cr(model, servers, 3, math.inf), gbp_cr(model, servers, 29, math.inf)

    assert [(chain.servers, chain.slots) for chain in short.chains] == [
        ((0,), 3),
        ((1,), 3),
        ((2,), 3),
    ]
    assert [(chain.servers, chain.slots) for chain in long.chains] == [((0, 1, 2), 29)]
    assert short.chains[0].service_s < long.chains[0].service_s
    assert total_rate(short.chains) < total_rate(long.chains)
    assert compose(model, servers, 0.1).reserved_slots < compose(model, servers, 8).reserved_slots


def test_servers_are_chained_by_their_time_per_block() -> None:
    """A server with much memory may take longer in all, and be the faster."""
    model = Model(blocks=4, block_bytes=10, slot_bytes=1)
    servers = [
        Server("small", 11, hop_s=0.5, block_s=0.5),
        Server("large", 33, hop_s=0.6, block_s=0.5),
        Server("slow", 44, hop_s=0.1, block_s=0.8),
    ]
    (first,) = gbp_cr(model, servers, 1, math.inf).chains

    assert (first.servers, first.blocks, first.slots) == ((1, 2), (3, 1), 1)
    assert first.service_s == pytest.approx(0.6 + 3 * 0.5 + 0.1 + 0.8)


def test_overlapping_chains_use_what_disjoint_ones_leave() -> None:
    """As in Figure 2: two chains over three blocks, and a third over servers of both."""
    model = Model(blocks=3, block_bytes=10, slot_bytes=1)
    servers = [
        Server(name, memory, hop_s=hop_s, block_s=0.1)
        for name, memory, hop_s in (("a", 31, 0.1), ("b", 12, 0.2), ("c", 12, 0.3), ("d", 28, 0.9))
    ]
    grouping = gbp_cr(model, servers, 2, math.inf)
    chains = gca(grouping.placement)

    assert [chain.servers for chain in grouping.chains] == [(0, 1), (2, 3)]
    assert [chain.slots for chain in grouping.chains] == [2, 2]
    assert [(chain.servers, chain.slots) for chain in chains] == [
        ((0, 1), 2),
        ((0, 3), 3),
        ((2, 3), 2),
    ]
    assert total_rate(chains) > total_rate(grouping.chains)


def test_overlapping_chains_need_memory_in_each_block() -> None:
    """The fast server holds all three blocks, and has memory for a request in two of them."""
    model = Model(blocks=3, block_bytes=10, slot_bytes=1)
    servers = [Server("fast", 32, 0.1, 0.1), Server("slow", 33, 1.0, 1.0)]
    chains = gca(Placement(model, servers, (range(3), range(3))))
    assert [(chain.servers, chain.slots) for chain in chains] == [((1,), 1)]


def test_a_chain_that_does_not_close_leaves_its_blocks() -> None:
    model = Model(blocks=4, block_bytes=10, slot_bytes=1)
    servers = [Server(name, 22, 0.1 * at, 1) for at, name in enumerate("abc")]
    grouping = gbp_cr(model, servers, 1, math.inf)

    assert [chain.servers for chain in grouping.chains] == [(0, 1)]
    assert grouping.placement.held == (range(2), range(2, 4), range(2))
    assert not grouping.enough


def test_two_hundred_groupings_beside_the_best_of_all() -> None:
    """With equal memory none is better (Theorem 3.4); with unequal memory few groupings are."""
    rng = Random(5)
    compared: dict[bool, list[tuple[int | None, int | None]]] = {True: [], False: []}
    for at in range(200):
        alike = at % 2 == 0
        model, servers = random_model(rng), random_servers(rng, rng.randint(2, 6), alike=alike)
        reserved = rng.randint(1, 3)
        most = total_rate(gbp_cr(model, servers, reserved, math.inf).chains)
        rate = rng.uniform(0.1, 1.2) * most
        grouping = gbp_cr(model, servers, reserved, rate)
        fewest = fewest_chains(model, servers, reserved, rate / (0.7 * reserved))
        compared[alike].append((len(grouping.chains) if grouping.enough else None, fewest))

    assert all(found == fewest for found, fewest in compared[True])
    assert all(fewest and found >= fewest for found, fewest in compared[False] if found)
    assert sum(found == fewest for found, fewest in compared[False]) >= 90


def test_servers_that_are_too_small_are_told_what_they_lack() -> None:
    model = Model(blocks=10, block_bytes=90, slot_bytes=10)
    with pytest.raises(PlacementError, match="room for 5 of its 10 blocks") as caught:
        compose(model, [Server("a", 250, 1, 1), Server("b", 399, 1, 1)], 1)

    assert (caught.value.missing_blocks, caught.value.missing_bytes) == (5, 500)
    with pytest.raises(PlacementError, match="0 servers cannot hold"):
        compose(model, [], 1)


def test_arrivals_that_are_too_fast_get_the_fastest_chains() -> None:
    model = Model(blocks=3, block_bytes=10, slot_bytes=1)
    servers = [Server(name, 39, hop_s=1, block_s=0.1) for name in "abc"]
    best = compose(model, servers, math.inf)

    assert best.bounds.lower_s == best.bounds.upper_s == math.inf
    assert total_rate(best.overlapping) == max(
        total_rate(gca(gbp_cr(model, servers, reserved, math.inf).placement))
        for reserved in range(1, 30)
    )


@pytest.mark.parametrize("load", [0.8, 1.2])
def test_what_cannot_win_any_more_is_given_up_and_the_best_is_found(load: float) -> None:
    rng = Random(3)
    model, servers = Model(40, 100, 60), random_servers(rng, 90, (1500, 4000))
    tried = [gbp_cr(model, servers, reserved, math.inf) for reserved in range(1, 60)]
    most = max(total_rate(gca(grouping.placement)) for grouping in tried if grouping.chains)
    rate = load * most
    best = compose(model, servers, rate)
    costs = []
    for reserved in range(1, 60):
        chains = gca(gbp_cr(model, servers, reserved, rate).placement)
        each = [chain.service_rate for chain in chains]
        limits = response_bounds(each, [chain.slots for chain in chains], rate)
        costs.append((limits.lower_s, -total_rate(chains)))

    assert len(best.overlapping) > 25
    assert (best.bounds.lower_s, -total_rate(best.overlapping)) == pytest.approx(min(costs))
