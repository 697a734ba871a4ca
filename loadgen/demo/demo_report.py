"""The demo's two worlds, and their runs as a summary for files and as tables for the terminal."""

import math
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self, cast

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


@dataclass(frozen=True, slots=True)
class World:
    """One setting in which policies run side by side.

    Attributes:
        policies: what runs by default; BF-IO last.
        legend: what the columns mean, and what to take from them.
        notes: where figures come from.
        worth: of a run, to find the best baseline.
        baseline_is: the same in words.
        ratios: figures of which BF-IO's are compared with the baseline's.
        requests, time_scale: of a run; None: what this machine can do in the time.
    """

    name: str
    title: str
    statement: str
    fleet: Fleet
    policies: str
    columns: Columns
    legend: str
    notes: Sequence[str]
    worth: Callable[[DemoRun], float]
    baseline_is: str
    ratios: Columns
    requests: int | None = None
    time_scale: float | None = None


def best_baseline(world: World, runs: Sequence[DemoRun]) -> DemoRun | None:
    """The best run of a policy other than BF-IO."""
    others = [run for run in runs if run.outcome.plan.policy != SUBJECT]
    return max(others, key=world.worth, default=None)


def subject(runs: Sequence[DemoRun]) -> DemoRun | None:
    """The run of BF-IO."""
    return next((run for run in runs if run.outcome.plan.policy == SUBJECT), None)


def summary(
    world: World, runs: Sequence[DemoRun], trials: Sequence[Trial], conditions: Report
) -> Report:
    """All conditions and results as JSON-able values."""
    header = origin(Engines.EMULATED, CODE, runs[0].outcome.engines)
    return {
        "emulated": True,
        "statement": world.statement,
        "conditions": {**asdict(world.fleet), **conditions},
        "notes": list(world.notes),
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
        "comparison": _comparison(world, runs),
        "warnings": warnings(world, runs),
    }


def _comparison(world: World, runs: Sequence[DemoRun]) -> Report | None:
    ours, baseline = subject(runs), best_baseline(world, runs)
    if ours is None or baseline is None or ours.steady is None or baseline.steady is None:
        return None
    return {
        "subject": ours.name,
        "baseline": baseline.name,
        "baseline_is": world.baseline_is,
        **{
            f"{name}_ratio": cast(float, figure(ours)) / cast(float, figure(baseline))
            for name, figure in world.ratios.items()
        },
    }


def warnings(world: World, runs: Sequence[DemoRun]) -> list[str]:
    """Warnings about figures that are not reliable."""
    found = [f"{run.name}: {warning}" for run in runs for warning in _run_warnings(run)]
    run, baseline = subject(runs), best_baseline(world, runs)
    if run is None or baseline is None or world is PROMPTS:
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


def demo_table(world: World, runs: Sequence[DemoRun]) -> Table:
    """One row per run: BF-IO's bold, the best baseline's coloured."""
    baseline = best_baseline(world, runs)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("policy", no_wrap=True)
    for title in world.columns:
        table.add_column(title.replace(", ", "\n"), justify="right", no_wrap=True)
    for run in runs:
        style = "bold" if run is subject(runs) else "cyan" if run is baseline else None
        cells = (number(cell(run), 3) for cell in world.columns.values())
        table.add_row(run.outcome.plan.policy, *cells, style=style)
    return table


def _of_steps(name: str, unit: float = 1.0) -> Callable[[DemoRun], object]:
    return lambda run: None if run.steady is None else getattr(run.steady, name) / unit


def _of_report(key: str, unit: float = 1.0) -> Callable[[DemoRun], object]:
    def cell(run: DemoRun) -> object:
        value = run.outcome.report[key]
        return value / unit if isinstance(value, float) else value

    return cell


def _waited_percent(run: DemoRun) -> object:
    """Of the ranks' time in steps, as the engines timed it."""
    cluster = cast(Any, run.outcome.report["cluster"])
    share = cluster and cluster["whole"]["idle_share"]
    return None if share is None else 100 * share


def _unanswered(run: DemoRun) -> object:
    return cast(int, run.outcome.report["failed"]) + cast(int, run.outcome.report["lost"])


