"""A plan as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loadgen.planner.cautions import cautions, step_ratio
from loadgen.planner.plan_file import Machine
from loadgen.planner.planned import Option, Plan, prompt_rate, sustained_rate
from loadgen.planner.vllm import Engine
from router.commands.json_output import finite


@dataclass(frozen=True, slots=True)
class Answer:
    """A plan with everything derived from it; no ``remedies`` if it is feasible."""

    plan: Plan
    model_name: str
    engines: tuple[Engine, ...]
    remedies: Sequence[str]

    @property
    def unused(self) -> list[Machine]:
        used = {server for chain in self.plan.disjoint.chains for server in chain.servers}
        machines = self.plan.question.machines
        return [machine for index, machine in enumerate(machines) if index not in used]

    @property
    def cautions(self) -> list[str]:
        return list(cautions(self.plan, self.engines))

    @property
    def memory(self) -> list[Memory]:
        footing = self.plan.question.footing
        found = []
        for engine in self.engines:
            first, slots, last = 0, engine.chain.slots, len(engine.stages) - 1
            for stage, (machine, blocks) in enumerate(
                zip(engine.stages, engine.chain.blocks, strict=True)
            ):
                ends = footing.model.end_bytes(stage == 0, stage == last)
                memory = Memory(
                    engine=engine,
                    machine=machine,
                    blocks=range(first, first + blocks),
                    weights_bytes=blocks * footing.model.block_bytes + ends,
                    kv_bytes=blocks * slots * footing.slot_kv_blocks * footing.kv_block_bytes,
                    usable_bytes=footing.usable_bytes(machine),
                )
                found.append(memory)
                first += blocks
        return found


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a server under vLLM."""

    engine: Engine
    machine: Machine
    blocks: range
    weights_bytes: int  # of its blocks, and of embeddings and output layer if it stores them
    kv_bytes: int  # of the chain's slots
    usable_bytes: int  # for both together


def report(answer: Answer) -> dict[str, Any]:
    """JSON-able form; null for infinite values. The top level describes the engines' chains."""
    plan = answer.plan
    question = plan.question
    lengths, model = question.footing.lengths, question.footing.model
    return {
        "rate": question.rate,
        **_option(plan.disjoint, question.rate),
        "exact_s": plan.exact_s if plan.stable else None,
        "sustained_rate": sustained_rate(question, plan.disjoint),
        "chains": [_engine(answer, engine) for engine in answer.engines],
        "overlapping": _option(plan.overlapping, question.rate)
        | {"chains": [*map(plan.overlapping.placement.named, plan.overlapping.chains)]},
        "memory": [
            {
                "server": each.machine.name,
                "worker": each.engine.name,
                "first_block": each.blocks.start,
                "blocks": len(each.blocks),
                "weights_bytes": each.weights_bytes,
                "kv_bytes": each.kv_bytes,
                "usable_bytes": each.usable_bytes,
            }
            for each in answer.memory
        ],
        "unused_servers": [machine.name for machine in answer.unused],
        "cautions": answer.cautions,
        "remedies": list(answer.remedies),
        "parameters": {
            "model": answer.model_name,
            "blocks": model.blocks,
            "block_bytes": model.block_bytes,
            "slot_bytes": plan.disjoint.placement.model.slot_bytes,
            "input_tokens": lengths.input_tokens,
            "output_tokens": lengths.output_tokens,
            "slot_tokens": lengths.slot_tokens,
            "load": question.footing.engine.load,
        },
    }


def _option(option: Option, rate: float) -> dict[str, Any]:
    return {
        "reserved_slots": option.reserved_slots,
        "service_s": option.service_s,
        "lower_s": finite(option.bounds.lower_s),
        "upper_s": finite(option.bounds.upper_s),
        "stable": rate < option.unstable_above,
        "unstable_above": option.unstable_above,
    }


def _engine(answer: Answer, engine: Engine) -> dict[str, Any]:
    question = answer.plan.question
    return {
        "worker": engine.name,
        "url": engine.url,
        **answer.plan.disjoint.placement.named(engine.chain),
        "kv_cache_memory_bytes": engine.kv_cache_bytes,
        "max_model_len": engine.max_model_len,
        "prompt_rate": prompt_rate(question, engine.chain),
        "full_step_ratio": step_ratio(question, engine.chain),
        "commands": [
            {"host": each.host, "environment": dict(each.environment), "arguments": each.arguments}
            for each in engine.launches
        ],
    }
