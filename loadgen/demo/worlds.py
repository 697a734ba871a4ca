"""The demo's two worlds: what runs in each, which figures are shown, and what is drawn."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from loadgen.demo.conversations import write_conversations
from loadgen.demo.figures import StepFigures, steady_steps, step_figures
from loadgen.demo.run import STARVATION_S, Fleet, Outcome
from loadgen.report.load_pictures import Panel, draw_bars, draw_loads, draw_power
from loadgen.simulator.decode.decode_config import SERVE

Columns = Mapping[str, "Callable[[DemoRun], Any]"]

SUBJECT = "bfio"
# About the duration of a request of the cap's length; averages over fewer steps mean little.
ENOUGH_STEPS = 200
# Median lateness of a step from which on a router decides too late for what it is compared by.
TOO_LATE = 0.15


@dataclass(frozen=True, slots=True)
class DemoRun:
    """A run with its figures, of the steady window (None: the run is too short) and of all."""

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
    def unmeasured(self) -> str | None:
        """Why its averages mean nothing; None where they are good for comparison."""
        report, steady = self.outcome.report, self.steady
        if not self.outcome.complete:
            return (
                f"{report['completed']} of {self.outcome.plan.requests} requests completed, "
                f"{report['failed']} failed, {report['lost']} lost"
                + (" when the time was over: give more --seconds" if report["interrupted"] else "")
            )
        if steady is None or steady.steps < ENOUGH_STEPS:
            steps = 0 if steady is None else steady.steps
            return f"averages over {steps} steps only; give more --requests"
        if steady.lateness_p50 > TOO_LATE:
            return f"half of the steps ended {100 * steady.lateness_p50:.0f} % of a step late"
        return None

    @property
    def throughput_tok_s(self) -> float:
        """By the fleet's record, which a late machine does not distort."""
        figures = self.steady or self.whole
        return 0.0 if figures is None else figures.throughput_tok_s

    @property
    def admitted_tokens(self) -> float | None:
        """Mean prompt length in the steady window."""
        window = self.outcome.report.get("steady")
        return window and window["mean_admitted_prompt_tokens"]


@dataclass(frozen=True, slots=True)
class World:
    """One setting in which policies run side by side."""

    name: str
    title: str
    statement: str
    fleet: Fleet
    policies: str  # what runs by default; BF-IO last
    columns: Columns
    legend: str  # what the columns mean, and what to take from them
    notes: Sequence[str]
    # Of a run, to find the best baseline; ``baseline_is``: the same in words.
    worth: Callable[[DemoRun], float]
    baseline_is: str
    ratios: Columns  # figures of which BF-IO's are compared with the baseline's
    # Pictures of the runs into a folder; their paths.
    draw: "Callable[[Path, World, Sequence[DemoRun]], list[Path]]"
    # requests, time_scale: of a run; no scale: what this machine needs.
    requests: int
    time_scale: float | None = None
    # Of a run by default and seed 0, what BF-IO's ratios are held to (tests/data/demo/bar.json).
    bars: Mapping[str, float] = field(default_factory=dict)
    # To a path, so many requests by a seed; None: a bundled trace.
    write_trace: Callable[[Path, int, int], None] | None = None
    plan: Mapping[str, Any] = field(default_factory=dict)  # further fields of ``RunPlan``


def best_baseline(world: World, runs: Sequence[DemoRun]) -> DemoRun | None:
    """The best run of a policy other than BF-IO."""
    others = [run for run in runs if run.outcome.plan.policy != SUBJECT]
    return max(others, key=world.worth, default=None)


def subject(runs: Sequence[DemoRun]) -> DemoRun | None:
    """The run of BF-IO."""
    return next((run for run in runs if run.outcome.plan.policy == SUBJECT), None)


def _fleet(world: World) -> str:
    return f"emulated: {world.fleet.workers} workers x {world.fleet.slots} slots"


def _draw_loads(folder: Path, world: World, runs: Sequence[DemoRun]) -> list[Path]:
    """Loads and power of the best baseline beside BF-IO."""
    chosen = [run for run in (best_baseline(world, runs), subject(runs)) if run is not None]
    panels = []
    for run in chosen:
        plan, average, steady = run.outcome.plan, "averages not measured", None
        steps = [row.step for row in steady_steps(run.outcome)]
        if run.steady is not None and run.unmeasured is None:
            average = f"average imbalance {run.steady.imbalance_tokens / 1e4:.2f}e4 tokens"
            steady = steps[0], steps[-1]
        name = f"{plan.policy}, {plan.dispatch.value} dispatch"
        panels.append(Panel(name, average, run.outcome.record, steady))
    caption = (
        f"{_fleet(world)}, step time C + t_l * max load of the BF-IO paper, BurstGPT "
        f"lengths, time scale {runs[0].outcome.plan.time_scale:g}"
    )
    paths = [folder / "loads.png", folder / "power.png"]
    shaded = "one line per worker; shaded: the window of the averages"
    draw_loads(paths[0], panels, f"{caption}\n{shaded}")
    draw_power(paths[1], panels, caption)
    return paths


def _draw_columns(folder: Path, world: World, runs: Sequence[DemoRun]) -> list[Path]:
    """Every column but the last, of all runs."""
    plan = runs[0].outcome.plan
    caption = (
        f"{_fleet(world)}, step time C + max (t_l L + t_p P), {plan.requests:,} "
        f"turns of conversations, time scale {plan.time_scale:g}"
    )
    figures = {
        title: [0.0 if run.unmeasured else figure(run) or 0.0 for run in runs]
        for title, figure in list(world.columns.items())[:-1]
    }
    path = folder / f"{world.name}.png"
    draw_bars(path, [run.outcome.plan.policy for run in runs], figures, caption)
    return [path]


def _of_steps(name: str, unit: float = 1.0) -> Callable[[DemoRun], object]:
    return lambda run: None if run.steady is None else getattr(run.steady, name) / unit


def _of_report(key: str, unit: float = 1.0) -> Callable[[DemoRun], object]:
    def cell(run: DemoRun) -> object:
        value = run.outcome.report[key]
        return value / unit if isinstance(value, float) else value

    return cell


def _waited_percent(run: DemoRun) -> object:
    """Of the ranks' time in steps, as the engines timed it."""
    cluster = run.outcome.report["cluster"]
    share = cluster and cluster["whole"]["idle_share"]
    return None if share is None else 100 * share


def _unanswered(run: DemoRun) -> object:
    return run.outcome.report["failed"] + run.outcome.report["lost"]


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
    draw=_draw_loads,
    requests=4000,
    bars={"throughput": 1.01, "imbalance": 0.7},
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
    worth=lambda run: -(run.outcome.report["mean_ttft_ms"] or math.inf),
    baseline_is="the other policy with the soonest first tokens",
    ratios={"ttft": _of_report("mean_ttft_ms"), "tpot": _of_report("mean_tpot_ms")},
    draw=_draw_columns,
    requests=600,
    time_scale=0.5,
    write_trace=write_conversations,
    plan={"arrivals": "trace", "starvation_s": SERVE["starvation_s"], "warmup": 0.0},
)
WORLDS = {world.name: world for world in (DECODE, PROMPTS)}
