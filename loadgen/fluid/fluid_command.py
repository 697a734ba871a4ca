"""``evenstep fluid``: what one engine sustains by the fluid model, and thresholds for it."""

from dataclasses import astuple, dataclass
from typing import Annotated

import typer
from rich.console import Console

from engine_patches.admission.theory.fluid import Flow
from engine_patches.admission.theory.thresholds import Thresholds
from loadgen.fluid.fluid_answer import Question, answered, report
from loadgen.fluid.fluid_table import answer_table
from loadgen.model.measured_step_time import load_step_time
from loadgen.run.options import StepTimeFlag, command_of, flag
from loadgen.run.simulation_options import JsonFlag
from router.commands.json_output import STDOUT, write_json
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
