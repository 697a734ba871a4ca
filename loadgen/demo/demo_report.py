"""The demo's runs as a summary for files and as tables for the terminal."""

import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from loadgen.demo.budget import Trial
from loadgen.demo.figures import LATENESS_LIMIT
from loadgen.demo.worlds import SUBJECT, DemoRun, World, best_baseline, subject
from loadgen.replay.replay_results import Report
from loadgen.report.numbers import number
from loadgen.report.origin import EMULATION, KEY, SERVING, Engines, origin, with_files

CODE = (*SERVING, *EMULATION, "loadgen/replay", "loadgen/traces", "loadgen/demo")
NO_BAR = "none for such runs"
# Relative difference between the mean prompts of two windows that is worth a warning.
UNLIKE = 0.03


def summary(
    world: World,
    runs: Sequence[DemoRun],
    trials: Sequence[Trial],
    conditions: Report,
    pictures: Sequence[Path] = (),
) -> Report:
    """All conditions and results as JSON-able values; the pictures lie beside the file of them."""
    header = with_files(origin(Engines.EMULATED, CODE, runs[0].outcome.engines), *pictures)
    return {
        "emulated": True,
        "statement": world.statement,
        "conditions": {**asdict(world.fleet), **conditions},
        "notes": list(world.notes),
        "calibration": [asdict(trial) for trial in trials],
        KEY: header,
        "machine": {**header["machine"], "platform": platform.platform()},
        "versions": header["versions"],
        "runs": [
            {
                "policy": run.outcome.plan.policy,
                "dispatch": run.outcome.plan.dispatch.value,
                "complete": run.outcome.complete,
                "not_measured": run.unmeasured,
                "throughput_tok_s": run.throughput_tok_s,
                "steps_steady": None if run.steady is None else asdict(run.steady),
                "steps_whole": None if run.whole is None else asdict(run.whole),
                "replay": run.outcome.report,
                "record": run.outcome.record_file.name,
            }
            for run in runs
        ],
        "comparison": comparison(world, runs),
        "verdict": verdict(world, runs),
        "warnings": warnings(world, runs),
    }


def comparison(world: World, runs: Sequence[DemoRun]) -> dict[str, Any] | None:
    """BF-IO's figures as ratios to the best baseline's; None unless all are measured."""
    ours, baseline = subject(runs), best_baseline(world, runs)
    if ours is None or baseline is None or any(run.unmeasured for run in runs):
        return None
    return {
        "subject": ours.name,
        "baseline": baseline.name,
        "baseline_is": world.baseline_is,
        **{
            f"{name}_ratio": figure(ours) / figure(baseline)
            for name, figure in world.ratios.items()
        },
    }


def verdict(world: World, runs: Sequence[DemoRun]) -> str:
    """How BF-IO does against the bar of its world."""
    ratios = comparison(world, runs)
    if ratios is None:
        reasons = (f"{run.name}: {run.unmeasured}" for run in runs if run.unmeasured)
        return "not measured: " + next(reasons, f"it takes {SUBJECT} and another policy")
    bars = [
        (name.replace("_", " "), ratios[f"{name}_ratio"], bar) for name, bar in world.bars.items()
    ]
    plan = runs[0].outcome.plan
    if not bars or (plan.requests, plan.seed) != (world.requests, 0):
        return NO_BAR
    # More of all but throughput is worse.
    missed = [name for name, ratio, bar in bars if (ratio < bar) is (name == "throughput")]
    said = " and ".join(
        f"{name} x {bar:g} at the {'least' if name == 'throughput' else 'most'}"
        for name, _, bar in bars
    )
    return (f"missed by {' and '.join(missed)}" if missed else "met") + f": {said}"


def warnings(world: World, runs: Sequence[DemoRun]) -> list[str]:
    """Warnings about figures that are not reliable."""
    found = [f"{run.name}: {warning}" for run in runs for warning in _run_warnings(world, run)]
    run, baseline = subject(runs), best_baseline(world, runs)
    if run is None or baseline is None or world.plan.get("arrivals") is not None:
        return found
    # In a short window of a closed loop the policies may have admitted prompts of unlike lengths.
    ours, theirs = run.admitted_tokens, baseline.admitted_tokens
    if ours and theirs and abs(ours / theirs - 1) > UNLIKE:
        found.append(
            f"{run.name} admitted prompts of {ours:.0f} tokens in its window, {baseline.name} of "
            f"{theirs:.0f}: not like for like; more --requests give longer windows"
        )
    return found


def _run_warnings(world: World, run: DemoRun) -> Iterator[str]:
    if run.unmeasured:
        yield f"not measured: {run.unmeasured}"
    if run.steady is not None and run.steady.lateness_p99 > LATENESS_LIMIT:
        yield (
            "the machine could not keep up: 1 % of steps ended "
            f"{100 * run.steady.lateness_p99:.0f} % of a step late or more (limit "
            f"{100 * LATENESS_LIMIT:.0f} %); run it again when nothing else runs, or slower: "
            f"evenstep demo --worlds {world.name} --time-scale {2 * run.outcome.plan.time_scale:g}"
        )


def demo_table(world: World, runs: Sequence[DemoRun]) -> Table:
    """One row per run: BF-IO's bold, the best baseline's coloured."""
    baseline = best_baseline(world, runs)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("policy", no_wrap=True)
    for title in world.columns:
        table.add_column(title.replace(", ", "\n"), justify="right", no_wrap=True)
    for run in runs:
        style = "bold" if run is subject(runs) else "cyan" if run is baseline else None
        policy = run.outcome.plan.policy
        *cells, failed = (number(cell(run), 3) for cell in world.columns.values())
        if run.unmeasured:
            policy, cells = f"{policy}\nnot measured", ["-"] * len(cells)
        table.add_row(policy, *cells, failed, style=style)
    return table
