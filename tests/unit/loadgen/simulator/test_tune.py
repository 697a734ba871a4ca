"""The search for the best parameters."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from loadgen.simulator.decode.decode_config import PAPER, DecodeConfig
from loadgen.simulator.decode.length_sources import LawLengths
from loadgen.simulator.decode.oracle import Knowledge
from loadgen.simulator.tune.tune_command import advice, report, tune_config
from loadgen.simulator.tune.tune_search import Search, Setting, Trial, coarse, near

RULE = Setting(0, 1.0, 0.1, 80.0)
CONFIG = DecodeConfig(
    policy="bfio",
    lengths=LawLengths.parse("geometric:300,20"),
    workers=2,
    slots=4,
    pool=8,
    steps=60,
    warmup=15,
    **PAPER,
)


def bowl(target: Setting) -> Any:
    """Imbalance grows with the distance from a target, by factors, and by seed."""

    def measure(setting: Setting | None, seed: int) -> Trial:
        used = RULE if setting is None else setting
        if used.lead_tokens is None:
            used = replace(used, lead_tokens=80.0)
        distance = abs(math.log(used.tie_weight / target.tie_weight))
        distance += abs(math.log((used.horizon + 1) / (target.horizon + 1)))
        distance += abs(used.discount - target.discount)
        assert used.lead_tokens is not None
        distance += abs(math.log(used.lead_tokens / (target.lead_tokens or 80.0)))
        return Trial(1000 * (1 + distance) + 10 * seed, 5000 / (1 + distance), used)

    return measure


def test_the_search_finds_the_bottom_of_a_bowl() -> None:
    target = Setting(20, 0.8, 3e-4, 40.0)
    told: list[str] = []
    tuned = Search(bowl(target), 3, True, told.append).run()
    assert (tuned.best.horizon, tuned.best.discount) == (20, 0.8)
    assert tuned.best.tie_weight == pytest.approx(3e-4, rel=0.2)
    assert tuned.best.lead_tokens == 40
    assert any(line.startswith("refinement 1") for line in told)


def test_the_comparison_is_on_seeds_that_the_search_has_not_seen() -> None:
    seen: list[int] = []

    def measure(setting: Setting | None, seed: int) -> Trial:
        seen.append(seed)
        trial: Trial = bowl(RULE)(setting, seed)
        return trial

    tuned = Search(measure, 2, False).run()
    assert [trial.imbalance_tokens for trial in tuned.rule_trials] == [1020, 1030]
    assert seen[-4:] == [2, 3, 2, 3]
    assert set(seen[:-4]) == {0, 1}


def test_without_foresight_only_the_coming_step_counts() -> None:
    assert {setting.horizon for setting in coarse(False)} == {0}
    assert {setting.horizon for setting in near(Setting(0, 1.0, 0.1), 80.0)} == {0}


def test_neighbours_differ_in_one_thing_and_are_valid() -> None:
    start = Setting(20, 0.8, 1e-3)
    found = near(start, 80.0)
    assert start not in found
    assert len(set(found)) == len(found) == 8
    for setting in found:
        replace(CONFIG, horizon=setting.horizon, discount=setting.discount)
    assert all(setting.horizon >= 1 for setting in near(Setting(1, 0.5, 1e-3), 0.0))


def test_a_better_setting_is_advised_with_its_flags() -> None:
    tuned = Search(bowl(Setting(0, 1.0, 0.3)), 3, False).run()
    assert tuned.change
    assert tuned.difference("imbalance_tokens").mean == pytest.approx(
        1 / (1 + math.log(3)) - 1, abs=0.02
    )
    lines = advice(CONFIG, tuned)
    assert lines[-2:] == [
        "evenstep simulate decode --lookahead none --horizon 0 --discount 1 --tie-weight 0.3",
        "evenstep serve --lookahead none --horizon 0 --discount 1 --tie-weight 0.3",
    ]
    oracle = replace(CONFIG, knowledge=Knowledge.parse("oracle"))
    assert "no look-ahead like oracle" in advice(oracle, tuned)[-1]
    assert report(CONFIG, tuned)["flags"] == tuned.best.simulation_flags


def test_the_rule_stays_where_nothing_better_is_certain() -> None:
    tuned = Search(bowl(RULE), 3, False).run()
    assert not tuned.change
    assert "Keep the rule" in advice(CONFIG, tuned)[-1]
    assert report(CONFIG, tuned)["flags"] == ""


def test_a_workload_is_tuned_by_simulation() -> None:
    told: list[str] = []
    tuned = tune_config(CONFIG, 2, told.append)
    ends = {line.split(": ")[1] for line in told if line.startswith(("the best of", "refinement"))}
    finally_tried = {s: tokens for s, tokens in tuned.tried.items() if s.simulation_flags in ends}
    assert len(finally_tried) == len(ends) > 4
    assert tuned.best == min(finally_tried, key=finally_tried.__getitem__)
    assert tuned.rule_trials[0].used.horizon == 0
    assert told


def tune(*flags: str) -> subprocess.CompletedProcess[str]:
    small = ["--workers", "3", "--slots", "4", "--pool", "8", "--steps", "60", "--seeds", "2"]
    command = [sys.executable, "-m", "router.cli", "tune", *small, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_writes_json_and_tells_how_far_it_is() -> None:
    done = tune("--lengths", "geometric:100,8", "--json", "-")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["conditions"]["lengths"] == "geometric:100,8"
    assert set(found["difference"]) == {"imbalance", "throughput"}
    assert found["tried"][0]["imbalance_tokens"] <= found["tried"][-1]["imbalance_tokens"]
    assert "coarse grid 1/6" in done.stderr


def test_no_imbalance_at_all_is_no_difference() -> None:
    done = tune("--lengths", "constant:10,5", "--workers", "2", "--json", "-")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["rule"]["imbalance_tokens"] == found["best"]["imbalance_tokens"] == [0, 0]
    assert found["difference"]["imbalance"] == {"mean": 0, "half_width": 0}
    assert "Keep the rule" in done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--trace", "/nowhere.csv"], "/nowhere.csv"),
        (["--trace", "burstgpt", "--lengths", "geometric:9,9"], "give one of them"),
        (["--workers", "1"], "--workers"),
        (["--lookahead", "magic"], "--lookahead"),
        (["--seeds", "1"], "--seeds"),
        (["--warmup", "60"], "--warmup"),
        (["--workers", "1000000000", "--slots", "1000000000"], "--workers must be at most"),
    ],
)
def test_bad_input_is_exit_2(flags: list[str], message: str) -> None:
    done = tune(*flags)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
