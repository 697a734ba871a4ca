"""The demo's runs as a summary for files and as tables for the terminal."""

import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Self, cast

from rich.table import Table

from loadgen.demo.budget import Trial
from loadgen.demo.figures import LATENESS_LIMIT, StepFigures, steady_steps, step_figures
from loadgen.demo.run import STARVATION_S, Fleet, Outcome
from loadgen.replay.replay_results import Report
from loadgen.report.numbers import number
from loadgen.report.origin import EMULATION, KEY, SERVING, Engines, origin

Columns = Mapping[str, "Callable[[DemoRun], object]"]

CODE = (*SERVING, *EMULATION, "loadgen/replay", "loadgen/traces", "loadgen/demo")
SUBJECT = "bfio"
# About the duration of a request of the cap's length; averages over fewer steps mean little.
ENOUGH_STEPS = 200
# Relative difference between the mean prompts of two windows that is worth a warning.
UNLIKE = 0.03
STATEMENT = "Emulated by the paper's step-time model: shows that it works, not a GPU's gain."


@dataclass(frozen=True, slots=True)
class DemoRun:
    """A run with its figures.

    Attributes:
        steady: averages over the steady window; None if the run is too short.
    """

    outcome: Outcome
    steady: StepFigures | None
    whole: StepFigures | None

    @classmethod
    def of(cls, outcome: Outcome, fleet: Fleet) -> Self:
        steady = step_figures(steady_steps(outcome), fleet)
        return cls(outcome, steady, step_figures(outcome.record, fleet))

    @property
    def name(self) -> str:
        return self.outcome.plan.name

    @property
    def throughput_tok_s(self) -> float:
        """By the fleet's record, which a late machine does not distort."""
        figures = self.steady or self.whole
        return 0.0 if figures is None else figures.throughput_tok_s

    @property
    def admitted_tokens(self) -> float | None:
        """Mean prompt length in the steady window."""
        window = cast(Report | None, self.outcome.report.get("steady"))
        return None if window is None else cast(float, window["mean_admitted_prompt_tokens"])


def best_baseline(runs: Sequence[DemoRun]) -> DemoRun | None:
    """The fastest run of a policy other than BF-IO, in either form of dispatch."""
    others = [run for run in runs if run.outcome.plan.policy != SUBJECT]
    return max(others, key=lambda run: run.throughput_tok_s, default=None)


def subject(runs: Sequence[DemoRun]) -> DemoRun | None:
    """The run of BF-IO."""
    return next((run for run in runs if run.outcome.plan.policy == SUBJECT), None)


def summary(
    runs: Sequence[DemoRun], trials: Sequence[Trial], fleet: Fleet, conditions: Report
) -> Report:
    """All conditions and results as JSON-able values."""
    warmup = runs[0].outcome.plan.warmup
    header = origin(Engines.EMULATED, CODE, runs[0].outcome.engines)
    return {
        "emulated": True,
        "statement": STATEMENT,
        "conditions": {**asdict(fleet), "concurrency": fleet.concurrency, **conditions},
        "notes": [
            f"An event carries {fleet.stream_interval} tokens (vLLM's own --stream-interval), so "
            "that HTTP does not crowd out the steps; the first token comes alone.",
            "Imbalance, idle share, loads and energy: from the fleet's record, in the steady "
            f"window (from {warmup:.0%} of the requests completed until the last one was sent).",
            "The idle share is modelled: t_l * imbalance / (workers * step time).",
            "Throughput by steps: tokens of the steady window's steps over their engine seconds; "
            "the baseline is chosen and compared by it. All other throughput and latency: at the "
            "client, in wall seconds / time scale; latency counts from the sending, time in the "
            "pool included.",
            f"A request that has waited {STARVATION_S:g} engine seconds goes before all others.",
        ],
        "calibration": [asdict(trial) for trial in trials],
        KEY: header,
        "machine": {
            **header["machine"],
            "platform": platform.platform(),
            "load_average": os.getloadavg(),
        },
        "versions": header["versions"],
        "runs": [
            {
                "policy": run.outcome.plan.policy,
                "dispatch": run.outcome.plan.dispatch.value,
                "complete": run.outcome.complete,
                "throughput_tok_s": run.throughput_tok_s,
                "steps_steady": None if run.steady is None else asdict(run.steady),
                "steps_whole": None if run.whole is None else asdict(run.whole),
                "replay": run.outcome.report,
                "record": run.outcome.record_file.name,
            }
            for run in runs
        ],
        "comparison": _comparison(runs),
        "warnings": warnings(runs),
    }


