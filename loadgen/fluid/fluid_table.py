"""Answer of ``evenstep fluid`` in words for the terminal."""

import math
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from engine_patches.admission.theory.fluid import Equilibrium, Flow, sustainable_share
from loadgen.fluid.fluid_answer import ROUNDING, Answer, Check, verdict
from loadgen.report.numbers import number, plain_table

# Number of types that are listed one by one.
_FEW = 20


def answer_table(answer: Answer) -> RenderableType:
    """Everything, the most important first."""
    parts: list[RenderableType] = []
    for number_, (flows, found) in enumerate(
        zip(answer.question.periods, answer.equilibria, strict=True), 1
    ):
        name = f"period {number_}: " if len(answer.equilibria) > 1 else ""
        parts += [Text(name + line) for line in _equilibrium(answer, flows, found)]
    waits = "no thresholds are valid at these rates"
    if answer.wait is not None:
        batch = answer.batch_tokens(answer.wait)
        waits = f"a full batch of the least thresholds, (11), holds {_tokens(batch)}: "
        waits += _fits(answer, batch)
    parts.append(Text(f"WAIT as printed: {waits}"))
    if len(answer.question.flows) <= _FEW:
        columns = ("type", "rate/s", "prompt", "decode steps", "n*", "arrive in a step", "WAIT n_j")
        table = plain_table(*columns)
        first = answer.equilibria[0]
        one = first if len(answer.equilibria) == 1 and first.stable else None
        for j, flow in enumerate(answer.question.flows):
            table.add_row(
                str(j + 1),
                *map(number, (float(flow.rate), float(flow.prompt_tokens), flow.decode_steps)),
                number(one.requests[j] if one else None),
                number(flow.rate * one.step_s if one else None),
                number(None if answer.wait is None else answer.wait[j]),
            )
        parts.append(table)
    parts.append(_segments(answer))
    for check in answer.checks:
        parts += [Text(line) for line in _check(answer, check)]
    return Group(*parts)


def _equilibrium(answer: Answer, flows: Sequence[Flow], found: Equilibrium) -> Iterator[str]:
    question = answer.question
    if not found.stable:
        yield (
            f"unstable: the load is {_percent(found.load)}, and requests pile up whoever enters "
            f"when; below {_percent(1 / found.load)} of these rates it is stable"
        )
    else:
        yield (
            f"stable: the load is {_percent(found.load)}; in equilibrium a step takes "
            f"{number(found.step_s * 1e3)} ms, {number(sum(found.requests))} requests run, and "
            f"M* = {_tokens(found.memory_tokens)}"
        )
        yield f"throughput* = {number(float(found.decode_tok_s))} decode tokens per second"
    if question.capacity_tokens is None:
        return
    yield f"M*: {_fits(answer, found.memory_tokens)}"
    if answer.short_tokens(found.memory_tokens):
        share = sustainable_share(flows, question.cost, question.capacity_tokens)
        held = _tokens(question.capacity_tokens)
        yield f"{held} of memory sustain {_percent(share)} of these rates"


def _segments(answer: Answer) -> RenderableType:
    question, best = answer.question, answer.best
    if best is None:
        none = "no thresholds are valid at these rates with so many segments"
        return Text(f"Nested WAIT as printed: {none}")
    columns = ("segments", "batch M_pi", "queues", "buffers", "tokens in all", "thresholds n_k")
    table = plain_table(*columns)
    for count, plan in answer.plans.items():
        if plan is None:
            table.add_row(str(count), *["-"] * 5)
            continue
        memory = plan.memory
        figures = (memory.batch_tokens, memory.queue_tokens, memory.buffer_tokens, memory.tokens)
        mark = " (least memory)" if plan is best else ""
        table.add_row(str(count), *map(number, figures), _listed(plan.thresholds) + mark)
    table.caption = (
        f"Nested WAIT as printed, memory exceeded within {question.steps:g} steps with a "
        f"probability of at most {question.delta:g}: {_fits(answer, best.memory.tokens)}"
    )
    table.caption_justify = "left"
    return table


def _check(answer: Answer, check: Check) -> Iterator[str]:
    found = check.found
    yield f"given thresholds of {check.policy}: {_listed(found.thresholds)}"
    for each in found.conditions:
        if not each.holds:
            yield f"  {verdict(each)}: {each}"
    if not found.missed:
        yield f"  valid; {_tokens(check.memory_tokens)}: {_fits(answer, check.memory_tokens)}"
    elif found.nearest is None:
        yield "  not valid, and no greater ones are at these rates"
    else:
        yield f"  not valid: the nearest that are, raised: {_listed(found.nearest)}"


def _fits(answer: Answer, needed: float) -> str:
    short = answer.short_tokens(needed)
    if short is None:
        return "give --kv-tokens to compare"
    if not short:
        return "enough memory"
    if short == math.inf:
        return "no memory is enough"
    return f"not enough memory, short by {_tokens(short)}"


def _tokens(value: float) -> str:
    if not math.isfinite(value):
        return "any number of tokens"
    return f"{math.ceil(value * (1 - ROUNDING)):,} tokens"


def _percent(share: float) -> str:
    return f"{number(100 * share)}%"


def _listed(thresholds: Sequence[int]) -> str:
    shown = ":".join(map(str, thresholds[:_FEW]))
    return shown if len(thresholds) <= _FEW else f"{shown}:…"
