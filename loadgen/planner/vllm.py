"""Chains as ``vllm serve`` commands.

A pipeline-parallel instance of vLLM is a chain that shares no GPU with another one.
``VLLM_PP_LAYER_PARTITION`` lists the layers of each stage. All stages have the same number of
blocks in their KV cache, limited by the stage with the least memory, so a chain has as many slots
as its tightest server. ``--kv-cache-memory-bytes`` is one value for all stages; those with fewer
layers use less of it.
"""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from loadgen.planner.plan_file import Machine
from loadgen.planner.planned import Plan
from router.core.placement.model import Chain


@dataclass(frozen=True, slots=True)
class Launch:
    """One command on one host, the ``node``-th of a chain's ``nodes``."""

    host: str
    environment: Mapping[str, str]
    arguments: tuple[str, ...]
    node: int = 0
    nodes: int = 1


@dataclass(frozen=True, slots=True)
class Engine:
    """A running chain, ``name`` in the router, at ``port`` of its first server's host."""

    name: str
    chain: Chain
    stages: tuple[Machine, ...]
    port: int
    kv_cache_bytes: int  # most of a stage
    max_model_len: int  # most tokens of one request
    launches: tuple[Launch, ...]  # commands; the head's is last, since it needs the others

    @property
    def url(self) -> str:
        host = self.stages[0].host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


def engines(plan: Plan, model_name: str) -> tuple[Engine, ...]:
    """The disjoint chains as engines, fastest first."""
    question, settings = plan.question, plan.question.engine
    taken: dict[str, int] = {}
    found = []
    for index, chain in enumerate(plan.disjoint.chains):
        stages = tuple(question.machines[server] for server in chain.servers)
        head = stages[0].host
        port = taken[head] = taken.get(head, settings.port - 1) + 1
        # vLLM keeps one block of the cache for itself.
        kv_blocks = chain.slots * question.slot_kv_blocks
        kv_cache_bytes = (kv_blocks + 1) * question.kv_block_bytes * max(chain.blocks)
        held_tokens = kv_blocks * settings.block_size
        max_model_len = min(held_tokens, question.model.max_tokens or held_tokens)
        flags = [
            *(model_name, "--port", str(port)),
            *("--pipeline-parallel-size", str(len(chain.servers))),
            *("--max-num-seqs", str(chain.slots)),
            *("--max-model-len", str(max_model_len)),
            *("--block-size", str(settings.block_size)),
            *("--kv-cache-memory-bytes", str(kv_cache_bytes)),
            *("--gpu-memory-utilization", f"{settings.gpu_memory_utilization:g}"),
        ]
        if settings.kv_cache_dtype != "auto":
            flags += ["--kv-cache-dtype", settings.kv_cache_dtype]
        launches = tuple(_launches(chain, stages, flags, settings.master_port + index))
        name = f"chain-{index + 1}"
        found.append(Engine(name, chain, stages, port, kv_cache_bytes, max_model_len, launches))
    return tuple(found)


def _launches(
    chain: Chain, stages: Sequence[Machine], flags: Sequence[str], master_port: int
) -> Iterator[Launch]:
    # vLLM requires the same number of stages on each node, in the stages' order.
    nodes = [list(run) for _, run in groupby(stages, key=lambda machine: machine.host)]
    if len({len(node) for node in nodes}) > 1:
        nodes = [[machine] for machine in stages]
    for number in reversed(range(len(nodes))):
        node = nodes[number]
        visible = ",".join(str(machine.device) for machine in node)
        environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": visible}
        if len(stages) > 1:
            environment["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, chain.blocks))
        together: list[str] = []
        if len(nodes) > 1:
            together = ["--distributed-executor-backend", "mp", "--nnodes", str(len(nodes))]
            together += ["--node-rank", str(number), "--master-addr", stages[0].host]
            together += ["--master-port", str(master_port)]
            together += ["--headless"] if number else []
        yield Launch(node[0].host, environment, ("serve", *flags, *together), number, len(nodes))


def router_config(engines: Sequence[Engine]) -> str:
    """The chains as workers, a TOML file for ``evenstep serve --config``."""
    lines = ['policy = "jffc"   # the fastest chain with a free slot; the others wait in one queue']
    for engine in engines:
        held = ", ".join(machine.name for machine in engine.stages)
        lines += [
            "",
            "[[workers]]",
            f"id = {json.dumps(engine.name)}   # {held}",
            f"url = {json.dumps(engine.url)}",
            f"slots = {engine.chain.slots}",
            f"service_rate = {engine.chain.service_rate:.6g}   # per slot and second, as planned",
        ]
    return "\n".join(lines) + "\n"


def script(engine: Engine, launch: Launch) -> str:
    """A shell script for one command; it passes its own arguments on to vLLM."""
    lines = ["#!/bin/sh", *(f"# {line}" for line in _comments(engine, launch))]
    lines += [f"export {name}={shlex.quote(v)}" for name, v in launch.environment.items()]
    serve, model, *flags = launch.arguments
    lines.append(f"exec vllm {serve} {shlex.quote(model)} \\")
    options: list[str] = []
    for part in map(shlex.quote, flags):
        if part.startswith("--"):
            options.append(part)
        else:
            options[-1] += f" {part}"
    lines += [f"    {option} \\" for option in options]
    return "\n".join([*lines, '    "$@"']) + "\n"


def _comments(engine: Engine, launch: Launch) -> Iterator[str]:
    held = ", ".join(
        f"{machine.name} {blocks} layers"
        for machine, blocks in zip(engine.stages, engine.chain.blocks, strict=True)
    )
    yield f"{engine.name}, {engine.chain.slots} slots: {held}."
    yield f"To be run on {launch.host}; its GPUs are {launch.environment['CUDA_VISIBLE_DEVICES']}."
    if launch.nodes > 1:
        yield (
            f"Node {launch.node} of {launch.nodes}: all must run, with the same vLLM and the model "
            "at the same place; they talk over the network unprotected."
        )
    if len(engine.stages) > 1 and any(machine.sliced for machine in engine.stages):
        yield (
            "MIG slices have no peer-to-peer and no CUDA IPC between them: NCCL, by which vLLM's "
            "stages talk, may refuse slices of one GPU. Try it before you rely on it."
        )
