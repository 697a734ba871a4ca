"""Options that the simulating commands share."""

from typing import Annotated, Any

from loadgen.run.options import flag
from loadgen.simulator.decode.length_sources import (
    LAW_FORMS,
    LawLengths,
    LengthSource,
    TraceLengths,
)
from loadgen.traces.trace import BUNDLED, load_trace
from router.commands.json_output import json_option
from router.core.errors import ConfigError
from router.core.types import Dispatch


def trace_flag(default: str) -> Any:
    """``--trace``, with the trace that its command takes without it."""
    return flag(f"Trace file, or a bundled one: {', '.join(BUNDLED)} [{default}].", "FILE")


TraceFlag = Annotated[str | None, trace_flag("burstgpt")]
LengthsFlag = Annotated[str | None, flag(f"In place of a trace: {LAW_FORMS}.", "LAW:IN,OUT")]
WorkersFlag = Annotated[int, flag("Workers that step together.", "G")]
SlotsFlag = Annotated[int, flag("Requests that a worker runs at once.", "B")]
DispatchFlag = Annotated[
    Dispatch, flag("From the pool when a slot is free, or at once on arrival.")
]
LookaheadFlag = Annotated[
    str, flag("What is known of coming ends.", "auto|none|cap|survival|oracle|miss:P")
]
JsonFlag = Annotated[str | None, json_option("Write the result; - is stdout.")]


def length_source(trace: str | None, lengths: str | None) -> LengthSource:
    """Return the lengths of ``--trace`` or ``--lengths``; by default of the first bundled trace."""
    if lengths is None:
        return TraceLengths.of(load_trace(trace or "burstgpt"))
    if trace is not None:
        raise ConfigError("--trace and --lengths: give one of them")
    return LawLengths.parse(lengths)
