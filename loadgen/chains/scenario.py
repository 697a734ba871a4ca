"""A scenario: servers of two speeds, a law of round trips, lengths and a model.

"Serving Chain-structured Jobs with Large Memory Footprints", section 4.1.1. The paper takes round
trips from the RIPE Atlas European network; here ``RoundTrips`` draws them from a synthetic law.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from loadgen.model.ranges import check_ranges
from router.core.placement.model import Model, Server

_GB = 10**9


@dataclass(frozen=True, slots=True)
class RoundTrips:
    """Synthetic times between the orchestrator and a server: lognormal, clipped at both ends."""

    # median_s, sigma: tens of ms, as between hosts of one continent.
    median_s: float = 0.02
    sigma: float = 0.5
    # least_s, most_s: limits to which values are clipped.
    least_s: float = 0.005
    most_s: float = 0.1
    overhead_s: float = 0.018  # added to each pass for serialization; 18 ms in PETALS

    def draw(self, rng: np.random.Generator, count: int) -> list[float]:
        drawn = self.median_s * np.exp(self.sigma * rng.standard_normal(count))
        passes: list[float] = (drawn.clip(self.least_s, self.most_s) + self.overhead_s).tolist()
        return passes


@dataclass(frozen=True, slots=True)
class Gpu:
    """A kind of GPU, or of slices of one; rates are those that prefill and decode reach."""

    memory_bytes: int
    flop_per_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Servers and a model; defaults are the paper's."""

    model: Model
    fast: Gpu
    slow: Gpu
    servers: int = 20  # J, number of servers
    fast_share: float = 0.2  # eta, share of fast servers; above 0 at least one server is fast
    # prompt_tokens, output_tokens: l_in and l_out, mean lengths.
    prompt_tokens: float = 2000.0
    output_tokens: float = 20.0
    rate: float = 0.2  # lambda, requests per second
    block_flop: float  # operations of a block per token
    block_overhead_s: float = 1e-3  # t_o, overhead of a block over a request's whole life
    round_trips: RoundTrips = field(default_factory=RoundTrips)

    def __post_init__(self) -> None:
        check_ranges(self, {"servers": (1, 10_000), "fast_share": (0, 1)})

    def block_s(self, gpu: Gpu, prompt_tokens: float, output_tokens: float) -> float:
        """tau^p: prefill by operations, decode by bytes read (section 4.1.1, footnote)."""
        prefill_s = self.block_flop / gpu.flop_per_s * prompt_tokens
        decode_s = self.model.block_bytes / gpu.bytes_per_s * (output_tokens - 1)
        return self.block_overhead_s + prefill_s + decode_s

    def drawn(self, seed: int) -> list[Server]:
        """Draw the servers: which are fast, and how far each is.

        A request passes a server once per output token, so tau^c is that many round trips.
        """
        rng = np.random.default_rng([seed, 3])
        passes_s = self.round_trips.draw(rng, self.servers)
        fast = {int(one) for one in rng.permutation(self.servers)[: self._fast_ones]}
        kinds = [self.fast if one in fast else self.slow for one in range(self.servers)]
        return [
            Server(
                name=f"{'fast' if gpu is self.fast else 'slow'}-{at:02}",
                memory_bytes=gpu.memory_bytes,
                hop_s=self.output_tokens * pass_s,
                block_s=self.block_s(gpu, self.prompt_tokens, self.output_tokens),
            )
            for at, (gpu, pass_s) in enumerate(zip(kinds, passes_s, strict=True))
        ]

    def request_s(self, prompt_tokens: float, output_tokens: float) -> float:
        """Time of a request on average servers: the measure of its work."""
        share = self._fast_ones / self.servers
        per_block_s = share * self.block_s(self.fast, prompt_tokens, output_tokens) + (
            1 - share
        ) * self.block_s(self.slow, prompt_tokens, output_tokens)
        pass_s = self.round_trips.median_s + self.round_trips.overhead_s
        # Average servers of a chain that keeps one slot for each block.
        one = self.model.block_bytes + self.model.slot_bytes
        held = fmean(
            [self.fast.memory_bytes // one] * self._fast_ones
            + [self.slow.memory_bytes // one] * (self.servers - self._fast_ones)
        )
        hops = max(1.0, self.model.blocks / max(held, 1.0))
        return self.model.blocks * per_block_s + hops * output_tokens * pass_s

    @property
    def _fast_ones(self) -> int:
        return min(self.servers, max(round(self.servers * self.fast_share), self.fast_share > 0))


_3G_40GB = Gpu(memory_bytes=40 * _GB, flop_per_s=120e12, bytes_per_s=1.02e12)
_2G_20GB = Gpu(memory_bytes=20 * _GB, flop_per_s=80e12, bytes_per_s=0.51e12)

BLOOM_176B = Scenario(
    model=Model(blocks=70, block_bytes=int(1.32 * _GB), slot_bytes=int(0.116 * _GB)),
    fast=_3G_40GB,
    slow=_2G_20GB,
    block_flop=5e9,
)
"""BLOOM-176B in NF4 on slices of A100s: the paper's simulations, section 4.1.1."""

LLAMA_2_7B = Scenario(
    model=Model(blocks=32, block_bytes=404_766_720, slot_bytes=2048 * 2 * 4096 * 2),
    fast=_3G_40GB,
    slow=_2G_20GB,
    servers=9,
    fast_share=1 / 3,
    prompt_tokens=2048.0,
    output_tokens=28.0,
    rate=2.5,
    block_flop=404_766_720,
)
"""Llama-2-7B in 16 bits, which one server can hold: the servers of section 4.2.1.

A block has 202,383,360 weights, of 2 bytes and with 2 operations a token each; a slot keeps 2,048
tokens.
"""

SCENARIOS: Mapping[str, Scenario] = {"bloom176b": BLOOM_176B, "llama2-7b": LLAMA_2_7B}
