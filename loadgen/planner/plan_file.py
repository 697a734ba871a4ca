"""The TOML file of ``evenstep plan``: servers, model, lengths, engine settings and times."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from loadgen.planner.gpus import Gpu, gpu
from loadgen.planner.model_files import MAX_BLOCKS, ModelNumbers, read_model
from router.config.given_files import read_toml
from router.config.worker_notation import complaint, unknown
from router.core.errors import ConfigError

GB = 10**9
MAX_SERVERS = 10_000

# Above any real value; bytes still fit in 64 bits.
_Positive = Annotated[float, Field(gt=0, le=1e15, allow_inf_nan=False)]
_Gigabytes = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
_Tokens = Annotated[float, Field(ge=1, le=1e9, allow_inf_nan=False)]
_NotNegative = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
_Share = Annotated[float, Field(gt=0, le=1)]
_HOST = re.compile(r"[\w.:-]+$", re.ASCII)


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ServerTable(_Table):
    """One GPU, or several equal ones."""

    # With ``count`` above 1, prefix of their names.
    name: str = Field(min_length=1, pattern=r"^[\w.-]+$")
    count: int = Field(default=1, ge=1, le=MAX_SERVERS)
    gpu: str | None = None  # a preset; the next three fields override its figures
    # memory_gb, bandwidth_gb_s, tflops: 10^9 bytes, 10^9 bytes/s, dense 10^12 operations/s.
    memory_gb: _Gigabytes | None = None
    bandwidth_gb_s: _Positive | None = None
    tflops: _Positive | None = None
    rtt_s: _NotNegative = 0.0  # round trip of a token from the server before and back
    # Bandwidth to it; None: prompts' activations take no time.
    network_gbit_s: _Positive | None = None
    host: str = "127.0.0.1"  # its machine; the engines of chains listen there
    # Names for CUDA_VISIBLE_DEVICES, one per GPU; empty: numbered on the host.
    devices: tuple[int | str, ...] = ()

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if not _HOST.match(self.host):
            raise ValueError(f"host {self.host!r} should be a name or an address")
        if self.devices and len(self.devices) != self.count:
            raise ValueError(f"has {len(self.devices)} devices for count = {self.count}")
        if self.gpu is None:
            for figure in ("memory_gb", "bandwidth_gb_s", "tflops"):
                if getattr(self, figure) is None:
                    raise ValueError(f"has no {figure} and no gpu that would say it")
        return self


class ModelTable(_Table):
    """The model: its config.json, or its numbers as in ``ModelNumbers``."""

    name: str = Field(min_length=1)  # model argument of ``vllm serve``
    # Hugging Face config.json or a folder with one, relative to the TOML file.
    config: str | None = None
    # Bits per weight with scales, in place of the value in config.json.
    weight_bits: _Positive | None = None
    blocks: int | None = Field(default=None, ge=1, le=MAX_BLOCKS)
    block_gb: _Gigabytes | None = None
    kv_bytes_per_token: Annotated[float, Field(gt=0, le=1e9)] | None = None
    flops_per_token: Annotated[float, Field(ge=1, le=1e18)] | None = None
    read_gb: _Gigabytes | None = None
    hidden_bytes: int = Field(default=0, ge=0, le=10**9)
    first_gb: _NotNegative = 0.0
    last_gb: _NotNegative = 0.0
    max_tokens: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        needed = ("blocks", "block_gb", "kv_bytes_per_token", "flops_per_token")
        given = [name for name in needed if getattr(self, name) is not None]
        if self.config is not None and given:
            raise ValueError(f"has config and {given[0]}: give one of them")
        if self.config is None and len(given) < len(needed):
            missing = ", ".join(name for name in needed if name not in given)
            raise ValueError(f"has no config, and no {missing}")
        return self


class WorkloadTable(_Table):
    """Lengths of requests."""

    trace: str | None = None  # file or bundled name; its means replace the next two fields
    input_tokens: _Tokens | None = None
    output_tokens: _Tokens | None = None
    # Tokens that a slot has memory for; None: the mean of input + output.
    slot_tokens: _Tokens | None = None


class EngineTable(_Table):
    """Settings of the engines."""

    gpu_memory_utilization: _Share = 0.92  # share of a GPU's memory that vLLM may use
    reserve_gb: _NotNegative = 2.0  # part of it for activations, CUDA graphs and context
    # Of 16 or 8 bits.
    kv_cache_dtype: str = Field(default="auto", pattern=r"^(auto|float16|bfloat16|(fp8|int8)\w*)$")
    block_size: int = Field(default=16, ge=1, le=1024)
    # Of the first chain on a host; later ones count up.
    port: int = Field(default=8001, ge=1, le=60_000)
    # Rendezvous port of the first chain's hosts; later ones count up.
    master_port: int = Field(default=29501, ge=1, le=60_000)
    load: _Share = 0.7  # rho, highest planned utilization of the chains


class TimesTable(_Table):
    """Parameters of the times, in addition to the GPUs' figures."""

    # compute_efficiency, bandwidth_efficiency: achieved share of the printed peaks.
    compute_efficiency: _Share = 0.5
    bandwidth_efficiency: _Share = 0.7
    # Overhead of a request in each block, over its whole life.
    block_overhead_s: _NotNegative = 1e-3
    # Overhead of a token at each server, in addition to the round trip.
    hop_overhead_s: _NotNegative = 5e-4


