"""A plan in words for the terminal."""

import math
from collections.abc import Iterator
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from loadgen.planner.gpus import GPUS
from loadgen.planner.plan_file import GB
from loadgen.planner.plan_report import Answer, cautions
from loadgen.planner.planned import Option
from loadgen.report.numbers import number, plain_table

# Most lines of one table.
_MOST_ROWS = 24
_BAR = 32


def answer_table(answer: Answer) -> RenderableType:
    """Everything, the most important first."""
    parts: list[RenderableType] = [Text(line) for line in _verdict(answer)]
    parts += [Text(""), _chains(answer), Text(""), _servers(answer), Text("")]
    parts += [Text(line) for line in _notes(answer)]
    return Group(*parts)


def gpu_table() -> RenderableType:
    """The presets and their sources."""
    table = plain_table("gpu", "memory GB", "GB/s", "TFLOPS", "source")
    for name, gpu in GPUS.items():
        figures = (gpu.memory_gb, gpu.bandwidth_gb_s, gpu.tflops)
        table.add_row(name, *(f"{figure:g}" for figure in figures), gpu.source)
    return table


def _verdict(answer: Answer) -> Iterator[str]:
    plan = answer.plan
    rate, option = plan.question.rate, plan.disjoint
    most = option.unstable_above
    if plan.stable:
        load = f"{rate / most:.0%}" if rate / most >= 0.01 else "below 1%"
        enough = rate < plan.question.sustained_rate(option.chains)
        yield (
            f"{_requests(rate)}: {'stable' if enough else 'stable by memory alone'}, the load is "
            f"{load}; unstable from {_requests(most)} on"
        )
        footing = "" if enough else ", as if prompts did not delay each other"
        mean = _between(option)
        if plan.exact_s is not None:
            mean = f"{_s(plan.exact_s)}, waiting included (by bounds {mean})"
        yield f"mean response time{footing}: {mean}"
    else:
        yield (
            f"{_requests(rate)}: unstable, requests pile up: these servers' memory sustains less "
            f"than {_requests(most)}, short by {_requests(rate - most)}"
        )
    yield from (f"beware: {line}" for line in cautions(answer))
    if answer.remedies:
        yield "enough would be:"
    yield from (f"  - {remedy}" for remedy in answer.remedies)


def _chains(answer: Answer) -> Table:
    table = plain_table("chain", "servers: blocks", "slots", "service time", "requests/s")
    for engine in answer.engines[:_MOST_ROWS]:
        # Neighbours that are equal share an entry.
        stages = zip(engine.stages, engine.chain.blocks, strict=True)
        shown = []
        for (_, blocks), run in groupby(stages, key=lambda stage: (stage[0].kind, stage[1])):
            names = [machine.name for machine, _ in run]
            several = f"…{names[-1]}: {blocks} each"
            shown.append(names[0] + (several if len(names) > 1 else f": {blocks}"))
        table.add_row(
            engine.name,
            ", ".join(shown),
            str(engine.chain.slots),
            _s(engine.chain.service_s),
            number(engine.chain.slots * engine.chain.service_rate),
        )
    _cut(table, len(answer.engines))
    return table


def _servers(answer: Answer) -> Table:
    blocks = answer.plan.question.model.blocks
    table = plain_table("server", f"blocks of {blocks}", "", "weights + KV of GB")
    for memory in answer.memory[:_MOST_ROWS]:
        held = memory.blocks
        start = held.start * _BAR // blocks
        stop = max(start + 1, held.stop * _BAR // blocks)
        table.add_row(
            memory.machine.name,
            f"{held.start}-{held.stop - 1}",
            "·" * start + "█" * (stop - start) + "·" * (_BAR - stop),
            f"{memory.weights_bytes / GB:.1f} + {memory.kv_bytes / GB:.1f} of "
            f"{memory.usable_bytes / GB:.1f}",
        )
    _cut(table, len(answer.memory))
    return table


def _notes(answer: Answer) -> Iterator[str]:
    plan = answer.plan
    if answer.unused:
        names = [machine.name for machine in answer.unused]
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        yield f"not needed, or left over: {shown}"
    over = plan.overlapping
    chains = f"{len(over.chains)} chain" + ("" if len(over.chains) == 1 else "s")
    yield (
        f"these chains share no server, as engines of vLLM cannot (c = "
        f"{plan.disjoint.reserved_slots}); if servers could be in several, "
        f"{chains} would give {_between(over)}, unstable from "
        f"{_requests(over.unstable_above)} on (c = {over.reserved_slots})"
    )
    lengths, times, model = plan.question.lengths, plan.question.times, plan.question.model
    yield (
        f"lengths: {lengths.input_tokens:,.1f} + {lengths.output_tokens:,.1f} tokens in the mean "
        f"({lengths.source}); a slot has memory for {lengths.slot_tokens:,.1f}, in each block "
        f"{number(plan.disjoint.placement.model.slot_bytes / 1e6)} MB; a block has "
        f"{model.block_bytes / GB:.3g} GB"
    )
    yield (
        f"times: a request's prompt at {times.compute_efficiency:.0%} of the printed TFLOPS, a "
        f"token at {times.bandwidth_efficiency:.0%} of the bandwidth, every token through every "
        "server of its chain and back; the same however many share the chain"
    )
    if model.end_bytes(True, True):
        yield (
            f"embeddings ({model.first_bytes / GB:.2g} GB) are taken off servers that hold the "
            f"first block, the output layer ({model.last_bytes / GB:.2g} GB) off those that hold "
            "the last one"
        )


def _cut(table: Table, count: int) -> None:
    if count > _MOST_ROWS:
        table.caption = f"and {count - _MOST_ROWS} more (--json shows all)"
        table.caption_justify = "left"


def _between(option: Option) -> str:
    bounds = option.bounds
    if not math.isfinite(bounds.upper_s):
        return "no bounded response time"
    return f"{_s(bounds.lower_s)} to {_s(bounds.upper_s)}"


def _requests(rate: float) -> str:
    return f"{number(rate)} requests/s"


def _s(seconds: float) -> str:
    return f"{number(seconds)} s"
