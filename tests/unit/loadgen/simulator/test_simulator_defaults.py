"""``simulate decode`` starts from what ``serve`` does, and compares policies."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from loadgen.simulator.decode.barrier_decode import simulate
from loadgen.simulator.decode.decode_command import ARRIVALS, DecodeOptions
from loadgen.simulator.decode.decode_config import DecodeConfig
from loadgen.simulator.decode.length_sources import LawLengths
from loadgen.simulator.decode.policy_comparison import Comparison, comparison_table
from loadgen.traces.arrivals import Arrivals
from router.config.serve_settings import ServeSettings
from router.core.errors import ConfigError
from router.core.step_time import StepTime
from tests.conftest import Run

CONFIG = DecodeConfig(
    policy="bfio",
    lengths=LawLengths.parse("geometric:500,30"),
    workers=4,
    slots=8,
    pool=32,
    steps=400,
    warmup=100,
    step_time=StepTime(0.05, 1e-6),
)


def test_what_simulate_and_serve_both_have_is_the_same() -> None:
    serve, options = ServeSettings(), DecodeOptions()
    (config,) = options.configs()
    both = ("policy", "dispatch", "starvation_s", "overcommit", "seed")
    for name in (*both, "horizon", "discount", "tie_weight"):
        assert getattr(config, name) == getattr(serve, name), name
    assert str(config.knowledge) == serve.lookahead
    assert config.known_profile is None, "what requests cost is learned in both"
    assert config.patience == serve.starvation_s
    for arrivals in ("poisson:10", "trace"):
        (open_,) = replace(options, arrivals=arrivals).configs()
        assert open_.pool == serve.pool_size, arrivals


def test_a_deadline_in_seconds_bounds_the_wait_as_one_in_steps_does() -> None:
    endless = simulate(replace(CONFIG, deadline_steps=0))
    steps = simulate(replace(CONFIG, deadline_steps=40)).max_pool_wait_steps
    seconds = simulate(replace(CONFIG, starvation_s=40 * 0.055)).max_pool_wait_steps

    assert endless.max_pool_wait_steps > 150
    assert steps < 80
    assert seconds < 80
    assert endless.parameters["deadline_steps"] == 0


def test_a_deadline_in_seconds_is_not_one_in_steps() -> None:
    found = {}
    for name, config in (
        ("steps", replace(CONFIG, deadline_steps=40)),
        ("seconds", replace(CONFIG, starvation_s=40 * 0.055)),
        ("two steps", replace(CONFIG, deadline_steps=2)),
    ):
        found[name] = simulate(config).avg_imbalance_tokens
    assert found["seconds"] == pytest.approx(found["steps"], rel=0.1)
    assert found["two steps"] != pytest.approx(found["steps"], rel=0.1)


@pytest.mark.parametrize("starvation_s", [0.0, -1.0, 1e9, float("nan")])
def test_a_deadline_that_cannot_be_is_refused(starvation_s: float) -> None:
    with pytest.raises(ConfigError, match="--starvation-s must be above 0"):
        replace(CONFIG, starvation_s=starvation_s)


def test_overcommit_follows_the_bubble_as_it_does_live() -> None:
    none = simulate(replace(CONFIG, steps=900))
    delayed = simulate(replace(CONFIG, steps=900, dispatch_delay=3))

    assert none.parameters["overcommit"] == 0
    assert delayed.parameters["overcommit"] in (1, 2)
    fixed = simulate(replace(CONFIG, steps=900, dispatch_delay=3, overcommit=0))
    assert fixed.parameters["overcommit"] == 0
    assert delayed.slot_bubble_steps < fixed.slot_bubble_steps


def test_slots_that_stand_empty_while_nobody_waits_ask_for_no_overcommit() -> None:
    config = replace(CONFIG, arrivals=Arrivals.parse("poisson:4", ARRIVALS), pool=1024, steps=1500)
    assert simulate(config).parameters["overcommit"] == 0


def test_policies_are_compared_on_paired_seeds(evenstep: Run, tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    flags = "--workers 4 --slots 4 --pool 32 --steps 150 --warmup 30 --lengths geometric:900,40"

    code, out, _ = evenstep(
        *("simulate", "decode", "--policy", "jsq,bfio", "--seeds", "3", "--seed", "7"),
        *(*flags.split(), "--deadline-steps", "0", "--json", str(found)),
    )

    report = json.loads(found.read_text())
    assert code == 0
    assert (report["baseline"], report["seeds"]) == ("jsq", 3)
    runs = report["runs"]
    for policy in ("jsq", "bfio"):
        assert [run["parameters"]["seed"] for run in runs[policy]] == [7, 8, 9]
    pairs = zip(runs["bfio"], runs["jsq"], strict=True)
    ratios = [one["throughput_tok_s"] / other["throughput_tok_s"] - 1 for one, other in pairs]
    difference = report["differences"]["bfio"]["throughput_tok_s"]
    assert difference["mean"] == pytest.approx(sum(ratios) / 3)
    assert difference["half_width"] > 0
    assert "jsq" not in report["differences"]
    assert report["means"]["jsq"]["tpot_mean_s"]["mean"] > 0
    assert "bfio admitted shorter prompts than jsq" in report["notes"][0]
    assert "bfio admitted shorter prompts than jsq" in " ".join(out.split())


@pytest.mark.parametrize(
    ("policies", "difference"), [("bfio,jsq", "jsq +"), ("jsq,bfio", "bfio -")]
)
def test_whoever_admitted_shorter_prompts_is_named_in_either_order(
    policies: str, difference: str, evenstep: Run
) -> None:
    flags = "--workers 4 --slots 4 --pool 32 --steps 150 --warmup 30 --lengths geometric:900,40"
    _, out, _ = evenstep(
        *("simulate", "decode", "--policy", policies, *flags.split(), "--deadline-steps", "0")
    )

    said = " ".join(out.split())
    assert f"bfio admitted shorter prompts than jsq ({difference}" in said
    assert "dispatch; seed 0 " in said
    assert "interval" not in said


def test_nothing_is_said_of_prompts_that_are_as_long() -> None:
    run = simulate(CONFIG)
    comparison = Comparison({"one": [run], "other": [run]})

    assert comparison.notes() == []
    assert comparison.difference("other", "decision_ms_p50") is None
    assert comparison.mean("other", "decision_ms_p50") is None


def test_a_difference_that_all_seeds_show_alike_has_no_width_however_far_they_lie_apart() -> None:
    config = replace(CONFIG, steps=60, warmup=10)
    one = [simulate(replace(config, seed=seed)) for seed in range(3)]
    other = [replace(run, tpot_mean_s=(run.tpot_mean_s or 0.0) * 1.02) for run in one]
    comparison = Comparison({"one": one, "other": other})

    difference = comparison.difference("other", "tpot_mean_s")
    assert difference is not None
    assert difference.mean == pytest.approx(0.02)
    assert difference.half_width == pytest.approx(0, abs=1e-12)

    console = Console(width=200, record=True, file=io.StringIO())
    console.print(comparison_table(comparison))
    (row,) = [line for line in console.export_text().splitlines() if line.startswith("TPOT, ms")]
    mean = comparison.mean("one", "tpot_mean_s")
    assert mean is not None
    assert mean.half_width is not None
    shown = " ".join(
        f"{factor * mean.mean:.4g} ± {factor * mean.half_width:.2g}" for factor in (1e3, 1.02e3)
    )
    assert " ".join(row.split()) == f"TPOT, ms {shown} +2.0% ± 0.0%"


def test_a_policy_is_given_once() -> None:
    with pytest.raises(ConfigError, match="give each policy once"):
        DecodeOptions(policy="jsq,jsq").configs()