class PlanConfig(_Table):
    """The whole file."""

    model: ModelTable
    servers: tuple[ServerTable, ...] = Field(min_length=1)
    workload: WorkloadTable = WorkloadTable()
    engine: EngineTable = EngineTable()
    times: TimesTable = TimesTable()

    @model_validator(mode="after")
    def _few_enough(self) -> Self:
        if (count := sum(table.count for table in self.servers)) > MAX_SERVERS:
            raise ValueError(f"{count} servers are more than {MAX_SERVERS}")
        return self


@dataclass(frozen=True, slots=True)
class Machine:
    """One GPU of the file, a MIG slice if ``sliced``; ``kind`` is the name of its table."""

    name: str
    kind: str
    host: str
    device: int | str
    memory_gb: float
    bandwidth_gb_s: float
    tflops: float
    rtt_s: float = 0.0
    network_gbit_s: float | None = None
    sliced: bool = False


def load_config(path: Path) -> PlanConfig:
    """Read the file; ConfigError names the place of an invalid entry, and the remedy."""
    try:
        return PlanConfig(**read_toml(path))
    except ValidationError as invalid:
        raise ConfigError(f"{path}: {_explain(invalid.errors()[0])}") from None


def machines(config: PlanConfig) -> tuple[Machine, ...]:
    """Every single GPU, numbered where a table stands for several.

    ConfigError: an unknown preset, or two GPUs with one name or one device.
    """
    found: dict[str, Machine] = {}
    taken: dict[tuple[str, str], str] = {}
    on_host: dict[str, int] = {}
    for table in config.servers:
        for index in range(table.count):
            name = table.name if table.count == 1 else f"{table.name}-{index}"
            if name in found:
                raise ConfigError(f"two servers are called {name!r}: give each table its own name")
            counted = on_host.get(table.host, 0)
            on_host[table.host] = counted + 1
            device = table.devices[index] if table.devices else counted
            other = taken.setdefault((table.host, str(device)), name)
            if other != name:
                raise ConfigError(
                    f"[servers]: {other} and {name} are both device {device} of {table.host}: "
                    "give each its own in devices"
                )
            preset = gpu(table.gpu) if table.gpu is not None else Gpu(0, 0, 0, "")
            found[name] = Machine(
                name=name,
                kind=table.name,
                host=table.host,
                device=device,
                memory_gb=table.memory_gb or preset.memory_gb,
                bandwidth_gb_s=table.bandwidth_gb_s or preset.bandwidth_gb_s,
                tflops=table.tflops or preset.tflops,
                rtt_s=table.rtt_s,
                network_gbit_s=table.network_gbit_s,
                sliced=preset.sliced,
            )
    return tuple(found.values())


def model_numbers(config: PlanConfig, folder: Path) -> ModelNumbers:
    """The file's own, or of the config.json that it names; InputError where that is unusable."""
    table = config.model
    if table.config is not None:
        return read_model(folder / table.config, table.weight_bits, config.engine.kv_cache_dtype)
    assert table.blocks is not None
    assert table.block_gb is not None
    assert table.kv_bytes_per_token is not None
    assert table.flops_per_token is not None
    return ModelNumbers(
        blocks=table.blocks,
        block_bytes=round(table.block_gb * GB),
        read_bytes=round((table.read_gb or table.block_gb) * GB),
        flops_per_token=table.flops_per_token,
        kv_bytes_per_token=table.kv_bytes_per_token,
        hidden_bytes=table.hidden_bytes,
        first_bytes=round(table.first_gb * GB),
        last_bytes=round(table.last_gb * GB),
        max_tokens=table.max_tokens,
    )


_TABLES: dict[str, type[_Table]] = {
    "model": ModelTable,
    "servers": ServerTable,
    "workload": WorkloadTable,
    "engine": EngineTable,
    "times": TimesTable,
}


def _explain(error: ErrorDetails) -> str:
    first, *rest = [str(part) for part in error["loc"]] or ["the file"]
    # Number a list's tables from 1, for people.
    place = f"[{first}]" if first in _TABLES else first
    if rest and rest[0].isdigit():
        place, rest = f"{place} {int(rest[0]) + 1}", rest[1:]
    if error["type"] == "extra_forbidden":
        known: Any = _TABLES[first].model_fields if rest else PlanConfig.model_fields
        return f"{place}: {unknown('key', (rest or [first])[0], known)}"
    if error["type"] == "missing":
        return f"{place}: {rest[0]} is missing" if rest else f"{place} is missing"
    if error["type"] in ("model_type", "tuple_type") and not rest:
        header = "[[servers]] before each server" if first == "servers" else f"[{first}]"
        return f"{place} should be a table: write {header}"
    if error["type"] == "value_error":
        return f"{place} {complaint(error)}"
    return f"{place}: {'.'.join(rest) or first} = {error['input']!r} {complaint(error)}"
