"""Engines with weights made up on the spot, for the measurements of this folder.

Only the shape of a model matters for the time of its steps: vLLM gets a config.json and no weights
(``--load-format dummy``), no tokenizer, and prompts as token ids.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.support.server import Server, free_port, starting, wait_ready

ROOT = Path(__file__).resolve().parents[2]
MODEL = "dummy"
READY_S = 400.0
_LLAMA = {
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
SHAPES = {
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
}
# The CPU engine of `make engine`, where the scripts themselves are tested.
_CPU_FLAGS = ("--enforce-eager", "--block-size", "32", "--num-gpu-blocks-override", "4096")


@dataclass(frozen=True, slots=True)
class Machine:
    """Where engines run.

    Attributes:
        python: interpreter that has vLLM.
        shape: of the model, a key of ``SHAPES``.
        cpu: the CPU engine; else a GPU.
        flags: further ones of ``vllm serve``.
        folder: for the model and the logs.
    """

    python: Path
    shape: str
    cpu: bool
    flags: tuple[str, ...]
    folder: Path

    @property
    def scheduler(self) -> str:
        """The plug-in's flavour for it."""
        flavour = "EvenstepScheduler" if self.cpu else "EvenstepAsyncScheduler"
        return f"engine_patches.scheduler.{flavour}"

    @property
    def settings(self) -> dict[str, Any]:
        """What figures depend on."""
        return {
            "shape": self.shape,
            "weights": "dummy",
            "scheduler": self.scheduler.rpartition(".")[2],
            "engine_flags": list(self.flags),
        }

    def command(self, flags: tuple[str, ...]) -> list[str]:
        """``vllm serve`` with the model's shape."""
        model = self.folder / self.shape
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text(json.dumps({**_LLAMA, **SHAPES[self.shape]}))
        serve: tuple[str, ...] = ("-m", "vllm.entrypoints.cli.main", "serve")
        if self.cpu:
            serve = (str(ROOT / "deploy" / "engine" / "serve.py"),)
        fixed = ["--load-format", "dummy", "--skip-tokenizer-init", "--served-model-name", MODEL]
        fixed += ["--host", "127.0.0.1", "--no-enable-prefix-caching"]
        device = _CPU_FLAGS if self.cpu else ()
        return [str(self.python), *serve, str(model), *device, *fixed, *flags, *self.flags]


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine; ``endpoint`` of its state stream is None without the plug-in."""

    server: Server
    endpoint: str | None

    def decode_together(self, batch: int, context: int, max_tokens: int) -> None:
        """So many requests, which arrive at once.

        Raises:
            httpx.HTTPError: their answers did not come.
        """
        prompts = [prompt(context, first) for first in range(batch)]
        body = {"model": MODEL, "prompt": prompts, "max_tokens": max_tokens, "ignore_eos": True}
        url = f"{self.server.url}/v1/completions"
        httpx.post(url, json=body, timeout=600).raise_for_status()


@contextlib.contextmanager
def engine(
    where: Machine, *flags: str, plug_in: bool = True, hidden_lengths: bool = False
) -> Iterator[Engine]:
    """Run an engine until the block ends.

    Args:
        where: it runs.
        flags: further ones of ``vllm serve``.
        plug_in: with the plug-in, or without it.
        hidden_lengths: requests end where a replay says; vLLM's second model runner cannot do so.
    """
    environment = _environment(where)
    # The state stream takes two.
    port, endpoint = free_port(3), None
    if plug_in:
        endpoint = f"tcp://127.0.0.1:{port + 1}"
        config = json.dumps({"evenstep": {"snapshots": endpoint}})
        flags = (*flags, "--scheduler-cls", where.scheduler, "--additional-config", config)
    if hidden_lengths:
        flags = (*flags, "--logits-processors", "engine_patches.hidden_length:HiddenLength")
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    log = where.folder / f"engine-{port}.log"
    command = [*where.command(flags), "--port", str(port)]
    with starting(command, port, log, environment) as server:
        wait_ready(server, READY_S)
        yield Engine(server, endpoint)


def _environment(where: Machine) -> dict[str, str]:
    given = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(ROOT), *([given] if given else [])])
    if not where.cpu:
        return {"PYTHONPATH": path}
    from tests.support.engine import ENVIRONMENT

    return {**ENVIRONMENT, "PYTHONPATH": path}


def prompt(tokens: int, first: int) -> list[int]:
    """Token ids; a vocabulary of 512 has them."""
    return [100 + (first + position * position) % 101 for position in range(tokens)]


def machine_facts(where: Machine, server: Server) -> dict[str, str]:
    """What a figure depends on and no setting says."""
    return {
        "device": "CPU" if where.cpu else _gpu(),
        "vllm": server.get("/version").json()["version"],
        "python": platform.python_version(),
    }


def _gpu() -> str:
    if shutil.which("nvidia-smi") is None:
        return "a GPU; there is no nvidia-smi to name it"
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False, timeout=60)
    return answer.stdout.strip() or answer.stderr.strip()
