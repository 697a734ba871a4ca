"""Random servers, and what can be found about their chains by trying everything."""

import math
from collections.abc import Iterator, Sequence
from random import Random

from router.core.placement.model import Chain, Model, Placement, Server

GB = 10**9


def random_model(rng: Random) -> Model:
    return Model(rng.randint(1, 8), rng.randint(5, 20), rng.randint(1, 6))


def random_servers(
    rng: Random, count: int, memory: tuple[int, int] = (10, 200), alike: bool = False
) -> list[Server]:
    """Servers with times of their own; alike: with one memory."""
    one = rng.randint(*memory)
    return [
        Server(f"s{at}", one if alike else rng.randint(*memory), rng.random(), 0.05 + rng.random())
        for at in range(count)
    ]


def mixed_servers(rng: Random, count: int, types: Sequence[tuple[int, float]]) -> list[Server]:
    """GPUs of some types (GB, seconds per block), at random distances."""
    drawn = [types[rng.randrange(len(types))] for _ in range(count)]
    return [
        Server(f"gpu{at}", memory * GB, 0.02 + 0.1 * rng.random(), block_s)
        for at, (memory, block_s) in enumerate(drawn)
    ]


def partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    """All ways to part items into sets."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for parts in partitions(rest):
        yield [[first], *parts]
        for at, part in enumerate(parts):
            yield [*parts[:at], [first, *part], *parts[at + 1 :]]


def fewest_chains(
    model: Model, servers: Sequence[Server], reserved: int, needed: float
) -> int | None:
    """Problem (10) by trying all groups: the fewest disjoint chains with sum of 1 / T >= needed."""
    one = model.block_bytes + model.slot_bytes * reserved
    room = [min(server.memory_bytes // one, model.blocks) for server in servers]
    able = [at for at, count in enumerate(room) if count]
    best = [0.0] * (len(able) + 1)
    for parts in partitions(able):
        rates = sorted(
            (
                1 / sum(servers[at].time_s(room[at]) for at in part)
                for part in parts
                if sum(room[at] for at in part) >= model.blocks
            ),
            reverse=True,
        )
        for count in range(1, len(rates) + 1):
            best[count] = max(best[count], sum(rates[:count]))
    # What GBP-CR sums in another order is as much.
    return next((k for k, rate in enumerate(best) if 0 < rate >= needed * (1 - 1e-12)), None)


def all_chains(placement: Placement, at: int = 0) -> Iterator[tuple[tuple[int, int], ...]]:
    """All ways from a block to the end: (server, blocks that it computes) of each."""
    if at == placement.model.blocks:
        yield ()
        return
    for server, held in enumerate(placement.held):
        if at in held:
            for rest in all_chains(placement, held.stop):
                yield ((server, held.stop - at), *rest)


def gca_by_listing(placement: Placement) -> list[tuple[float, int]]:
    """Algorithm 2 with all chains in a list: (service time, slots) of each that it takes."""
    free = [placement.block_slots(server) for server in range(len(placement.servers))]
    times = sorted(
        (math.fsum(placement.servers[j].time_s(count) for j, count in chain), chain)
        for chain in all_chains(placement)
    )
    found = []
    for time_s, chain in times:
        slots = min(free[server] // count for server, count in chain)
        if slots:
            found.append((time_s, slots))
            for server, count in chain:
                free[server] -= slots * count
    return found


def check_chains(placement: Placement, chains: Sequence[Chain]) -> None:
    """Every chain passes all blocks in order, and no server holds more than its memory."""
    model, servers = placement.model, placement.servers
    used = [model.block_bytes * len(held) for held in placement.held]
    for chain in chains:
        at = 0
        for server, blocks in zip(chain.servers, chain.blocks, strict=True):
            held = placement.held[server]
            assert at in held
            assert held.stop - at == blocks
            at = held.stop
            used[server] += model.slot_bytes * blocks * chain.slots
        assert at == model.blocks
        assert chain.slots >= 1
        times = (servers[j].time_s(n) for j, n in zip(chain.servers, chain.blocks, strict=True))
        assert math.isclose(chain.service_s, sum(times))
    assert all(
        bytes_ <= server.memory_bytes
        for bytes_, server in zip(used, servers, strict=True)
        if bytes_
    )
