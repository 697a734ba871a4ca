"""``evenstep demo``: policies side by side on emulated workers."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, cast

import typer
from rich.console import Console
from rich.text import Text

from loadgen.demo import status_pictures
from loadgen.demo.budget import FIRST_SCALE, Allowance, Trial, calibrate, least_late
from loadgen.demo.conversations import write_conversations
from loadgen.demo.demo_report import (
    DECODE,
    PROMPTS,
    SUBJECT,
    WORLDS,
    DemoRun,
    World,
    best_baseline,
    demo_table,
    subject,
    summary,
    warnings,
)
from loadgen.demo.figures import steady_steps
from loadgen.demo.run import Outcome, RunPlan, execute
from loadgen.replay.replay_results import Report
from loadgen.replay.workload import checked_time_scale
from loadgen.report import browser
from loadgen.report.load_pictures import (
    Panel,
    draw_bars,
    draw_loads,
    draw_power,
    require_matplotlib,
)
from loadgen.run.child_processes import signals_as_interrupts
from loadgen.run.options import flag
from loadgen.simulator.decode.decode_config import SERVE
from loadgen.traces.trace import load_trace
from router.commands.json_output import STDOUT, writable, write_json
from router.core.errors import ConfigError, InputError
from router.core.policies.policy_table import POLICIES
from router.core.types import Dispatch

# Cuts 2.6 % of the sample's outputs; without a cap each run would wait for one request at its end.
CAP_TOKENS = 400
PLOTTING_S = 5.0
# A longer replay is interrupted; its open requests count as lost.
RUN_TIMEOUT_S = 600.0
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Budget:
    """Durations from the command line; None: the demo chooses."""

    seconds: float
    requests: int | None
    time_scale: float | None


class Demo:
    """All runs of one demo."""

    def __init__(self, folder: Path, console: Console, clock: Callable[[], float]) -> None:
        self._folder = folder
        self._console = console
        self._clock = clock
        self._start_s = clock()

    def run(
        self, world: World, plans: Sequence[RunPlan], budget: Budget
    ) -> tuple[list[DemoRun], list[Trial]]:
        """Calibrate where time scale or requests are open, then execute every plan.

        Raises:
            EvenstepError: a process did not start, or a replay reported nothing.
        """
        requests = budget.requests or world.requests
        scale = budget.time_scale or world.time_scale
        self._console.print(Text(world.title, style="bold"))
        if requests is not None and scale is not None:
            return self._all(world, plans, requests, scale), []
        rows = load_trace(plans[0].trace).requests
        mean_output = fmean(min(each.output_tokens, CAP_TOKENS) for each in rows)

        def allowance() -> Allowance:
            ending_s = PLOTTING_S + (status_pictures.LASTS_S if browser.find() else 0.0)
            run_wall_s = (budget.seconds - ending_s - (self._clock() - self._start_s)) / len(plans)
            return Allowance(run_wall_s, mean_output, CAP_TOKENS)

        self._console.print(
            f"Calibrating: how fast can this machine step? (all in all {budget.seconds:.0f} s)"
        )
        first = replace(plans[-1], time_scale=scale or FIRST_SCALE)
        trials = calibrate(lambda plan: self._execute(world, plan), first, world.fleet, self._clock)
        trial = least_late(trials)
        scale = scale or allowance().time_scale(trial)
        requests = requests or allowance().requests(trial, scale)
        return self._all(world, plans, requests, scale), trials

    def draw(self, world: World, runs: Sequence[DemoRun]) -> list[Path]:
        """One picture of the best baseline beside BF-IO, or of all runs; and one of power."""
        scale = runs[0].outcome.plan.time_scale
        fleet = f"emulated: {world.fleet.workers} workers x {world.fleet.slots} slots, "
        if world is PROMPTS:
            caption = (
                f"{fleet}step time C + max (t_l L + t_p P), {runs[0].outcome.plan.requests:,} "
                f"turns of conversations, time scale {scale:g}"
            )
            names = [run.outcome.plan.policy for run in runs]
            figures = {
                title: [cast(float, figure(run) or 0.0) for run in runs]
                for title, figure in list(world.columns.items())[:-1]
            }
            path = self._folder / "prompts.png"
            draw_bars(path, names, figures, caption)
            return [path]
        chosen = [run for run in (best_baseline(world, runs), subject(runs)) if run is not None]
        panels = [_panel(run) for run in chosen]
        caption = (
            f"{fleet}step time C + t_l * max load of the BF-IO paper, BurstGPT lengths, "
            f"time scale {scale:g}"
        )
        shaded = f"{caption}\none line per worker; shaded: the window of the averages"
        paths = [self._folder / "loads.png", self._folder / "power.png"]
        draw_loads(paths[0], panels, shaded)
        draw_power(paths[1], panels, caption)
        return paths

    def photograph(self, plan: RunPlan) -> Sequence[Path]:
        """Pictures of the status page during another run of the plan; empty without a browser."""
        try:
            return status_pictures.photograph(plan, DECODE.fleet, self._folder)
        except browser.BrowserError as error:
            self._console.print(f"No picture of the status page: {error}")
            return ()

    def _all(
        self, world: World, plans: Sequence[RunPlan], requests: int, time_scale: float
    ) -> list[DemoRun]:
        if world is PROMPTS:
            write_conversations(Path(plans[0].trace), requests, plans[0].seed)
        runs = []
        for plan in plans:
            self._console.print(
                f"{plan.policy}, {plan.dispatch.value} dispatch: {requests:,} requests, "
                f"time scale {time_scale:g}"
            )
            outcome = self._execute(world, replace(plan, requests=requests, time_scale=time_scale))
            runs.append(DemoRun.of(outcome, world.fleet))
        return runs

    def _execute(self, world: World, plan: RunPlan) -> Outcome:
        # Both worlds may have a run of one name.
        folder = _folder(self._folder / world.name)
        return execute(plan, world.fleet, folder, RUN_TIMEOUT_S)


def demo(
    worlds: Annotated[str, flag("decode, prompts or both", "NAME,…")] = ",".join(WORLDS),
    policies: Annotated[
        str | None,
        flag(
            "in both worlds; bfio from the pool, others on arrival; default: each its own", "NAME,…"
        ),
    ] = None,
    out: Annotated[Path, flag("summary.json, pictures, records, logs", "DIR")] = Path("out/demo"),
    requests: Annotated[
        int | None, flag("per run; default: as many as the time allows", "N", least=1)
    ] = None,
    time_scale: Annotated[
        float | None, flag("wall per engine second; default: what this machine needs", "X")
    ] = None,
    seconds: Annotated[float, flag("wall seconds for everything", "S", least=1)] = 225.0,
    seed: Annotated[int, flag("of the sample and the prompts", "S")] = 0,
    json_file: Annotated[
        str | None, flag("write the summary; - is stdout", "FILE", name="--json")
    ] = None,
) -> None:
    """Compare policies on this machine, from nothing to a picture.

    Two worlds: workers that only decode, and conversations with shared prefixes on ranks that
    compute prompts. Each policy serves the same requests on a fresh emulated fleet behind a fresh
    router. Exit 1 if a run did not complete every request.
    """
    require_matplotlib()
    chosen = _chosen("--worlds", worlds, WORLDS)
    plans = {name: _plans(WORLDS[name], policies, seed, out) for name in chosen}
    scale = None if time_scale is None else checked_time_scale(time_scale)
    budget = Budget(seconds, requests, scale)
    console = Console(stderr=json_file == STDOUT)
    session = Demo(_folder(out), console, time.monotonic)
    writable(json_file)  # Checked only now: the file may be in the new folder.
    done: dict[str, list[DemoRun]] = {}
    report: dict[str, Report] = {}
    pictures: list[Path] = []
    try:
        with signals_as_interrupts():
            # The time of decode's runs is what the others have left.
            for name in sorted(chosen, key=lambda name: WORLDS[name].requests is None):
                world = WORLDS[name]
                runs, trials = session.run(world, plans[name], budget)
                done[name] = runs
                conditions = _conditions(world, runs[0].outcome.plan)
                report[name] = summary(world, runs, trials, conditions)
                pictures += session.draw(world, runs)
            if DECODE.name in done:
                pictures += session.photograph(done[DECODE.name][-1].outcome.plan)
    except KeyboardInterrupt:
        console.print("Interrupted; nothing was left running.")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    for file in (str(out / "summary.json"), json_file):
        write_json(report, file)
    for name in chosen:
        _show(console, WORLDS[name], done[name], report[name])
    console.print("\nWritten: " + ", ".join(map(str, [*pictures, out / "summary.json"])))
    if not all(run.outcome.complete for runs in done.values() for run in runs):
        raise typer.Exit(EXIT_FAILED)


def _chosen(option: str, text: str, known: Collection[str]) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(
            f"{option}: unknown {', '.join(map(repr, unknown))}; choose from {', '.join(known)}"
        )
    return list(dict.fromkeys(names))


def _plans(world: World, policies: str | None, seed: int, out: Path) -> list[RunPlan]:
    plans = []
    for name in _chosen("--policies", policies or world.policies, POLICIES):
        # BF-IO chooses from a pool; the others assign on arrival, as most routers do.
        pooled = name == SUBJECT or Dispatch.INSTANT not in POLICIES[name].dispatch
        form = Dispatch.POOL if pooled else Dispatch.INSTANT
        plan = RunPlan(name, form, requests=0, cap_tokens=CAP_TOKENS, seed=seed, time_scale=1.0)
        if world is PROMPTS:
            trace = str(out / "conversations.jsonl")
            patience_s = SERVE["starvation_s"]
            plan = replace(plan, trace=trace, arrivals="trace", starvation_s=patience_s, warmup=0.0)
        plans.append(plan)
    return plans


def _conditions(world: World, plan: RunPlan) -> Report:
    trace = load_trace(plan.trace)
    return {
        "arrivals": plan.arrivals or f"closed:{world.fleet.concurrency}",
        "trace": trace.name,
        "requests": plan.requests,
        "seed": plan.seed,
        "time_scale": plan.time_scale,
        "warmup": plan.warmup,
        "max_tokens": plan.cap_tokens,
        "outputs_cut_share": fmean(row.output_tokens > plan.cap_tokens for row in trace.requests),
    }


def _folder(out: Path) -> Path:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out: cannot write to {out}: {error.strerror}") from error
    return out


def _panel(run: DemoRun) -> Panel:
    plan = run.outcome.plan
    name = f"{plan.policy}, {plan.dispatch.value} dispatch"
    steps = [row.step for row in steady_steps(run.outcome)]
    if run.steady is None or not steps:
        return Panel(name, "too short for averages", run.outcome.record)
    average = f"average imbalance {run.steady.imbalance_tokens / 1e4:.2f}e4 tokens"
    return Panel(name, average, run.outcome.record, (steps[0], steps[-1]))


def _show(console: Console, world: World, runs: Sequence[DemoRun], report: Report) -> None:
    console.print()
    console.print(Text(world.title, style="bold"))
    console.print(demo_table(world, runs))
    console.print(Text(world.legend))
    console.print(Text(world.statement, style="italic"))
    comparison, warned = report["comparison"], warnings(world, runs)
    if isinstance(comparison, dict):
        doubt = "Doubtful, for the reasons below: " if warned else ""
        ratios = (
            f"{name.replace('_', ' ')} x {comparison[f'{name}_ratio']:.3f}" for name in world.ratios
        )
        console.print(
            f"{doubt}{comparison['subject']} against {comparison['baseline']} "
            f"({world.baseline_is}): {', '.join(ratios)}"
        )
    for warning in warned:
        console.print(Text(warning, style="yellow"))
