"""Engines with weights made up on the spot, for the measurements of this folder.

Only the shape of a model matters for the time of its steps: vLLM gets a config.json and no weights
(``--load-format dummy``), no tokenizer, and prompts as token ids.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from engine_patches.plugin.settings import PORTS_PER_RANK, Settings
from tests.support.server import Server, free_port, starting, wait_ready

ROOT = Path(__file__).resolve().parents[2]
MODEL = "dummy"
# Tokens of a step, prompts' and answers' together.
CHUNK_TOKENS = 8192
READY_S = 400.0
_asked = itertools.count()
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "max_position_embeddings": 131072,
}
_QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": 512,
    },
    "qwen3-30b-a3b": {
        **_QWEN3_MOE,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    },
    "tiny-moe": {
        **_QWEN3_MOE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": 512,
    },
}
# Of one model each: on a GPU, and in a dry run.
DENSE = ("llama-3-8b", "tiny")
EXPERTS = ("qwen3-30b-a3b", "tiny-moe")
# On CPUs vLLM's kernels take an expert's number for its place, so each rank has a part of every
# expert: the barrier is the same. One front end is enough there.
_SPREAD = {False: ("--enable-expert-parallel",), True: ("--api-server-count", "1")}
# The CPU engine of `make engine`, where the scripts themselves are tested.
_CPU_FLAGS = ("--enforce-eager", "--block-size", "32", "--num-gpu-blocks-override", "4096")
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK")
_GPU_DEFAULTS = {
    **dict.fromkeys(_OFFLINE, "1"),
    # The sampler of FlashInfer is vLLM's default, and not everywhere installed.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


@dataclass(frozen=True, slots=True)
class Machine:
    """Where engines run.

    Attributes:
        python: interpreter that has vLLM.
        shape: of the model, a key of ``SHAPES``.
        cpu: the CPU engine; else a GPU.
        flags: further ones of ``vllm serve``.
        folder: for the model and the logs.
        commit: of what is measured.
        ranks: data-parallel ones of each engine, with a GPU each; the experts are
            divided among them.
        weights: name or folder of a real model in place of the shape; None: dummy ones.
    """

    python: Path
    shape: str
    cpu: bool
    flags: tuple[str, ...]
    folder: Path
    commit: str
    ranks: int = 1
    weights: str | None = None

    @property
    def scheduler(self) -> str:
        """The plug-in's flavour for it."""
        flavour = "EvenstepScheduler" if self.cpu else "EvenstepAsyncScheduler"
        return f"engine_patches.scheduler.{flavour}"

    @property
    def settings(self) -> dict[str, Any]:
        """What figures depend on."""
        return {
            "shape": self.shape if self.weights is None else None,
            "weights": self.weights or "dummy",
            "dry_run": self.cpu,
            "scheduler": self.scheduler.rpartition(".")[2],
            "engine_flags": list(self.flags),
        }

    def command(self, flags: tuple[str, ...]) -> list[str]:
        """``vllm serve`` with the model, or its shape."""
        model = (self.weights,) if self.weights else (self._shaped(), "--load-format", "dummy")
        serve: tuple[str, ...] = ("-m", "vllm.entrypoints.cli.main", "serve")
        if self.cpu:
            serve = (str(ROOT / "deploy" / "engine" / "serve.py"),)
        fixed = ["--skip-tokenizer-init", "--served-model-name", MODEL]
        fixed += ["--host", "127.0.0.1", "--no-enable-prefix-caching"]
        device = _CPU_FLAGS if self.cpu else ("--async-scheduling",)
        return [str(self.python), *serve, *model, *device, *fixed, *flags, *self.flags]

    def group_flags(self, rpc_port: int) -> tuple[str, ...]:
        """What makes its ranks one group, behind one front end; none for a rank alone."""
        if self.ranks == 1:
            return ()
        size = ("--data-parallel-size", str(self.ranks), *_SPREAD[self.cpu])
        place = ("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(rpc_port))
        return (*size, *place)

    def _shaped(self) -> str:
        model = self.folder / self.shape
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text(json.dumps({**LLAMA, **SHAPES[self.shape]}))
        return str(model)


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine; ``endpoint`` of its state stream is None without the plug-in."""

    server: Server
    endpoint: str | None
    ranks: int = 1

    @property
    def endpoints(self) -> list[str]:
        """Of the state stream of each of its ranks."""
        assert self.endpoint is not None
        return [Settings(self.endpoint).endpoint(rank) for rank in range(self.ranks)]

    def decode_together(
        self, batch: int, context: int, max_tokens: int, rank: int | None = None
    ) -> None:
        """So many requests, which arrive at once; none begins as an earlier one.

        Args:
            batch: how many.
            context: prompt tokens of each.
            max_tokens: of each answer.
            rank: where all of them go; None: the engine says.

        Raises:
            httpx.HTTPError: their answers did not come.
        """
        prompts = [prompt(context, next(_asked)) for _ in range(batch)]
        body = {"model": MODEL, "prompt": prompts, "max_tokens": max_tokens, "ignore_eos": True}
        url = f"{self.server.url}/v1/completions"
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        httpx.post(url, json=body, headers=headers, timeout=600).raise_for_status()


@contextlib.contextmanager
def engine(
    where: Machine, name: str, *flags: str, plug_in: bool = True, hidden_lengths: bool = False
) -> Iterator[Engine]:
    """Run an engine until the block ends.

    Args:
        where: it runs.
        name: of its log, which that of an earlier call gives way to.
        flags: further ones of ``vllm serve``.
        plug_in: with the plug-in, or without it.
        hidden_lengths: requests end where a replay says; vLLM's second model runner cannot do so.
    """
    environment = engine_environment(where)
    # Beside those of the state streams: for HTTP, and for the ranks among themselves.
    port, endpoint = free_port(2 + PORTS_PER_RANK * where.ranks), None
    flags = (*flags, *where.group_flags(port + 1 + PORTS_PER_RANK * where.ranks))
    if plug_in:
        endpoint = f"tcp://127.0.0.1:{port + 1}"
        config = json.dumps({"evenstep": {"snapshots": endpoint}})
        flags = (*flags, "--scheduler-cls", where.scheduler, "--additional-config", config)
    if hidden_lengths:
        flags = (*flags, "--logits-processors", "engine_patches.hidden_length:HiddenLength")
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    log = where.folder / f"engine-{name}.log"
    command = [*where.command(flags), "--port", str(port)]
    with starting(command, port, log, environment) as server:
        wait_ready(server, READY_S)
        yield Engine(server, endpoint, where.ranks)


def engine_environment(where: Machine) -> dict[str, str]:
    """What is added to this process's own; on a GPU that wins where it says something already."""
    given = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(ROOT), *([given] if given else [])])
    if not where.cpu:
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(where.ranks)))}
        return {**_GPU_DEFAULTS, **gpus, **os.environ, "PYTHONPATH": path}
    from tests.support.engine import ENVIRONMENT
    from tests.support.moe_lockstep.ranks import collectives

    if where.ranks > 1:
        path = os.pathsep.join([path, str(collectives(where.folder))])
    return {**ENVIRONMENT, "PYTHONPATH": path}


