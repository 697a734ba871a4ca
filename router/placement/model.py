"""What server chains are made of: servers, the blocks of a model, where they lie, the chains.

A model is a row of like blocks (transformer layers); a server holds some consecutive ones, and a
chain of servers holds them all ("Serving Chain-structured Jobs with Large Memory Footprints",
section 2.1). Blocks are counted from 0 here, so server j of the paper, which holds m_j blocks from
its block a_j on, has ``range(a_j - 1, a_j - 1 + m_j)``. Memory is in whole bytes: slots are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Server:
    """One GPU, or a slice of one, that may hold blocks.

    Attributes:
        name: unique.
        memory_bytes: M, for blocks and for the cache of the requests in them.
        hop_s: tau^c, mean time that a request spends on the way to it, over its whole life.
        block_s: tau^p, mean time that a request is computed in one block, over its whole life.
    """

    name: str
    memory_bytes: int
    hop_s: float
    block_s: float

    def time_s(self, blocks: int) -> float:
        """Mean time that a request spends with it, for that many blocks."""
        return self.hop_s + self.block_s * blocks


@dataclass(frozen=True, slots=True)
class Model:
    """What is served.

    Attributes:
        blocks: L, in their order.
        block_bytes: s_m, of each one's weights.
        slot_bytes: s_c, that a request takes in each block that it passes.
    """

    blocks: int
    block_bytes: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Which blocks lie where.

    Attributes:
        model: what is placed.
        servers: in the caller's order; chains name them by index.
        held: of each server the blocks that it holds; empty: none.
    """

    model: Model
    servers: Sequence[Server]
    held: Sequence[range]

    def block_slots(self, server: int) -> int:
        """Pairs of a request and a block for which a server has cache: (M - s_m m) // s_c."""
        left = self.servers[server].memory_bytes - self.model.block_bytes * len(self.held[server])
        return left // self.model.slot_bytes

    def named(self, chain: Chain) -> dict[str, object]:
        """A chain as it is written to a file, its servers by name."""
        return {
            "servers": [self.servers[server].name for server in chain.servers],
            "blocks": list(chain.blocks),
            "slots": chain.slots,
            "service_rate": chain.service_rate,
            "service_s": chain.service_s,
        }


@dataclass(frozen=True, slots=True)
class Chain:
    """Servers that hold all blocks together, in the order in which a request passes them.

    Attributes:
        servers: their indices.
        blocks: how many each of them computes, m_ij; they add up to the model's.
        service_s: T, mean time that a request spends in it.
        slots: c, requests that may be in it at once.
    """

    servers: tuple[int, ...]
    blocks: tuple[int, ...]
    service_s: float
    slots: int

    @property
    def service_rate(self) -> float:
        """Requests that each slot completes per second: mu = 1 / T."""
        return 1 / self.service_s


def total_rate(chains: Sequence[Chain]) -> float:
    """Requests per second that chains complete with all slots busy: nu = sum of c mu."""
    return sum(chain.slots * chain.service_rate for chain in chains)
