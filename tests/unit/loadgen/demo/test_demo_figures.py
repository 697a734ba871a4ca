"""The demo's figures, budget and report, from records and reports made by hand."""

import dataclasses
import json
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from loadgen.demo.budget import LEAST_S, TimeLeft, Trial, calibrate, least_late
from loadgen.demo.conversations import TURNS, write_conversations
from loadgen.demo.demo_report import NO_BAR, demo_table, summary, verdict, warnings
from loadgen.demo.figures import LATENESS_LIMIT, steady_steps, step_figures
from loadgen.demo.run import Fleet, Outcome, RunPlan
from loadgen.demo.worlds import (
    DECODE,
    ENOUGH_STEPS,
    PROMPTS,
    TOO_LATE,
    DemoRun,
    World,
    best_baseline,
    subject,
)
from loadgen.emulator.record import StepRecord
from loadgen.replay.replay_results import RequestResult, Run, Window, summarize
from loadgen.traces.trace import load_trace
from loadgen.traces.trace_files import BLOCK_TOKENS
from router.core.types import Dispatch

FLEET = Fleet(workers=2, slots=4, step_time="0.01,0.001")
WORLD = dataclasses.replace(DECODE, fleet=FLEET)


def step(number: int, late: float = 0.01, loads: tuple[int, int] = (30, 10)) -> StepRecord:
    """A step that ends ``number`` wall seconds after 1000."""
    return StepRecord(
        time_s=1000.0 + number,
        stepped="all",
        step=number,
        step_s=0.04,
        lateness=late,
        load_tokens=loads,
        running=(3, 1),
        waiting=(0, 0),
        power_w=(400.0, 200.0),
    )


STEPS = tuple(map(step, range(1, 11)))
STEADY = Window(2.5, 8.5)


def outcome(
    policy: str = "bfio",
    dispatch: Dispatch = Dispatch.POOL,
    steps: tuple[StepRecord, ...] = STEPS,
    tokens: int = 10,
    steady: Window | None = STEADY,
    failed: bool = False,
    interrupted: bool = False,
) -> Outcome:
    plan = RunPlan(policy, dispatch, requests=1, cap_tokens=9, seed=0, time_scale=2.0)
    error = "HTTP 500: oops" if failed or interrupted else None
    result = RequestResult(7, tokens, 0.0, 0.0, 1.0, 10.0, error=error)
    run = Run([result], 1, 1 + interrupted, Window(0.0, 10.0), steady, interrupted, 1000.0)
    report = summarize(run, {}, 2.0, {}) | {"cluster": None}
    return Outcome(plan, report, steps, Path(f"{plan.name}.csv.gz"))


def test_fleet_counts() -> None:
    assert FLEET.concurrency == 2 * 4 + 64
    assert Fleet(workers=8).ports == 8 + 1 + 16 + 1


def test_step_figures() -> None:
    found = step_figures([step(1), step(2, late=0.03, loads=(40, 40))], FLEET)
    assert found is not None
    assert found.steps == 2
    assert found.step_mean_s == pytest.approx(0.04)
    assert found.imbalance_tokens == 10
    assert found.mean_load_tokens == 30
    assert found.max_load_tokens == 35
    assert found.idle_share == pytest.approx(0.001 * 20 / (2 * 0.08))
    assert found.slots_used == 0.5
    assert found.throughput_tok_s == pytest.approx(100)
    assert found.energy_j == pytest.approx(600 * 0.08)
    assert found.energy_j_per_token == pytest.approx(6)
    assert found.lateness_p50 == pytest.approx(0.02)
    assert step_figures([], FLEET) is None


def test_steady_steps_are_those_of_the_clients_window() -> None:
    assert [row.step for row in steady_steps(outcome())] == [3, 4, 5, 6, 7, 8]
    assert steady_steps(outcome(steady=None)) == []


def trials(*lateness: float) -> list[Trial]:
    """Calibrate on a machine that is this late in turn."""
    left = list(lateness)

    def execute(plan: RunPlan) -> Outcome:
        steps = tuple(step(number, late=left[0]) for number in range(1, 11))
        left.pop(0)
        return dataclasses.replace(outcome(steps=steps), plan=plan)

    found = calibrate(execute, outcome().plan, FLEET)
    assert not left
    return found


def test_a_machine_in_time_is_tried_once() -> None:
    (trial,) = trials(0.05)
    assert trial.scale_needed == trial.time_scale == 2.0
    assert trial.step_s == pytest.approx(0.04)


def test_one_hiccup_does_not_slow_a_machine_down() -> None:
    assert least_late(trials(0.3, 0.05)).scale_needed == 2.0


def test_a_late_machine_gets_more_time() -> None:
    assert least_late(trials(0.4, 0.3)).scale_needed == 8.4
    assert least_late(trials(2.5, 9.0)).scale_needed == 32.0


