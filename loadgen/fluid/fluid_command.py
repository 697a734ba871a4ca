"""``evenstep fluid``: what one engine sustains by the fluid model, and thresholds for it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.text import Text

from engine_patches.admission.theory.fluid import Equilibrium, Flow, sustainable_share
from engine_patches.admission.theory.thresholds import Thresholds
from loadgen.fluid.fluid_answer import ROUNDING, Answer, Check, Question, answered, report, verdict
from loadgen.model.measured_step_time import load_step_time
from loadgen.report.numbers import number, plain_table
from loadgen.run.options import JsonFlag, StepTimeFlag, command_of
from router.commands.json_output import STDOUT, write_json
from router.commands.options import flag
from router.core.errors import ConfigError
from router.core.step_time import numbers

# Limits within which sums stay exact and the answer takes seconds.
_MAX_LENGTH = 1_000_000
_MAX_TYPES = 1000
_RATES = (1e-9, 1e9)
_MAX_STEP_S = 1e9
_MAX_TOKENS = 10**12
_SEGMENTS = (1, 2, 5, 10, 20, 50)


@dataclass(frozen=True, slots=True)
class FluidOptions:
    """Its command line."""

    rates: Annotated[
        list[str],
        flag("Requests per second of each type; given again: of another period, (15).", "R,…"),
    ]
    lengths: Annotated[
        str,
        flag(
            "Of each type: prompt tokens, and decode steps after the prompt's own (l'; an engine "
            "returns one token more). A-B: one type for each l' there, with equal "
            "shares of the rate.",
            "IN:OUT,…",
        ),
    ]
    total_rate: Annotated[float | None, flag("Scale the rates to this sum [as they are].", "R")] = (
        None
    )
    step_time: StepTimeFlag = "4.95e-3,9.5e-8"
    capacity: Annotated[
        int | None,
        typer.Option(
            *("--kv-tokens", "--capacity"),
            help="KV memory C of the engine.",
            metavar="N",
            min=1,
            max=_MAX_TOKENS,
        ),
    ] = None
    thresholds: Annotated[str | None, flag("Check these of WAIT, one for each type.", "n,…")] = None
    nested_thresholds: Annotated[
        str | None, flag("Check these of Nested WAIT, one for each segment.", "n,…")
    ] = None
    segments: Annotated[
        str | None, flag("Numbers of segments to compare [up to one for each length].", "L,…")
    ] = None
    steps: Annotated[float, flag("Steps over which buffers are to be enough.", "B")] = 1e6
    delta: Annotated[float, flag("Probability with which they may not be, in all.", "DELTA")] = 1e-3
    json_file: JsonFlag = None

    def question(self) -> Question:
        """ConfigError names an invalid option; InputError: no such step time."""
        if not 1 <= self.steps <= _MAX_TOKENS:
            raise ConfigError(f"--steps must be from 1 to {_MAX_TOKENS:g}, got {self.steps:g}")
        if not 0 < self.delta < 1:
            raise ConfigError(f"--delta must be between 0 and 1, got {self.delta:g}")
        lengths = [_length(text) for text in self.lengths.split(",")]
        periods = tuple(_flows(text, lengths, self.total_rate) for text in self.rates)
        different = len({flow.decode_steps for flow in periods[0]})
        cost = load_step_time(self.step_time)
        if max(astuple(cost)) > _MAX_STEP_S:
            raise ConfigError(
                f"--step-time: no cost may be above {_MAX_STEP_S:g} s, got {self.step_time!r}"
            )
        thresholds = _counts("--thresholds", self.thresholds, "types", len(periods[0]))
        nested = _counts("--nested-thresholds", self.nested_thresholds, "", 0)
        if len(nested) > different:
            raise ConfigError(
                f"--nested-thresholds: {len(nested)} segments for {different} different lengths; "
                f"give {different} at most"
            )
        segments = _counts("--segments", self.segments, "", 0) or (*_SEGMENTS, different)
        if self.segments is not None and max(segments) > different:
            raise ConfigError(
                f"--segments: give {different} at most, the number of different lengths, got "
                f"{self.segments!r}"
            )
        return Question(
            periods=periods,
            cost=cost,
            capacity_tokens=self.capacity,
            thresholds=thresholds,
            nested_thresholds=nested,
            segments=tuple(sorted({n for n in segments if n <= different})),
            steps=self.steps,
            delta=self.delta,
        )


@command_of(FluidOptions)
def fluid(options: FluidOptions) -> None:
    """What an engine sustains by the fluid model of WAIT (arXiv 2504.11320), and its thresholds.

    Says whether the rates are stable, the memory M* and the throughput* of the equilibrium, whether
    --kv-tokens are enough and by what they fall short, the least valid thresholds, and the memory
    of Nested WAIT with its safety buffers against the number of segments. The paper's printed
    thresholds lie on the edge: evenstep fluid --rates 20,40,80,160 --lengths
    10:20,10:40,10:80,10:160 --total-rate 100 --nested-thresholds 15,14,12,8.
    """
    answer = answered(options.question())
    console = Console(stderr=options.json_file == STDOUT)
    console.print(answer_table(answer), highlight=False, soft_wrap=True)
    write_json(report(answer), options.json_file)


_Length = tuple[float, range]


def _length(text: str) -> _Length:
    """``IN:OUT`` or ``IN:A-B``."""
    prompt, _, out = text.partition(":")
    first, _, last = out.partition("-")
    try:
        found = float(prompt), int(first), int(last or first)
    except ValueError as error:
        raise ConfigError(
            f"--lengths takes IN:OUT or IN:A-B, separated by commas, got {text!r}"
        ) from error
    if not (1 <= found[0] <= _MAX_LENGTH and found[2] <= _MAX_LENGTH):
        raise ConfigError(
            f"--lengths takes prompts of 1 to {_MAX_LENGTH} tokens and up to {_MAX_LENGTH} decode "
            f"steps, got {text!r}"
        )
    if found[1] > found[2]:
        raise ConfigError(f"--lengths takes IN:A-B with A up to B, got {text!r}")
    return found[0], range(found[1], found[2] + 1)


def _flows(text: str, lengths: list[_Length], total_rate: float | None) -> tuple[Flow, ...]:
    rates = numbers("--rates", text)
    if len(rates) != len(lengths):
        raise ConfigError(
            f"--rates and --lengths: {len(rates)} rates for {len(lengths)} types; give one for each"
        )
    if not all(_RATES[0] <= rate <= _RATES[1] for rate in rates):
        raise ConfigError(f"--rates must be from {_RATES[0]:g} to {_RATES[1]:g}, got {text!r}")
    if sum(len(out) for _, out in lengths) > _MAX_TYPES:
        raise ConfigError(f"--lengths: more than {_MAX_TYPES} types; give wider classes")
    if total_rate is not None:
        if not _RATES[0] <= total_rate <= _RATES[1]:
            raise ConfigError(
                f"--total-rate must be from {_RATES[0]:g} to {_RATES[1]:g}, got {total_rate:g}"
            )
        rates = [rate * total_rate / sum(rates) for rate in rates]
    return tuple(
        Flow(rate / len(out), prompt, steps)
        for rate, (prompt, out) in zip(rates, lengths, strict=True)
        for steps in out
    )


def _counts(option: str, text: str | None, what: str, most: int) -> Thresholds:
    if text is None:
        return ()
    counts = numbers(option, text)
    if not all(1 <= n <= _MAX_TOKENS and n.is_integer() for n in counts):
        raise ConfigError(f"{option} takes whole numbers from 1 up, got {text!r}")
    if what and len(counts) != most:
        raise ConfigError(f"{option}: {len(counts)} for {most} {what}; give one for each")
    return tuple(map(int, counts))


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