def prompt(tokens: int, number: int) -> list[int]:
    """Token ids that begin with a number; a vocabulary of 512 has them."""
    digits = [100 + number // 101**place % 101 for place in range(4)]
    rest = [100 + position * position % 101 for position in range(len(digits), tokens)]
    return [*digits, *rest][:tokens]


# --- the machine ----------------------------------------------------------------------------------


def machine_facts(where: Machine, server: Server) -> dict[str, str]:
    """What a figure depends on and no setting says."""
    code = "from importlib.metadata import version; print(version('torch'))"
    device, driver = ("CPU", "none") if where.cpu else _gpu()
    return {
        "device": device,
        "driver": driver,
        "vllm": server.get("/version").json()["version"],
        "torch": _said([str(where.python), "-c", code]),
        "python": platform.python_version(),
    }


def gpus_there() -> int:
    """How many the driver shows, and engines may see."""
    shown = _said(["nvidia-smi", "-L"]).splitlines()
    there = sum(line.startswith("GPU ") for line in shown)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return min(there, len(visible.split(","))) if visible else there


def has_vllm(python: Path) -> bool:
    """Whether an interpreter has it, without loading it."""
    code = "from importlib.util import find_spec; print(find_spec('vllm') is not None)"
    return _said([str(python), "-c", code]) == "True"


def cpu_python() -> Path | None:
    """The CPU engine's; None where it has not been built."""
    from tests.support.engine import installation

    built = installation()
    return None if built is None else built.python


def _gpu() -> tuple[str, str]:
    """Name with memory, and driver, of the first that engines see."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip() or "0"
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    lines = _said([*query, "-i", first]).splitlines() or [""]
    name, _, driver = lines[0].rpartition(", ")
    return name or "unknown", driver or "unknown"


def _said(command: list[str]) -> str:
    """What a command prints; nothing where it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout.strip()