TRIAL = Trial(2.0, 0.0, throughput_tok_s=30_000, step_s=0.005)


def test_no_time_scale_with_which_runs_take_too_long() -> None:
    slow, work = dataclasses.replace(TRIAL, lateness_p99=0.5), (5000, 50.0, 400)
    assert TRIAL.scale_of(*work, 95.0) == TRIAL.scale_needed == 2.0
    assert slow.scale_of(*work, 995.0) == slow.scale_needed == 14.0
    # 5,000 requests take 5000 * 50 / 30000 * 1.25 engine seconds, and the wait for the longest 2.
    affordable = slow.scale_of(*work, 50.0)
    assert affordable == pytest.approx(50 / (5000 * 50 / 30_000 * 1.25 + 2), abs=0.05)
    assert slow.scale_of(*work, 20.0) == TRIAL.time_scale == 2.0


def test_runs_share_the_time_that_is_left() -> None:
    now_s, allowed = 100.0, []
    left = TimeLeft(now_s + 60, runs=3, clock=lambda: now_s)

    def run(most_s: float) -> Outcome:
        """It replays for 10 seconds, and takes 14."""
        nonlocal now_s
        allowed.append(most_s)
        now_s += 14
        return outcome()

    for runs in (3, 2, 1):
        left.runs = runs
        left.execute(run, shares=2)
    left.runs = 2
    left.execute(run, shares=0.5)
    # Two of three shares of 60 s; 46 - 2 * 4 s are both of two; 32 - 4 s are all; none is left.
    assert allowed == [40, 38, 28, LEAST_S]
    assert left.seconds < 0


MANY = tuple(step(number) for number in range(1, 2 * ENOUGH_STEPS + 1))
LONG = Window(0.0, float(len(MANY)))


def faster(share: float) -> tuple[StepRecord, ...]:
    """Even steps that take this share of their time."""
    return tuple(
        dataclasses.replace(each, step_s=each.step_s * share, load_tokens=(20, 20)) for each in MANY
    )


def demo_run(
    policy: str = "bfio",
    dispatch: Dispatch = Dispatch.POOL,
    steps: tuple[StepRecord, ...] = MANY,
    steady: Window | None = LONG,
    **ended: bool,
) -> DemoRun:
    return DemoRun.of(outcome(policy, dispatch, steps, steady=steady, **ended), FLEET)


HALF = len(MANY) // 2
RUNS = [
    demo_run("jsq"),
    demo_run("jsq", Dispatch.INSTANT, steps=MANY[:HALF] + faster(0.9)[HALF:]),
    demo_run(steps=faster(0.8)),
]


def test_the_best_other_run_is_the_baseline() -> None:
    baseline, ours = best_baseline(WORLD, RUNS), subject(RUNS)
    assert baseline is RUNS[1]
    assert ours is RUNS[2]
    assert best_baseline(WORLD, RUNS[2:]) is subject(RUNS[:2]) is None


def test_summary() -> None:
    found = json.loads(json.dumps(summary(WORLD, RUNS, trials(0.05), {"seed": 0})))
    assert found["emulated"] is True
    assert "not a GPU's gain" in found["statement"]
    assert found["conditions"]["seed"] == 0
    assert found["origin"]["physics"] == RUNS[0].outcome.engines
    assert [run["complete"] for run in found["runs"]] == [True] * 3
    comparison = found["comparison"]
    assert comparison["baseline"] == "jsq-instant"
    assert comparison["throughput_ratio"] == pytest.approx(0.95 / 0.8)
    assert comparison["imbalance_ratio"] == 0
    assert [run["not_measured"] for run in found["runs"]] == [None] * 3
    assert found["warnings"] == []
    assert found["verdict"] == NO_BAR


def test_a_run_without_a_good_average_is_not_measured() -> None:
    few = demo_run("jsq", steady=Window(0.0, ENOUGH_STEPS - 1))
    late = demo_run(steps=tuple(dataclasses.replace(each, lateness=2 * TOO_LATE) for each in MANY))
    told = [
        (RUNS[2], None),
        (few, f"averages over {ENOUGH_STEPS - 1} steps only; give more --requests"),
        (demo_run("jsq", steady=None), "averages over 0 steps only; give more --requests"),
        (late, "half of the steps ended 30 % of a step late"),
        (demo_run("jsq", failed=True), "0 of 1 requests completed, 1 failed, 0 lost"),
        (
            demo_run("jsq", interrupted=True),
            "0 of 1 requests completed, 1 failed, 1 lost when the time was over: "
            "give more --seconds",
        ),
    ]
    for run, reason in told:
        assert run.unmeasured == reason
        found = summary(WORLD, [*RUNS, run], [], {})
        assert (found["comparison"] is None) is (reason is not None)
        if reason:
            assert found["verdict"] == f"not measured: {run.name}: {reason}"
            assert f"{run.name}: not measured: {reason}" in warnings(WORLD, [run])


