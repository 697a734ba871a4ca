"""A plan as JSON, with cautions where the planning model is too optimistic.

The model takes a request's time as independent of the number of requests on the chain. This holds
while a decode step mostly reads weights, and while prompts leave the GPUs time. The cautions check
both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from loadgen.planner.plan_file import Machine
from loadgen.planner.planned import Option, Plan
from loadgen.planner.vllm import Engine
from router.commands.json_output import finite

# Ratio of a decode step with full slots to one with a single request that is worth a caution.
_SLOWER = 1.25


def cautions(answer: Answer) -> Iterator[str]:
    """Sentences on where the plan promises too much."""
    plan, engines = answer.plan, answer.engines
    question = plan.question
    lengths, most = question.lengths, question.model.max_tokens
    mean = lengths.input_tokens + lengths.output_tokens
    if most is not None and mean > most:
        yield (
            f"requests of {mean:,.0f} tokens, as they are in the mean, are longer than the model's "
            f"{most:,}: engines refuse them"
        )
    bound = [
        engine
        for engine in engines
        if question.prompt_rate(engine.chain) < engine.chain.slots * engine.chain.service_rate
    ]
    if bound:
        rate = question.sustained_rate(plan.disjoint.chains)
        yield (
            f"prompts alone would keep a GPU of {_names(bound)} busy all the time before the slots "
            f"are full: expect less than {rate:.4g} requests/s in all, whatever memory allows"
        )
    ratios = {engine.name: question.step_ratio(engine.chain) for engine in engines}
    slower = [engine for engine in engines if ratios[engine.name] > _SLOWER]
    if slower:
        yield (
            f"with all slots busy a decode step of {_names(slower)} takes up to "
            f"{max(ratios.values()):.2g} times as long as planned, since the others' KV is read too"
        )


def _names(engines: Sequence[Engine]) -> str:
    shown = ", ".join(engine.name for engine in engines[:3])
    return shown if len(engines) <= 3 else f"{shown} and {len(engines) - 3} more"


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
    def memory(self) -> list[Memory]:
        question = self.plan.question
        found = []
        for engine in self.engines:
            first, slots, last = 0, engine.chain.slots, len(engine.stages) - 1
            for stage, (machine, blocks) in enumerate(
                zip(engine.stages, engine.chain.blocks, strict=True)
            ):
                ends = question.model.end_bytes(stage == 0, stage == last)
                memory = Memory(
                    engine=engine,
                    machine=machine,
                    blocks=range(first, first + blocks),
                    weights_bytes=blocks * question.model.block_bytes + ends,
                    kv_bytes=blocks * slots * question.slot_kv_blocks * question.kv_block_bytes,
                    usable_bytes=question.usable_bytes(machine),
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
    lengths, model = question.lengths, question.model
    return {
        "rate": question.rate,
        **_option(plan.disjoint, question.rate),
        "exact_s": plan.exact_s if plan.stable else None,
        "sustained_rate": question.sustained_rate(plan.disjoint.chains),
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
        "cautions": list(cautions(answer)),
        "remedies": list(answer.remedies),
        "parameters": {
            "model": answer.model_name,
            "blocks": model.blocks,
            "block_bytes": model.block_bytes,
            "slot_bytes": plan.disjoint.placement.model.slot_bytes,
            "input_tokens": lengths.input_tokens,
            "output_tokens": lengths.output_tokens,
            "slot_tokens": lengths.slot_tokens,
            "load": question.engine.load,
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
        "prompt_rate": question.prompt_rate(engine.chain),
        "full_step_ratio": question.step_ratio(engine.chain),
        "commands": [
            {"host": each.host, "environment": dict(each.environment), "arguments": each.arguments}
            for each in engine.launches
        ],
    }
