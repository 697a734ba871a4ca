"""``evenstep diagnose``: does balancing matter on this cluster?"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from loadgen.diagnose.analysis.before_after import compare
from loadgen.diagnose.analysis.window import Span, window_of
from loadgen.diagnose.diagnosis import diagnose_window, report
from loadgen.diagnose.diagnosis_table import diagnosis_table
from loadgen.diagnose.recording_source import earlier_report, recording_from
from loadgen.replay.workload import checked_time_scale
from loadgen.report.origin import KEY, Engines, origin
from loadgen.traces.recordings import load_recording
from router.access.key_files import first_key
from router.commands.json_output import STDOUT, json_option, write_json
from router.config.worker_notation import unknown
from router.core.errors import ConfigError
from router.core.policies.policy_table import POLICIES

CODE = ("loadgen/diagnose", "loadgen/simulator/decode", "router/core")
_MINUTE_S = 60.0
_LONGEST_S = 3600.0

_Url = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="Admin port of evenstep serve or observe."),
]
_KeyFile = Annotated[
    str | None,
    typer.Option("--key-file", metavar="FILE", help="With the key that the admin port wants."),
]
_File = Annotated[
    Path | None,
    typer.Option("--recording", metavar="FILE", help="In its place: what --record wrote."),
]
_Seconds = Annotated[
    float | None,
    typer.Option("--seconds", metavar="S", help="How long [60; of a file: all of it]."),
]
_Start = Annotated[
    float, typer.Option("--start", metavar="S", help="Of a file: seconds left out first.")
]
_Group = Annotated[
    str | None, typer.Option("--group", metavar="NAME", help="Which group [the busiest].")
]
_Price = Annotated[
    float | None, typer.Option("--price", metavar="P", help="Of a kWh, in any currency.")
]
_Before = Annotated[
    Path | None,
    typer.Option(
        "--before", metavar="FILE", help="--json of before a switch: prediction and measurement."
    ),
]
_Policies = Annotated[
    str | None,
    typer.Option(
        "--policies", metavar="NAME,…", help="To simulate, beside the one in force [all]."
    ),
]
_TimeScale = Annotated[
    float,
    typer.Option("--time-scale", metavar="X", help="Wall per engine second, as in emulate."),
]
_Seed = Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Of the simulations.")]
_Json = Annotated[str | None, json_option("Write the diagnosis; - is stdout.")]


def diagnose(
    url: _Url = None,
    key_file: _KeyFile = None,
    recording: _File = None,
    seconds: _Seconds = None,
    start: _Start = 0.0,
    group: _Group = None,
    price: _Price = None,
    before: _Before = None,
    policies: _Policies = None,
    time_scale: _TimeScale = 1.0,
    seed: _Seed = 0,
    json_file: _Json = None,
) -> None:
    """Say whether balancing matters on a cluster, what it would win, or why it would not.

    Listens to a running router or observer, or reads a recording. Nothing is changed.
    """
    span = _span(url, seconds, start, time_scale)
    _checked("--price", price, least=0.0)
    chosen = list(POLICIES)
    if policies is not None:
        chosen = [name.strip() for name in policies.split(",")]
    for name in chosen:
        if name not in POLICIES:
            raise ConfigError(f"--policies: {unknown('policy', name, POLICIES)}")
    earlier = None if before is None else earlier_report(before)
    if url is not None and recording is None:
        assert span.listened_s is not None
        note = f"Listening to {url} for {span.listened_s:g} s, then simulating."
        Console(stderr=True).print(note, highlight=False)
        key = None if key_file is None else first_key(key_file)
        source = recording_from(url, span.listened_s, key)
    elif recording is not None and url is None:
        source = load_recording(recording)
    else:
        raise ConfigError("give --url of an admin port, or --recording of a file: one of them")
    diagnosis = diagnose_window(window_of(source, span, group), price, chosen, seed)
    compared = None
    if earlier is not None:
        window = diagnosis.window
        in_force = None
        if window.policy is not None and window.dispatch is not None:
            in_force = window.policy, window.dispatch.value
        compared = compare(earlier, diagnosis.found, in_force, str(before))
    Console(stderr=json_file == STDOUT).print(diagnosis_table(diagnosis, compared))
    if json_file is not None:
        write_json({KEY: origin(Engines.UNKNOWN, CODE), **report(diagnosis, compared)}, json_file)


def _span(url: str | None, seconds: float | None, start_s: float, time_scale: float) -> Span:
    _checked("--seconds", seconds, least=1.0)
    _checked("--start", start_s, least=0.0)
    checked_time_scale(time_scale)
    if url is None:
        return Span(start_s, math.inf if seconds is None else seconds, time_scale)
    if start_s:
        raise ConfigError("--start is of a file: leave it out with --url")
    listened_s = _MINUTE_S if seconds is None else seconds
    if listened_s > _LONGEST_S:
        raise ConfigError(f"--seconds: {listened_s:g} is more than an hour; record to a file")
    return Span(0.0, math.inf, time_scale, listened_s)


def _checked(option: str, value: float | None, least: float) -> None:
    if value is not None and not least <= value < math.inf:
        raise ConfigError(f"{option} must be a number from {least:g} up, got {value:g}")