_EVENTS = (
    "An event carries 16 tokens (vLLM's own --stream-interval), so that HTTP does not crowd out "
    "the steps; the first token comes alone."
)
_LATENCY: Columns = {
    "TTFT mean, ms": _of_report("mean_ttft_ms"),
    "TTFT p99, ms": _of_report("p99_ttft_ms"),
    "TPOT, ms": _of_report("mean_tpot_ms"),
}
DECODE = World(
    name="decode",
    title="Decode only, as in the papers: prompts are computed elsewhere",
    statement="Emulated by the paper's step-time model: shows that it works, not a GPU's gain.",
    fleet=Fleet(),
    policies="jsq,least_tokens,bfio",
    columns={
        "output, tok/s": _of_steps("throughput_tok_s"),
        "imbalance, 1e4 tok": _of_steps("imbalance_tokens", 1e4),
        "idle, %": _of_steps("idle_share", 0.01),
        **_LATENCY,
        "energy, J/tok": _of_steps("energy_j_per_token"),
        "failed, ": _unanswered,
    },
    legend=(
        "8 workers step together; each step lasts as long as the worker with the most KV tokens "
        "needs. Imbalance: tokens by which the others hold less, all together. Idle: time that "
        "workers wait for the fullest. TTFT: time to the first token, TPOT: per further token. "
        "320 clients keep the fleet full; jsq (fewest requests) and least_tokens (fewest KV "
        "tokens) assign on arrival, bfio all waiting requests at once. Where slots are free and "
        "requests few, least_tokens is as good."
    ),
    notes=(
        _EVENTS,
        "Imbalance, idle share, loads and energy: from the fleet's record, in the steady window "
        "(from 30% of the requests completed until the last one was sent).",
        "The idle share is modelled: t_l * imbalance / (workers * step time).",
        "Throughput by steps: tokens of the steady window's steps over their engine seconds; the "
        "baseline is chosen and compared by it. All other throughput and latency: at the client, "
        "in wall seconds / time scale; latency counts from the sending, time in the pool included.",
        f"A request that has waited {STARVATION_S:g} engine seconds goes before all others.",
    ),
    worth=lambda run: run.throughput_tok_s,
    baseline_is="the fastest other policy",
    ratios={
        "throughput": lambda run: run.throughput_tok_s,
        "imbalance": _of_steps("imbalance_tokens"),
        "energy_per_token": _of_steps("energy_j_per_token"),
        "tpot": _of_report("mean_tpot_ms"),
    },
)
PROMPTS = World(
    name="prompts",
    title="Conversations with shared prefixes, on ranks that compute prompts and cache prefixes",
    statement="Emulated by a modelled step time: shows that it works, not a GPU's gain.",
    fleet=Fleet(
        slots=128,
        pool=0,
        step_time="5e-3,9.5e-8,0,5e-5",
        more=("--batch-tokens", "2048", "--time-waits"),
    ),
    policies="least_tokens,prefix_score,least_prefill,bfio",
    columns={
        **_LATENCY,
        "prefix hits, %": _of_report("cached_prompt_share", 0.01),
        "idle, %": _waited_percent,
        "failed, ": _unanswered,
    },
    legend=(
        "8 ranks step together; each step lasts as long as the rank with the most prompt and KV "
        "tokens needs. Prefix hits: prompt tokens that an engine had cached, by its own count. "
        "Idle: time that ranks wait for the slowest. least_tokens knows no caches; prefix_score "
        "(llm-d's weights), least_prefill (fewest prompt tokens to compute) and bfio do. bfio, "
        "the default, weighs prompts, caches and decoding by the learned cost of a step; where "
        "nobody waits it is the rule barrier_time."
    ),
    notes=(
        _EVENTS,
        "Conversations of 5 turns on 4 system prompts, at fixed times; from cold caches.",
        "TTFT and TPOT: of all requests, at the client, in wall seconds / time scale, from the "
        "time that a request was due. Prefix hits: by the engines' usage. Idle: as engines timed.",
    ),
    worth=lambda run: -cast(float, run.outcome.report["mean_ttft_ms"] or math.inf),
    baseline_is="the other policy with the soonest first tokens",
    ratios={"ttft": _of_report("mean_ttft_ms"), "tpot": _of_report("mean_tpot_ms")},
    requests=600,
    time_scale=0.5,
)
WORLDS = {world.name: world for world in (DECODE, PROMPTS)}
