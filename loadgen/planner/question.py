"""The planner's question, with times of a request from GPUs' figures: footnote 11 of the paper.

"Serving Chain-structured Jobs with Large Memory Footprints": compute bounds prompts, reading a
block's weights bounds decode steps, and both are proportional to the blocks. In addition to the
paper, a decode step reads the request's own KV. vLLM passes every token through every stage, so a
request makes as many round trips to a server as it has output tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loadgen.planner.model_files import ModelNumbers
from loadgen.planner.plan_file import GB, EngineTable, Machine, TimesTable
from router.core.placement.model import Chain, Model, Server

# Most (request, block) pairs of one server: 2,500 requests in 80 blocks, more than any runs.
_MOST_BLOCK_SLOTS = 200_000


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of requests; a slot has memory for ``slot_tokens``."""

    input_tokens: float
    output_tokens: float
    slot_tokens: float
    source: str

    @property
    def context_tokens(self) -> float:
        """Mean context over a request's decode steps."""
        return self.input_tokens + self.output_tokens / 2

    def scaled(self, share: float) -> Lengths:
        return Lengths(
            self.input_tokens * share,
            max(1.0, self.output_tokens * share),
            self.slot_tokens * share,
            self.source,
        )


@dataclass(frozen=True, slots=True)
class Question:
    """Input of the planner; ``rate`` is lambda, requests per second."""

    model: ModelNumbers
    lengths: Lengths
    engine: EngineTable
    times: TimesTable
    machines: Sequence[Machine]
    rate: float

    @property
    def slot_kv_blocks(self) -> int:
        """Blocks of vLLM's KV cache that a slot takes."""
        return math.ceil(self.lengths.slot_tokens / self.engine.block_size)

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of such a KV block in one block of the model."""
        return math.ceil(self.engine.block_size * self.model.kv_bytes_per_token)

    def placed_model(self, memory_bytes: int) -> Model:
        """The model to place; the largest server's memory bounds a slot's size from below."""
        numbers = self.model
        slot_bytes = self.slot_kv_blocks * self.kv_block_bytes
        least = -(-memory_bytes // _MOST_BLOCK_SLOTS)
        return Model(numbers.blocks, numbers.block_bytes, max(slot_bytes, least))

    def usable_bytes(self, machine: Machine) -> int:
        engine = self.engine
        share = machine.memory_gb * engine.gpu_memory_utilization - engine.reserve_gb
        return max(0, int(share * GB))

    def server(self, machine: Machine, memory_bytes: int) -> Server:
        decode_s = (self.lengths.output_tokens - 1) * self.token_s(machine, 1)
        block_s = self.times.block_overhead_s + self.prompt_s(machine) + decode_s
        hop_s = self.lengths.output_tokens * (machine.rtt_s + self.times.hop_overhead_s)
        if machine.network_gbit_s is not None:
            bits = 8 * self.lengths.input_tokens * self.model.hidden_bytes
            hop_s += bits / (machine.network_gbit_s * GB)
        return Server(machine.name, memory_bytes, hop_s, block_s)

    def prompt_s(self, machine: Machine) -> float:
        """Time to compute a prompt in one block, without the overhead."""
        work = self.lengths.input_tokens * self.model.flops_per_token
        return work / (machine.tflops * 1e12 * self.times.compute_efficiency)

    def token_s(self, machine: Machine, requests: float) -> float:
        """Time of a decode step in one block, which reads weights and the requests' KV."""
        kv = requests * self.lengths.context_tokens * self.model.kv_bytes_per_token
        bandwidth = machine.bandwidth_gb_s * GB * self.times.bandwidth_efficiency
        return (self.model.read_bytes + kv) / bandwidth

    def step_ratio(self, chain: Chain) -> float:
        """Time of a decode step with full slots over that with a single request."""

        def step_s(requests: float) -> float:
            return sum(blocks * self.token_s(machine, requests) for machine, blocks in stages)

        stages = list(self._stages(chain))
        return step_s(chain.slots) / step_s(1)

    def prompt_rate(self, chain: Chain) -> float:
        """Requests per second whose prompts alone saturate the slowest stage."""
        return 1 / max(blocks * self.prompt_s(machine) for machine, blocks in self._stages(chain))

    def sustained_rate(self, chains: Iterable[Chain]) -> float:
        """Requests per second of all chains, each limited by its slots or its prompts."""
        return sum(
            min(chain.slots * chain.service_rate, self.prompt_rate(chain)) for chain in chains
        )

    def _stages(self, chain: Chain) -> Iterable[tuple[Machine, int]]:
        """Machines of a chain, with their numbers of blocks."""
        machines = (self.machines[server] for server in chain.servers)
        return zip(machines, chain.blocks, strict=True)
