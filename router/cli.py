"""The command ``evenstep``; a subcommand's imports happen when it runs."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from router.logs import report_errors

# The help's: run a router, look at a cluster, plan one, reproduce the papers.
PANELS = {
    "Run": ("serve", "pick", "keygen", "agent", "emulate", "workers"),
    "Look": ("observe", "calibrate", "replay", "demo", "diagnose"),
    "Plan": ("bounds", "plan"),
    "Research": ("solve", "fluid", "figures", "simulate"),
}


@dataclass(frozen=True, slots=True)
class _Command:
    target: str
    summary: str
    example: str


COMMANDS = {
    "serve": _Command(
        "router.commands.serve_command:serve",
        "Route requests to workers so that their KV loads stay even.",
        "evenstep serve --port 8000 --worker http://127.0.0.1:8001,slots=64 "
        "--worker http://127.0.0.1:8002,slots=64",
    ),
    "pick": _Command(
        "router.commands.pick_command:pick",
        "Decide for a gateway (Envoy, the Gateway API) where each request goes.",
        "evenstep pick --grpc-port 9002 --worker http://127.0.0.1:8001,slots=64 "
        "--worker http://127.0.0.1:8002,slots=64",
    ),
    "observe": _Command(
        "router.commands.observe_command:observe",
        "Measure what the barrier costs while another system balances; routes nothing.",
        "evenstep observe --worker http://127.0.0.1:8001,snapshots=tcp://127.0.0.1:5600 "
        "--worker http://127.0.0.1:8002,snapshots=tcp://127.0.0.1:5602 --seconds 60",
    ),
    "workers list": _Command(
        "router.commands.workers_command:list_workers",
        "List a running router's workers and their states.",
        "evenstep workers list --url http://127.0.0.1:8090",
    ),
    "workers add": _Command(
        "router.commands.workers_command:add",
        "Add a worker.",
        "evenstep workers add http://10.0.0.7:8000,slots=64 --url http://127.0.0.1:8090",
    ),
    "workers drain": _Command(
        "router.commands.workers_command:drain",
        "Send no new requests to a worker.",
        "evenstep workers drain 10.0.0.7:8000 --wait 60 --url http://127.0.0.1:8090",
    ),
    "workers undrain": _Command(
        "router.commands.workers_command:undrain",
        "Send requests to a drained worker again.",
        "evenstep workers undrain 10.0.0.7:8000 --url http://127.0.0.1:8090",
    ),
    "workers remove": _Command(
        "router.commands.workers_command:remove",
        "Remove a worker.",
        "evenstep workers remove 10.0.0.7:8000 --drain --url http://127.0.0.1:8090",
    ),
    "keygen": _Command(
        "router.commands.keygen_command:keygen",
        "Make a CURVE key pair, for a router or an engine.",
        "evenstep keygen router.key_secret",
    ),
    "agent": _Command(
        "engine_patches.agent.command:agent",
        "Report to routers the power of GPUs whose engines run without the plug-in.",
        "evenstep agent --ranks-of 127.0.0.1:8001=0+1 --bind tcp://127.0.0.1:5700",
    ),
    "calibrate": _Command(
        "router.commands.calibrate_command:calibrate",
        "Fit power levels to the measured energy of a running router's workers.",
        "evenstep calibrate --url http://127.0.0.1:8000",
    ),
    "emulate": _Command(
        "loadgen.emulator.emulate_command:emulate",
        "Run emulated engines: the vLLM API without a model.",
        "evenstep emulate --workers 2 --port 8001 --slots 64",
    ),
    "replay": _Command(
        "loadgen.replay.replay_command:replay",
        "Send the requests of a trace to a router or an engine, and measure.",
        "evenstep replay --url http://127.0.0.1:8000 --trace burstgpt --requests 1000",
    ),
    "demo": _Command(
        "loadgen.demo.demo_command:demo",
        "Compare policies on this machine, from nothing to a picture.",
        "evenstep demo --worlds prompts --out out/demo",
    ),
    "simulate decode": _Command(
        "loadgen.simulator.decode.decode_command:decode",
        "Workers whose decode steps wait for the slowest, under one policy.",
        "evenstep simulate decode --policy bfio --workers 16 --slots 72 --json -",
    ),
    "simulate serving": _Command(
        "loadgen.simulator.serving.serving_command:serving",
        "Whole engines, behind one barrier or alone: prompts, prefix caches, KV memory.",
        "evenstep simulate serving --policy barrier_time --dispatch instant --json -",
    ),
    "simulate admission": _Command(
        "loadgen.simulator.admission.admission_command:admission",
        "One engine under KV pressure: which requests one policy admits.",
        "evenstep simulate admission --policy headroom --scenario chat70b --rate 11 --json -",
    ),
    "simulate chains": _Command(
        "loadgen.chains.chains_command:chains",
        "Requests on chains of unequal servers, under one policy or several.",
        "evenstep simulate chains --policy jffc,sed,jsq --rate 0.8 --load 0.7 --dispatch instant",
    ),
    "diagnose": _Command(
        "loadgen.diagnose.diagnose_command:diagnose",
        "Find out whether balancing matters on a running cluster, and what it would gain.",
        "evenstep diagnose --url http://127.0.0.1:8090 --price 0.30",
    ),
    "solve": _Command(
        "router.commands.solve_command:solve_file",
        "Make one decision of bfio from a file, and prove the optimum.",
        "evenstep solve instance.json --exact",
    ),
    "bounds": _Command(
        "router.commands.bounds_command:bounds",
        "Mean response time of jffc before chains or workers of unequal speed.",
        "evenstep bounds --service-rates 1,.5 --slots 3,4 --rate 3.5",
    ),
    "fluid": _Command(
        "loadgen.fluid.fluid_command:fluid",
        "What one engine sustains by the fluid model, and thresholds of WAIT.",
        "evenstep fluid --rates 5,1.5 --lengths 40:85,300:1300 --kv-tokens 120000",
    ),
    "plan": _Command(
        "loadgen.planner.plan_command:plan",
        "Chain unequal GPUs for a model, with the vllm serve commands and the router's settings.",
        "evenstep plan --config servers.toml --rate 0.5 --out out/plan",
    ),
    "figures": _Command(
        "loadgen.figures.figures_command:figures",
        "Simulate the paper's experiments: tables, pictures, one JSON.",
        "evenstep figures --only table1 --out out/figures",
    ),
}
GROUPS = {
    "workers": "Change the workers of a running router, through its admin port.",
    "simulate": "Predict, in virtual time, what a policy would do.",
}


# Longest summary, in characters; the help wraps lines itself.
_WHOLE = 1000


class _InPanels(TyperGroup):
    """A group whose help lists its commands by panel."""

    def format_commands(
        self, ctx: Any, formatter: Any
    ) -> None:  # newer typers bundle their own click
        """Write the commands of each panel."""
        for panel, names in PANELS.items():
            rows = [(name, self.commands[name].get_short_help_str(_WHOLE)) for name in names]
            with formatter.section(panel):
                formatter.write_dl(rows)


app = typer.Typer(
    cls=_InPanels,
    name="evenstep",
    help="An LLM inference router that keeps barrier-synchronized decode workers in even step.",
    epilog="\b\nExample:\n  evenstep serve --worker http://127.0.0.1:8001 --worker http://127.0.0.1:8002",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


class _InSections(TyperCommand):
    """A command whose help lists its options by panel."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options of each panel, in the order of their first options."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if row := parameter.get_help_record(ctx):
                other = "Options" if parameter.param_type_name == "option" else "Arguments"
                panel = getattr(parameter, "rich_help_panel", None) or other
                panels.setdefault(panel, []).append(row)
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl(rows)


def _print_version(wanted: bool) -> None:
    if wanted:
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


def function_of(target: str) -> Callable[..., None]:
    """Import the function of a command, ``module:function``."""
    module, _, attribute = target.partition(":")
    function: Callable[..., None] = getattr(import_module(module), attribute)
    return function


def _register(parent: typer.Typer, name: str, command: _Command) -> None:
    """Add a command that is imported when it runs, and reads its arguments only then."""

    def run(context: typer.Context) -> None:
        inner = typer.Typer(
            add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
        )
        epilog = f"\b\nExample:\n  {command.example}"
        inner.command(cls=_InSections, epilog=epilog)(function_of(command.target))
        inner(context.args, prog_name=f"evenstep {name}")

    everything = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    last = name.rpartition(" ")[2]
    parent.command(last, help=command.summary, context_settings=everything)(run)


_parents = {"": app}
for _name, _summary in GROUPS.items():
    _parents[_name] = typer.Typer(help=_summary, no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(_parents[_name], name=_name)
for _name, _command in COMMANDS.items():
    _register(_parents[_name.rpartition(" ")[0]], _name, _command)


def main() -> None:
    """Run the command line."""
    report_errors(app)


if __name__ == "__main__":
    main()