def _comparison(runs: Sequence[DemoRun]) -> Report | None:
    ours, baseline = subject(runs), best_baseline(runs)
    if ours is None or baseline is None or ours.steady is None or baseline.steady is None:
        return None
    latency = "mean_tpot_ms"
    return {
        "subject": ours.name,
        "baseline": baseline.name,
        "baseline_is": "the fastest other policy, in its better form of dispatch",
        "throughput_ratio": ours.throughput_tok_s / baseline.throughput_tok_s,
        "imbalance_ratio": ours.steady.imbalance_tokens / baseline.steady.imbalance_tokens,
        "energy_per_token_ratio": (
            ours.steady.energy_j_per_token / baseline.steady.energy_j_per_token
        ),
        "tpot_ratio": _milliseconds(ours, latency) / _milliseconds(baseline, latency),
    }


def _milliseconds(run: DemoRun, key: str) -> float:
    return cast(float, run.outcome.report[key])


def warnings(runs: Sequence[DemoRun]) -> list[str]:
    """Warnings about figures that are not reliable."""
    found = [f"{run.name}: {warning}" for run in runs for warning in _run_warnings(run)]
    run, baseline = subject(runs), best_baseline(runs)
    if run is None or baseline is None:
        return found
    # In a short window the policies may have admitted prompts of unlike lengths.
    ours, theirs = run.admitted_tokens, baseline.admitted_tokens
    if ours and theirs and abs(ours / theirs - 1) > UNLIKE:
        found.append(
            f"{run.name} admitted prompts of {ours:.0f} tokens in its window, {baseline.name} of "
            f"{theirs:.0f}: not like for like; more --seconds give longer windows"
        )
    return found


def _run_warnings(run: DemoRun) -> Iterator[str]:
    report = run.outcome.report
    if not run.outcome.complete:
        yield (
            f"{report['completed']} of {run.outcome.plan.requests} requests completed, "
            f"{report['failed']} failed, {report['lost']} lost"
        )
    if run.steady is None or run.steady.steps < ENOUGH_STEPS:
        steps = 0 if run.steady is None else run.steady.steps
        yield f"averages over {steps} steps only; give more --requests or --seconds"
    if run.steady is not None and run.steady.lateness_p99 > LATENESS_LIMIT:
        yield (
            "the machine could not keep up: 1 % of steps ended "
            f"{100 * run.steady.lateness_p99:.0f} % of a step late or more (limit "
            f"{100 * LATENESS_LIMIT:.0f} %); run it again when nothing else runs, or slower: "
            f"evenstep demo --time-scale {2 * run.outcome.plan.time_scale:g}"
        )


def demo_tables(runs: Sequence[DemoRun]) -> list[Table]:
    """Tables of the fleet's and of the clients' view, one row per run."""
    return [_table(runs, FLEET_COLUMNS), _table(runs, CLIENT_COLUMNS)]


def _table(runs: Sequence[DemoRun], columns: Columns) -> Table:
    baseline = best_baseline(runs)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("policy and\ndispatch", no_wrap=True)
    for title in columns:
        table.add_column(title, justify="right", no_wrap=True)
    for run in runs:
        style = "bold" if run is subject(runs) else "cyan" if run is baseline else None
        cells = (number(cell(run), 3) for cell in columns.values())
        table.add_row(run.name.replace("-", " "), *cells, style=style)
    return table


def _of_steps(name: str, unit: float = 1.0) -> Callable[[DemoRun], object]:
    return lambda run: None if run.steady is None else getattr(run.steady, name) / unit


def _of_report(key: str, part: str | None = None) -> Callable[[DemoRun], object]:
    def cell(run: DemoRun) -> object:
        report = run.outcome.report
        window = report if part is None else cast(Report | None, report[part])
        return None if window is None else window[key]

    return cell


FLEET_COLUMNS: Columns = {
    "tok/s\n(steps)": _of_steps("throughput_tok_s"),
    "imbal.\n1e4 tok": _of_steps("imbalance_tokens", 1e4),
    "idle %\n(model)": _of_steps("idle_share", 0.01),
    "energy\nJ/tok": _of_steps("energy_j_per_token"),
    "load\ntokens": _of_steps("mean_load_tokens"),
    "prompt\ntokens": _of_report("mean_admitted_prompt_tokens", "steady"),
    "late %\np99": _of_steps("lateness_p99", 0.01),
}
CLIENT_COLUMNS: Columns = {
    "tok/s\nsteady": _of_report("output_throughput", "steady"),
    "tok/s\nwhole": _of_report("output_throughput"),
    "TPOT\nms": _of_report("mean_tpot_ms"),
    "TTFT\nms": _of_report("mean_ttft_ms"),
    "TTFT\np99 ms": _of_report("p99_ttft_ms"),
    "\nerrors": _of_report("failed"),
    "\nlost": _of_report("lost"),
}
