"""Settings of an emulated fleet."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from engine_patches.admission import clearing_of, make_admission
from engine_patches.admission.settings import AdmissionSettings
from loadgen.emulator.generation import Limits
from loadgen.engine.engine import Engine
from loadgen.engine.engine_features import EngineFeatures
from loadgen.engine.prefill_settings import MOST_KV_TOKENS, PrefillSettings
from loadgen.engine.queues import Eviction, PolicyOrder
from loadgen.engine.stepping import StepGroup, WorkerModel
from loadgen.model.power_model import PowerModel
from loadgen.model.ranges import check_ranges
from router.core.errors import ConfigError
from router.core.step_time import PAPER_STEP_TIME, StepTime

_HIGHEST_PORT = 65535
_RANGES = {
    "workers": (1, 4096),
    "slots": (1, 16_384),
    "kv_tokens": (1, MOST_KV_TOKENS),
    "max_model_len": (1, MOST_KV_TOKENS),
    "seed": (0, 2**64 - 1),
    "stream_interval": (1, 1_000_000_000),
}


@dataclass(frozen=True, slots=True)
class EmulatorSettings:
    """Settings of a fleet: one group of workers in one process."""

    workers: int = 4  # answering workers; prefill-only workers have the ranks after theirs
    host: str = "127.0.0.1"
    port: int = 0  # port of the first worker; the others follow. 0 picks free ones
    slots: int = 72
    kv_tokens: int = 400_000
    max_model_len: int | None = None  # longest prompt plus output; None: ``kv_tokens``
    step_time: StepTime = PAPER_STEP_TIME
    power: PowerModel = field(default_factory=PowerModel)
    time_scale: float = 1.0  # wall seconds per engine second
    barrier: bool = True
    lockstep: bool = False  # whether workers stall while one of them is dead, and tell so
    speeds: tuple[float, ...] = ()  # relative speed of each worker, or one for all; empty: 1
    model: str = "emulated"
    group: str = "default"
    seed: int = 0
    stream_interval: int = 1
    control_port: int | None = None  # fault port; None: the port after the last worker's
    snapshots: tuple[str, ...] = ()  # ZMQ endpoint of each worker's state stream; empty: none
    record: Path | None = None  # file with a row per step of the answering workers
    answers: Path | None = None  # file with a line per answered request
    # Cost of prompts and of KV transfers; None: prompts cost nothing, KV stays.
    prefill: PrefillSettings | None = None
    # Admission policy of every worker; None: the engine's own order.
    admission: AdmissionSettings | None = None
    time_waits: bool = False  # whether workers report how long they waited for the others in a step
    features: EngineFeatures = field(default_factory=EngineFeatures)
    # Port of the first worker's KV events; the others follow; None: none.
    kv_events_port: int | None = None

    def __post_init__(self) -> None:
        check_ranges(self, _RANGES)
        longest = self.features.longest_tokens(self.kv_tokens)
        if longest < 1:
            raise ConfigError(f"--kv-tokens in whole blocks must be at least 1, got {longest}")
        if self.kv_events_port is not None:
            self._check_kv_events(self.kv_events_port)
        if self.context_tokens > longest:
            raise ConfigError(
                f"--max-model-len cannot exceed {longest}: --kv-tokens in whole blocks of "
                f"{self.features.block_tokens} (--block-tokens), less the drafts of a step"
            )
        if not 0 < self.time_scale < math.inf:
            raise ConfigError(f"--time-scale must be above 0, got {self.time_scale:g}")
        if self.prefill is not None:
            drafts = len(self.features.acceptance)
            self.prefill.check(self.slots, self.context_tokens, drafts)
        if len(self.speeds) not in (0, 1, self.workers):
            raise ConfigError(
                f"--speed has {len(self.speeds)} numbers for {self.workers} workers: "
                "give one for all of them, or one for each"
            )
        if self.lockstep and not self.barrier:
            raise ConfigError("--lockstep: workers that step alone need no others")
        if any(not 0 < speed < math.inf for speed in self.speeds):
            raise ConfigError("--speed takes numbers above 0")
        self._check_ports()

    @property
    def ranks(self) -> int:
        return self.workers + (self.prefill.workers if self.prefill is not None else 0)

    @property
    def context_tokens(self) -> int:
        """Longest prompt plus output that is served."""
        if self.max_model_len is not None:
            return self.max_model_len
        return self.features.longest_tokens(self.kv_tokens)

    @property
    def limits(self) -> Limits:
        block_tokens = self.features.block_tokens if self.features.prefix_caching else 0
        return Limits(self.model, self.context_tokens, self.seed, block_tokens=block_tokens)

    @property
    def fault_port(self) -> int:
        if self.control_port is not None:
            return self.control_port
        return self.port + self.ranks if self.port else 0

    def role(self, rank: int) -> str:
        return "prefill" if self.prefills(rank) else "both"

    def prefills(self, rank: int) -> bool:
        return rank >= self.workers

    def speed(self, rank: int) -> float:
        """1 for prefill-only workers."""
        if self.prefills(rank):
            return 1.0
        return self.speeds[rank % len(self.speeds)] if self.speeds else 1.0

    def new_engine(self, rank: int) -> Engine:
        prefill = self.prefill
        queue = eviction = None
        if self.admission is not None:
            # Evicted requests keep their tokens, as clients have already seen them.
            rng = np.random.default_rng([self.seed, rank])
            eviction = Eviction(clearing=clearing_of(self.admission), rng=rng)
            queue = PolicyOrder(make_admission(self.admission))
        own = prefill.kv_tokens if prefill is not None and self.prefills(rank) else None
        return self.features.engine(
            self.slots,
            self.kv_tokens if own is None else own,
            seed=[self.seed, rank, 1],
            events=bool(self.snapshots) or self.kv_events_port is not None,
            chunk=None if prefill is None else prefill.chunk,
            lease_s=0.0 if prefill is None else prefill.kv_expiry_s,
            recompute=prefill is not None and prefill.recompute,
            queue=queue,
            eviction=eviction,
        )

    def step_group(self, workers: Sequence[WorkerModel]) -> StepGroup:
        """All answering workers, one of them, or one prefill worker."""
        prefill, every = self.prefill, self.features.prefill_every
        if prefill is None:
            return StepGroup(workers, self.step_time, self.power, every)
        if self.prefills(workers[0].rank):
            return StepGroup(workers, prefill.time.step_time, self.power)
        step_time = self.step_time
        if not step_time.per_prompt_token_s:
            step_time = replace(step_time, per_prompt_token_s=prefill.time.per_token_s)
        return StepGroup(workers, step_time, self.power, every)

    def described(self) -> dict[str, object]:
        """What the engines do, for descriptions of the fleet and headers of figures."""
        prefill = self.prefill
        return {
            **self.features.described(),
            "batch_tokens": None if prefill is None else prefill.chunk,
            "prompts_cost": prefill is not None,
        }

    @property
    def prompts_text(self) -> str:
        """Whether prompts cost time, for a reader."""
        if self.prefill is None:
            return "prompts cost no time"
        return f"prompts cost time, {self.prefill.chunk} tokens a step"

    def worker_port(self, rank: int) -> int:
        """0: any."""
        return self.port + rank if self.port else 0

    def _check_kv_events(self, port: int) -> None:
        if not self.features.prefix_caching:
            raise ConfigError("--kv-events-port: without prefix caching there are no KV events")
        if not 0 < port <= _HIGHEST_PORT + 1 - self.ranks:
            raise ConfigError(f"--kv-events-port {port} leaves no room for {self.ranks} workers")

    def _check_ports(self) -> None:
        ports = [self.worker_port(rank) for rank in range(self.ranks)]
        if not 0 <= self.port <= _HIGHEST_PORT - self.ranks:
            raise ConfigError(f"--port {self.port} leaves no room for {self.ranks} workers")
        if not 0 <= self.fault_port <= _HIGHEST_PORT:
            raise ConfigError(f"--control-port must be from 0 to 65535, got {self.fault_port}")
        if self.fault_port and self.fault_port in ports:
            raise ConfigError(f"--control-port {self.fault_port} is a worker's port")


def snapshot_endpoints(port: int, workers: int) -> tuple[str, ...]:
    """The endpoints of the state streams.

    Each worker has two ports, the second for full snapshots. They are local only: the streams have
    no keys, and a router refuses remote ones without keys.
    """
    if not 0 < port <= _HIGHEST_PORT - 2 * workers:
        raise ConfigError(
            f"--snapshot-port {port} leaves no room for {workers} workers of two ports each: give "
            "a lower one, or a lower --port, which it follows by default"
        )
    return tuple(f"tcp://127.0.0.1:{port + 2 * rank}" for rank in range(workers))
