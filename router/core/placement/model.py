"""Servers, blocks of a model, placements and chains.

A model is a row of equal blocks (transformer layers). A server holds some consecutive ones, and a
chain of servers holds them all ("Serving Chain-structured Jobs with Large Memory Footprints",
section 2.1). Blocks count from 0: server j of the paper, with m_j blocks from a_j on, has
``range(a_j - 1, a_j - 1 + m_j)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Server:
    """One GPU, or a slice of one, that may hold blocks."""

    name: str
    memory_bytes: int  # M, for blocks and for the cache of their requests
    hop_s: float  # tau^c, mean time of a request on the way to it, over its whole life
    block_s: float  # tau^p, mean time of a request in one block, over its whole life

    def time_s(self, blocks: int) -> float:
        return self.hop_s + self.block_s * blocks


@dataclass(frozen=True, slots=True)
class Model:
    """A model to serve."""

    blocks: int  # L
    block_bytes: int  # s_m, weights of a block
    slot_bytes: int  # s_c, cache of a request in each block


@dataclass(frozen=True, slots=True)
class Placement:
    """Blocks held by each server, maybe none; chains refer to servers by index."""

    model: Model
    servers: Sequence[Server]
    held: Sequence[range]

    def block_slots(self, server: int) -> int:
        """Pairs of request and block that a server has cache for: (M - s_m m) // s_c."""
        left = self.servers[server].memory_bytes - self.model.block_bytes * len(self.held[server])
        return left // self.model.slot_bytes

    def named(self, chain: Chain) -> dict[str, object]:
        return {
            "servers": [self.servers[server].name for server in chain.servers],
            "blocks": list(chain.blocks),
            "slots": chain.slots,
            "service_rate": chain.service_rate,
            "service_s": chain.service_s,
        }


@dataclass(frozen=True, slots=True)
class Chain:
    """Servers that together hold all blocks, in the order of a request's path."""

    servers: tuple[int, ...]
    blocks: tuple[int, ...]  # m_ij, blocks computed by each; they sum to the model's
    service_s: float  # T, mean time that a request spends in it
    slots: int  # c, most requests at once

    @property
    def service_rate(self) -> float:
        """Per slot and second: mu = 1 / T."""
        return 1 / self.service_s


def total_rate(chains: Sequence[Chain]) -> float:
    """Requests per second with all slots busy: nu = sum of c mu."""
    return sum(chain.slots * chain.service_rate for chain in chains)
