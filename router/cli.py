"""The command ``evenstep``; what a subcommand needs is imported when it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from router.errors import ConfigError, EvenstepError, InputError


@dataclass(frozen=True, slots=True)
class _Command:
    target: str
    summary: str
    example: str


COMMANDS = {
    "serve": _Command(
        "router.serve_command:serve",
        "Route requests to workers so that their KV loads stay even.",
        "evenstep serve --port 8000 --worker http://127.0.0.1:8001,slots=64 "
        "--worker http://127.0.0.1:8002,slots=64",
    ),
    "observe": _Command(
        "router.observe.command:observe",
        "See what the barrier costs while somebody else balances; routes nothing.",
        "evenstep observe --worker http://127.0.0.1:8001,snapshots=tcp://127.0.0.1:5600 "
        "--worker http://127.0.0.1:8002,snapshots=tcp://127.0.0.1:5602 --seconds 60",
    ),
    "workers list": _Command(
        "router.workers_command:list_workers",
        "List a running router's workers, and how they are.",
        "evenstep workers list --url http://127.0.0.1:8090",
    ),
    "workers add": _Command(
        "router.workers_command:add",
        "Add a worker.",
        "evenstep workers add http://10.0.0.7:8000,slots=64 --url http://127.0.0.1:8090",
    ),
    "workers drain": _Command(
        "router.workers_command:drain",
        "Give a worker no new requests.",
        "evenstep workers drain 10.0.0.7:8000 --wait 60 --url http://127.0.0.1:8090",
    ),
    "workers undrain": _Command(
        "router.workers_command:undrain",
        "Give a drained worker requests again.",
        "evenstep workers undrain 10.0.0.7:8000 --url http://127.0.0.1:8090",
    ),
    "workers remove": _Command(
        "router.workers_command:remove",
        "Remove a worker.",
        "evenstep workers remove 10.0.0.7:8000 --drain --url http://127.0.0.1:8090",
    ),
    "keygen": _Command(
        "router.keygen_command:keygen",
        "Make a CURVE key pair, for a router or an engine.",
        "evenstep keygen router.key_secret",
    ),
    "agent": _Command(
        "engine_patches.agent.command:agent",
        "Tell routers the power of GPUs whose engines run without the plug-in.",
        "evenstep agent --ranks-of 127.0.0.1:8001=0+1 --bind tcp://127.0.0.1:5700",
    ),
    "calibrate": _Command(
        "router.calibrate_command:calibrate",
        "Power levels of a running router's workers, from what their meters have counted.",
        "evenstep calibrate --url http://127.0.0.1:8000",
    ),
    "emulate": _Command(
        "loadgen.emulator.command:emulate",
        "Run emulated engines: the vLLM API without a model.",
        "evenstep emulate --workers 2 --port 8001 --slots 64",
    ),
    "replay": _Command(
        "loadgen.replay.command:replay",
        "Send the requests of a trace to a router or an engine, and measure.",
        "evenstep replay --url http://127.0.0.1:8000 --trace burstgpt --requests 1000",
    ),
    "demo": _Command(
        "loadgen.demo.command:demo",
        "Compare policies on this machine, from nothing to a picture.",
        "evenstep demo --policies jsq,least_tokens,bfio --out out/demo",
    ),
    "simulate decode": _Command(
        "loadgen.simulator.command:decode",
        "Workers whose decode steps wait for the slowest, under one policy.",
        "evenstep simulate decode --policy bfio --workers 16 --slots 72 --json -",
    ),
    "simulate admission": _Command(
        "loadgen.simulator.admission_command:admission",
        "One engine under KV pressure, and who enters it, under one policy.",
        "evenstep simulate admission --policy headroom --scenario chat70b --rate 11 --json -",
    ),
    "simulate chains": _Command(
        "loadgen.chains.command:chains",
        "Requests on chains of unequal servers, under one policy or several.",
        "evenstep simulate chains --policy jffc,sed,jsq --rate 0.8 --load 0.7 --dispatch instant",
    ),
    "diagnose": _Command(
        "loadgen.diagnose.command:diagnose",
        "Say whether balancing matters on a running cluster, and what it would win.",
        "evenstep diagnose --url http://127.0.0.1:8090 --price 0.30",
    ),
    "tune": _Command(
        "loadgen.simulator.tune_command:tune",
        "Find the best look-ahead and tie weight for a trace by simulation.",
        "evenstep tune --trace burstgpt --workers 32 --slots 72",
    ),
    "solve": _Command(
        "router.solve_command:solve_file",
        "Make one decision of bfio from a file, and prove the optimum.",
        "evenstep solve instance.json --exact",
    ),
    "bounds": _Command(
        "router.bounds_command:bounds",
        "Mean response time of jffc before chains or workers of unequal speed.",
        "evenstep bounds --service-rates 1,.5 --slots 3,4 --rate 3.5",
    ),
    "fluid": _Command(
        "loadgen.fluid.command:fluid",
        "What one engine sustains by the fluid model, and thresholds of WAIT.",
        "evenstep fluid --rates 5,1.5 --lengths 40:85,300:1300 --kv-tokens 120000",
    ),
    "plan": _Command(
        "loadgen.planner.command:plan",
        "Chain unequal GPUs for a model, with the vllm serve commands and the router's settings.",
        "evenstep plan --config servers.toml --rate 0.5 --out out/plan",
    ),
    "figures": _Command(
        "loadgen.figures.command:figures",
        "Simulate the paper's experiments: tables, pictures, one JSON.",
        "evenstep figures --only table1 --out out/figures",
    ),
}
GROUPS = {
    "simulate": "Predict, in virtual time, what a policy would do.",
    "workers": "Change the workers of a running router, through its admin port.",
}

app = typer.Typer(
    name="evenstep",
    help="An LLM inference router that keeps barrier-synchronized decode workers in even step.",
    epilog="\b\nExample:\n  evenstep serve --worker http://127.0.0.1:8001 --worker http://127.0.0.1:8002",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"evenstep {version('evenstep')}")
        raise typer.Exit


@app.callback()
def _evenstep(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


def _group(name: str, summary: str) -> typer.Typer:
    group = typer.Typer(help=summary, no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(group, name=name)
    return group


def _register(parent: typer.Typer, name: str, command: _Command) -> None:
    def run(context: typer.Context) -> None:
        _run(name, command, context.args)

    everything = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    last = name.rpartition(" ")[2]
    parent.command(last, help=command.summary, context_settings=everything)(run)


def _run(name: str, command: _Command, arguments: list[str]) -> None:
    module, _, attribute = command.target.partition(":")
    function: Callable[..., None] = getattr(import_module(module), attribute)
    inner = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    inner.command(epilog=f"\b\nExample:\n  {command.example}")(function)
    inner(arguments, prog_name=f"evenstep {name}")


_parents = {"": app} | {name: _group(name, summary) for name, summary in GROUPS.items()}
for _name, _command in COMMANDS.items():
    _register(_parents[_name.rpartition(" ")[0]], _name, _command)


def report_errors(run: Callable[[], object]) -> None:
    """Run something; exit 2 on bad input, 1 on other failures, one line for either."""
    try:
        run()
    except EvenstepError as error:
        line = " ".join(str(error).split())
        Console(stderr=True).print(Text.assemble(("error: ", "bold red"), line), soft_wrap=True)
        raise SystemExit(2 if isinstance(error, ConfigError | InputError) else 1) from None


def main() -> None:
    """Run the command line."""
    report_errors(app)


if __name__ == "__main__":
    main()
