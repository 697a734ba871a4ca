"""``evenstep plan``: GPUs become chains, ``vllm serve`` commands and a router's settings."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer
from rich.console import Console

from loadgen.planner.picture import draw_placement
from loadgen.planner.plan_file import PlanConfig, load_config, machines, model_numbers
from loadgen.planner.plan_report import Answer, report
from loadgen.planner.plan_table import answer_table, gpu_table
from loadgen.planner.planned import planned
from loadgen.planner.question import Lengths, Question
from loadgen.planner.remedies import remedies
from loadgen.planner.vllm import engines, router_config, script
from loadgen.run.options import JsonFlag, command_of
from loadgen.traces.trace import BUNDLED, load_trace
from router.commands.json_output import STDOUT, write_json
from router.commands.options import flag
from router.core.errors import ConfigError, InputError, PlacementError

_MOST_RATE = 1e9


def _list_gpus(asked: bool) -> None:
    if asked:
        Console(width=130).print(gpu_table(), highlight=False)  # on any terminal
        raise typer.Exit


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Its command line."""

    config: Annotated[
        Path, flag("Servers, model, lengths (TOML); deploy/plan/servers.toml is one.", "FILE")
    ]
    rate: Annotated[float, flag("Requests per second that arrive.", "R")]
    trace: Annotated[
        str | None,
        flag(
            f"Mean lengths from a trace, or a bundled one: {', '.join(BUNDLED)} [as the TOML "
            "says].",
            "FILE",
        ),
    ] = None
    out: Annotated[
        Path | None, flag("Write commands, the router's configuration and a picture there.", "DIR")
    ] = None
    json_file: JsonFlag = None
    list_gpus: Annotated[
        bool,
        typer.Option(
            "--list-gpus", help="Show the presets and end.", callback=_list_gpus, is_eager=True
        ),
    ] = False


@command_of(PlanOptions)
def plan(options: PlanOptions) -> None:
    """Chains of unequal GPUs for a model: who holds which layers, with how many requests at once.

    Blocks (layers) are placed by GBP-CR of "Serving Chain-structured Jobs with Large Memory
    Footprints", with as many reserved slots as give the lowest lower bound on the mean response
    time under the policy jffc. Printed are chains that share no server, which engines of vLLM can
    run. --out writes a script for each vllm serve, router.toml for evenstep serve --config,
    plan.json and placement.png.
    """
    config = load_config(options.config)
    if not 0 < options.rate <= _MOST_RATE:
        raise ConfigError(f"--rate must be above 0 and at most {_MOST_RATE:g}, got {options.rate}")
    model = model_numbers(config, options.config.parent)
    lengths = _lengths(config, options.trace)
    question = Question(model, lengths, config.engine, config.times, machines(config), options.rate)
    try:
        found = planned(question)
    except PlacementError as error:
        ways = remedies(question, fits=False)
        enough = f"; enough would be: {', or '.join(ways)}" if ways else ""
        raise InputError(f"{error}{enough}") from None
    sustained = question.sustained_rate(found.disjoint.chains)
    ways = [] if question.rate < sustained else remedies(question, fits=True)
    answer = Answer(found, config.model.name, engines(found, config.model.name), ways)
    console = Console(stderr=options.json_file == STDOUT)
    console.print(answer_table(answer), highlight=False, soft_wrap=True)
    if options.out is not None:
        written = _write(options.out, answer)
        told = f"written to {options.out}: {', '.join(written)}"
        console.print(told, highlight=False, soft_wrap=True)
        if old := sorted({file.name for file in options.out.glob("chain-*.sh")} - {*written}):
            told = f"beware: {options.out} has scripts of another plan, too: {', '.join(old)}"
            console.print(told, highlight=False, soft_wrap=True)
    write_json(report(answer), options.json_file)


def _lengths(config: PlanConfig, given: str | None) -> Lengths:
    stated = config.workload
    trace = given or (stated.trace if stated.input_tokens is None else None)
    if trace is not None:
        requests = load_trace(trace).requests
        prompt = fmean(request.prompt_tokens for request in requests)
        output = fmean(request.output_tokens for request in requests)
        return Lengths(prompt, output, stated.slot_tokens or prompt + output, f"trace {trace}")
    if stated.input_tokens is None or stated.output_tokens is None:
        raise ConfigError(
            "no lengths: give --trace, or input_tokens and output_tokens in [workload]"
        )
    slot = stated.slot_tokens or stated.input_tokens + stated.output_tokens
    return Lengths(stated.input_tokens, stated.output_tokens, slot, "as stated")


def _write(folder: Path, answer: Answer) -> Sequence[str]:
    """Write all files that a run needs, replacing earlier ones."""
    texts = {"router.toml": router_config(answer.engines)}
    for engine in answer.engines:
        for launch in engine.launches:
            node = f"-node-{launch.node}" if launch.nodes > 1 else ""
            texts[f"{engine.name}{node}.sh"] = script(engine, launch)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
            if name.endswith(".sh"):
                (folder / name).chmod(0o755)
        write_json(report(answer), str(folder / "plan.json"))
        pictures = [] if find_spec("matplotlib") is None else ["placement.png"]
        if pictures:
            draw_placement(folder / pictures[0], answer)
    except OSError as error:
        raise InputError(f"--out: cannot write to {folder}: {error.strerror}") from error
    return [*texts, "plan.json", *pictures]
