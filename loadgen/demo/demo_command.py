"""``evenstep demo``: policies side by side on emulated workers."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from loadgen.demo import status_pictures
from loadgen.demo.budget import FIRST_SCALE, Allowance, Trial, calibrate, least_late
from loadgen.demo.demo_report import (
    STATEMENT,
    SUBJECT,
    DemoRun,
    best_baseline,
    demo_tables,
    subject,
    summary,
    warnings,
)
from loadgen.demo.figures import steady_steps
from loadgen.demo.run import Fleet, Outcome, RunPlan, execute
from loadgen.replay.replay_results import Report
from loadgen.replay.workload import checked_time_scale
from loadgen.report import browser
from loadgen.report.load_pictures import Panel, draw_loads, draw_power, require_matplotlib
from loadgen.run.child_processes import signals_as_interrupts
from loadgen.run.options import flag
from loadgen.traces.trace import Trace, load_trace
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

    def __init__(
        self, fleet: Fleet, folder: Path, console: Console, clock: Callable[[], float]
    ) -> None:
        self._fleet = fleet
        self._folder = folder
        self._console = console
        self._clock = clock
        self._start_s = clock()

    def run(
        self, plans: Sequence[RunPlan], trace: Trace, budget: Budget
    ) -> tuple[list[DemoRun], list[Trial]]:
        """Calibrate unless both choices are given, then execute every plan.

        Raises:
            EvenstepError: a process did not start, or a replay reported nothing.
        """
        mean_output = fmean(min(each.output_tokens, CAP_TOKENS) for each in trace.requests)

        def allowance() -> Allowance:
            ending_s = PLOTTING_S + (status_pictures.LASTS_S if browser.find() else 0.0)
            run_wall_s = (budget.seconds - ending_s - (self._clock() - self._start_s)) / len(plans)
            return Allowance(run_wall_s, mean_output, CAP_TOKENS)

        if budget.requests is not None and budget.time_scale is not None:
            return self._all(plans, budget.requests, budget.time_scale), []
        self._console.print(
            f"Calibrating: how fast can this machine step? (all in all {budget.seconds:.0f} s)"
        )
        first = replace(plans[-1], time_scale=budget.time_scale or FIRST_SCALE)
        trials = calibrate(self._execute, first, self._fleet, self._clock)
        trial = least_late(trials)
        scale = budget.time_scale or allowance().time_scale(trial)
        requests = budget.requests or allowance().requests(trial, scale)
        return self._all(plans, requests, scale), trials

    def draw(self, runs: Sequence[DemoRun]) -> list[Path]:
        """Pictures of the best baseline and of BF-IO, as far as they ran."""
        chosen = [run for run in (best_baseline(runs), subject(runs)) if run is not None]
        panels = [_panel(run) for run in chosen]
        scale = runs[0].outcome.plan.time_scale
        caption = (
            f"emulated: {self._fleet.workers} workers x {self._fleet.slots} slots, step time "
            f"C + t_l * max load of the BF-IO paper, BurstGPT lengths, time scale {scale:g}"
        )
        shaded = f"{caption}\none line per worker; shaded: the window of the averages"
        paths = [self._folder / "loads.png", self._folder / "power.png"]
        draw_loads(paths[0], panels, shaded)
        draw_power(paths[1], panels, caption)
        return paths

    def photograph(self, plan: RunPlan) -> Sequence[Path]:
        """Pictures of the status page during another run of the plan; empty without a browser."""
        try:
            return status_pictures.photograph(plan, self._fleet, self._folder)
        except browser.BrowserError as error:
            self._console.print(f"No picture of the status page: {error}")
            return ()

    def _all(self, plans: Sequence[RunPlan], requests: int, time_scale: float) -> list[DemoRun]:
        runs = []
        for plan in plans:
            self._console.print(
                f"{plan.policy}, {plan.dispatch.value} dispatch: {requests:,} requests, "
                f"time scale {time_scale:g}"
            )
            outcome = self._execute(replace(plan, requests=requests, time_scale=time_scale))
            runs.append(DemoRun.of(outcome, self._fleet))
        return runs

    def _execute(self, plan: RunPlan) -> Outcome:
        return execute(plan, self._fleet, self._folder, RUN_TIMEOUT_S)


def demo(
    policies: Annotated[
        str, flag("each in both forms of dispatch, bfio from the pool", "NAME,…")
    ] = "jsq,least_tokens,bfio",
    out: Annotated[Path, flag("summary.json, pictures, records, logs", "DIR")] = Path("out/demo"),
    requests: Annotated[
        int | None, flag("per run; default: as many as the time allows", "N", least=1)
    ] = None,
    time_scale: Annotated[
        float | None, flag("wall per engine second; default: what this machine needs", "X")
    ] = None,
    seconds: Annotated[float, flag("wall seconds for everything", "S", least=1)] = 172.0,
    seed: Annotated[int, flag("of the sample and the prompts", "S")] = 0,
    json_file: Annotated[
        str | None, flag("write the summary; - is stdout", "FILE", name="--json")
    ] = None,
) -> None:
    """Compare policies on this machine, from nothing to a picture.

    Each policy serves the same requests on a fresh emulated fleet behind a fresh router. Exit 1 if
    a run did not complete every request.
    """
    require_matplotlib()
    plans = _plans(policies, seed)
    scale = None if time_scale is None else checked_time_scale(time_scale)
    budget = Budget(seconds, requests, scale)
    console = Console(stderr=json_file == STDOUT)
    session = Demo(Fleet(), _folder(out), console, time.monotonic)
    writable(json_file)  # Checked only now: the file may be in the new folder.
    trace = load_trace()
    try:
        with signals_as_interrupts():
            runs, trials = session.run(plans, trace, budget)
            pictures = [*session.draw(runs), *session.photograph(runs[-1].outcome.plan)]
    except KeyboardInterrupt:
        console.print("Interrupted; nothing was left running.")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    plan = runs[0].outcome.plan
    cut = fmean(each.output_tokens > plan.cap_tokens for each in trace.requests)
    report = summary(
        runs,
        trials,
        Fleet(),
        {
            "trace": trace.name,
            "requests": plan.requests,
            "seed": plan.seed,
            "time_scale": plan.time_scale,
            "warmup": plan.warmup,
            "max_tokens": plan.cap_tokens,
            "outputs_cut_share": cut,
        },
    )
    for file in (str(out / "summary.json"), json_file):
        write_json(report, file)
    _show(console, runs, report, [*pictures, out / "summary.json"])
    if not all(run.outcome.complete for run in runs):
        raise typer.Exit(EXIT_FAILED)


def _plans(policies: str, seed: int) -> list[RunPlan]:
    names = [name.strip() for name in policies.split(",")]
    unknown = [name for name in names if name not in POLICIES]
    if unknown:
        raise ConfigError(
            f"--policies: unknown {', '.join(map(repr, unknown))}; "
            f"choose from {', '.join(POLICIES)}"
        )
    return [
        RunPlan(name, form, requests=0, cap_tokens=CAP_TOKENS, seed=seed, time_scale=1.0)
        for name in dict.fromkeys(names)
        for form in Dispatch
        # BF-IO chooses from a pool; dispatch at once leaves it no choice.
        if form in POLICIES[name].dispatch and (name != SUBJECT or form is Dispatch.POOL)
    ]


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


def _show(console: Console, runs: Sequence[DemoRun], report: Report, paths: Sequence[Path]) -> None:
    for table in demo_tables(runs):
        console.print(table)
    console.print(Text(STATEMENT, style="italic"))
    comparison, warned = report["comparison"], warnings(runs)
    if isinstance(comparison, dict):
        doubt = "Doubtful, for the reasons below: " if warned else ""
        console.print(
            f"{doubt}{comparison['subject']} against {comparison['baseline']} (the fastest other): "
            f"throughput x {comparison['throughput_ratio']:.3f}, "
            f"imbalance x {comparison['imbalance_ratio']:.2f}, "
            f"energy per token x {comparison['energy_per_token_ratio']:.3f}"
        )
    for warning in warned:
        console.print(Text(warning, style="yellow"))
    console.print("Written: " + ", ".join(map(str, paths)))
