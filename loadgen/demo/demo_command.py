"""``evenstep demo``: policies side by side on emulated workers."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from loadgen.demo.budget import (
    FIRST_SCALE,
    LEAST_S,
    RUN_SHARES,
    TRIAL_SHARES,
    TimeLeft,
    Trial,
    calibrate,
    least_late,
)
from loadgen.demo.demo_report import NO_BAR, demo_table, summary, warnings
from loadgen.demo.run import Outcome, RunPlan, execute
from loadgen.demo.worlds import SUBJECT, WORLDS, DemoRun, World
from loadgen.replay.replay_results import Report
from loadgen.replay.workload import checked_time_scale
from loadgen.report.load_pictures import require_matplotlib
from loadgen.run.child_processes import signals_as_interrupts
from loadgen.run.options import chosen
from loadgen.traces.trace import load_trace
from router.commands.json_output import STDOUT, writable, write_json
from router.commands.options import flag
from router.core.errors import InputError
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
class Demo:
    """All runs of one demo."""

    folder: Path
    console: Console
    left: TimeLeft

    def run(
        self, world: World, plans: Sequence[RunPlan], requests: int | None, time_scale: float | None
    ) -> tuple[list[DemoRun], list[Trial]]:
        """Calibrate where the time scale is open, then execute plans until the time is over.

        EvenstepError: a process did not start, or a replay reported nothing.
        """
        # Both worlds may have a run of one name.
        folder, left = _folder(self.folder / world.name), self.left

        def executed(plan: RunPlan, shares: float = TRIAL_SHARES) -> Outcome:
            return left.execute(
                lambda most_s: execute(plan, world.fleet, folder, min(most_s, RUN_TIMEOUT_S)),
                shares,
            )

        requests = requests or world.requests
        scale = time_scale or world.time_scale
        trials: list[Trial] = []
        self.console.print(Text(world.title, style="bold"))
        if scale is None:
            self.console.print("Calibrating: how fast can this machine step?")
            first = replace(plans[-1], time_scale=FIRST_SCALE)
            trials = calibrate(executed, first, world.fleet)
            rows = load_trace(first.trace).requests
            mean_output = fmean(min(each.output_tokens, CAP_TOKENS) for each in rows)
            trial = least_late(trials)
            scale = trial.scale_of(requests, mean_output, CAP_TOKENS, left.share_s)
        if world.write_trace is not None:
            world.write_trace(Path(plans[0].trace), requests, plans[0].seed)
        runs: list[DemoRun] = []
        for plan in plans:
            told = f"{plan.policy}, {plan.dispatch.value} dispatch: "
            if runs and left.seconds < LEAST_S:
                self.console.print(f"{told}not measured, the time is over")
                continue
            self.console.print(f"{told}{requests:,} requests, time scale {scale:g}")
            outcome = executed(replace(plan, requests=requests, time_scale=scale), RUN_SHARES)
            runs.append(DemoRun.of(outcome, world.fleet))
            left.runs -= 1
        return runs, trials


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
        int | None, flag("per run; default: 4000 to decode, 600 with prompts", "N", least=1)
    ] = None,
    time_scale: Annotated[
        float | None, flag("wall per engine second; default: what this machine needs", "X")
    ] = None,
    seconds: Annotated[
        float, flag("wall seconds for everything, unless a time scale is given", "S", least=1)
    ] = 180.0,
    seed: Annotated[int, flag("of the sample and the prompts", "S")] = 0,
    json_file: Annotated[
        str | None, flag("write the summary; - is stdout", "FILE", name="--json")
    ] = None,
) -> None:
    """Compare policies on this machine, from nothing to a picture.

    Two worlds: workers that only decode, and conversations with shared prefixes on ranks that
    compute prompts. Each policy serves the same requests on a fresh emulated fleet behind a fresh
    router. On a machine that is too busy it says what is not measured. Exit 1 if a run did not
    complete every request.
    """
    require_matplotlib()
    names = chosen("--worlds", "world", worlds, WORLDS)
    plans = {name: _plans(WORLDS[name], policies, seed, out) for name in names}
    scale = None if time_scale is None else checked_time_scale(time_scale)
    console = Console(stderr=json_file == STDOUT)
    end_s = time.monotonic() + seconds - PLOTTING_S if scale is None else math.inf
    session = Demo(_folder(out), console, TimeLeft(end_s, sum(map(len, plans.values()))))
    writable(json_file)  # Checked only now: the file may be in the new folder.
    done: dict[str, list[DemoRun]] = {}
    report: dict[str, Report] = {}
    pictures: list[Path] = []
    try:
        with signals_as_interrupts():
            for name in names:
                world = WORLDS[name]
                runs, trials = session.run(world, plans[name], requests, scale)
                done[name] = runs
                conditions = _conditions(world, runs[0].outcome.plan)
                pictures += (drawn := world.draw(out, world, runs))
                report[name] = summary(world, runs, trials, conditions, drawn)
    except KeyboardInterrupt:
        console.print("Interrupted; nothing was left running.")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    for file in (str(out / "summary.json"), json_file):
        write_json(report, file)
    for name in names:
        _show(console, WORLDS[name], done[name], report[name])
    console.print("\nWritten: " + ", ".join(map(str, [*pictures, out / "summary.json"])))
    if not all(_complete(done[name], plans[name]) for name in names):
        raise typer.Exit(EXIT_FAILED)


def _plans(world: World, policies: str | None, seed: int, out: Path) -> list[RunPlan]:
    plans = []
    for name in chosen("--policies", "policy", policies or world.policies, POLICIES):
        # BF-IO chooses from a pool; the others assign on arrival, as most routers do.
        pooled = name == SUBJECT or Dispatch.INSTANT not in POLICIES[name].dispatch
        form = Dispatch.POOL if pooled else Dispatch.INSTANT
        plan = RunPlan(name, form, 0, CAP_TOKENS, seed, time_scale=1.0, **world.plan)
        if world.write_trace is not None:
            plan = replace(plan, trace=str(out / "conversations.jsonl"))
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


def _complete(runs: Sequence[DemoRun], plans: Sequence[RunPlan]) -> bool:
    return len(runs) == len(plans) and all(run.outcome.complete for run in runs)


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
    if report["verdict"] != NO_BAR:
        console.print(Text(f"BF-IO's bar: {report['verdict']}"))
    for warning in warned:
        console.print(Text(warning, style="yellow"))