@pytest.mark.parametrize(
    ("throughput", "imbalance", "said"),
    [
        (1.18, 0.1, "met"),
        (1.19, 0.1, "missed by throughput"),
        (1.18, -0.1, "missed by imbalance"),
        (1.19, -0.1, "missed by throughput and imbalance"),
    ],
)
def test_the_bar(throughput: float, imbalance: float, said: str) -> None:
    """The ratios are 1.1875 and 0."""
    bars = {"throughput": throughput, "imbalance": imbalance}
    world = dataclasses.replace(WORLD, requests=1, bars=bars)
    bar = f"throughput x {throughput:g} at the least and imbalance x {imbalance:g} at the most"
    assert verdict(world, RUNS) == f"{said}: {bar}"
    assert verdict(world, RUNS[2:]) == "not measured: it takes bfio and another policy"
    assert verdict(dataclasses.replace(world, requests=2), RUNS) == NO_BAR


def test_warnings() -> None:
    many = tuple(map(step, range(1, 301)))
    late = tuple(
        dataclasses.replace(each, lateness=2 * LATENESS_LIMIT) if each.step % 50 == 0 else each
        for each in many
    )
    window = Window(0.0, 300.0)

    def found(**changes: Any) -> list[str]:
        return warnings(WORLD, [DemoRun.of(outcome(**changes), FLEET)])

    assert found(steps=many, steady=window) == []
    (failed,) = found(steps=many, steady=window, failed=True)
    assert failed == "bfio-pool: not measured: 0 of 1 requests completed, 1 failed, 0 lost"
    (could_not,) = found(steps=late, steady=window)
    assert "could not keep up: 1 % of steps ended 20 % of a step late" in could_not
    assert could_not.endswith(f"evenstep demo --worlds {WORLD.name} --time-scale 4")
    (short,) = found(steady=None)
    assert "averages over 0 steps only" in short


@pytest.mark.parametrize(("tokens", "said"), [(102.0, False), (104.0, True), (96.0, True)])
def test_windows_of_unlike_work_are_told_apart(tokens: float, said: bool) -> None:
    steps = tuple(map(step, range(1, 301)))

    def run(policy: str, admitted: float) -> DemoRun:
        found = outcome(policy, steps=steps, steady=Window(0.0, 300.0))
        steady = cast(dict[str, object], found.report["steady"])
        report = {
            **found.report,
            "steady": {**steady, "mean_admitted_prompt_tokens": admitted},
        }
        return DemoRun.of(dataclasses.replace(found, report=report), FLEET)

    told = warnings(WORLD, [run("jsq", 100.0), run("bfio", tokens)])
    assert [warning.endswith("longer windows") for warning in told] == [True] * said


def test_no_comparison_without_both_sides() -> None:
    assert summary(WORLD, RUNS[2:], [], {})["comparison"] is None


@pytest.mark.parametrize("world", [DECODE, PROMPTS])
def test_tables_fit_a_terminal(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(width=80)
    short = DemoRun.of(outcome("least_tokens", Dispatch.INSTANT, steady=None), FLEET)
    console.print(demo_table(world, [*RUNS, short]))
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert printed.count("least_tokens") == 1
    assert max(map(len, printed.splitlines())) <= 80


def test_with_prompts_the_soonest_first_tokens_are_the_baseline() -> None:
    def run(policy: str, ttft_ms: float) -> DemoRun:
        found = outcome(policy, steps=MANY, steady=LONG)
        report = {**found.report, "mean_ttft_ms": ttft_ms, "mean_tpot_ms": 40.0}
        return DemoRun.of(dataclasses.replace(found, report=report), FLEET)

    runs = [run("least_tokens", 900.0), run("least_prefill", 400.0), run("bfio", 300.0)]
    found = cast(dict[str, object], summary(PROMPTS, runs, [], {})["comparison"])
    assert found["baseline"] == "least_prefill-pool"
    assert found["ttft_ratio"] == pytest.approx(0.75)
    assert found["tpot_ratio"] == 1


def test_conversations_repeat_their_prompts(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one", "again", "fewer")]
    for path, requests in zip(paths, (60, 60, 57), strict=True):
        write_conversations(path, requests, seed=3)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert len(load_trace(paths[2]).requests) == 57
    rows = load_trace(paths[0]).requests
    known: set[int] = set()
    found = []
    for row in rows:
        full = row.prompt_tokens // BLOCK_TOKENS
        assert len(row.blocks) == full + 1
        found.append(sum(id_ in known for id_ in row.blocks))
        known.update(row.blocks[:full])
    # But for the first of each system prompt all find that one, and later turns find more.
    assert found.count(0) == 4
    assert sum(blocks > 8 for blocks in found) > len(rows) * (TURNS - 1) / TURNS / 2
