"""``evenstep diagnose`` on emulated clusters of four kinds, through the router's admin port."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.diagnosed import (
    Emulated,
    diagnose,
    diagnosed,
    listen,
    made_conversations,
    observed,
    under_load,
)
from tests.support.fleet import running_fleet, worker_flags
from tests.support.replays import run_replay
from tests.support.server import running_router

# Slow enough for a busy machine: a late router balances worse than the simulated one.
CLUSTER = Emulated(time_scale=3.0, warm_steps=160)
SECONDS, FEWER = 15.0, 10.0
FEW = ("--policies", "jsq,bfio")


def test_an_uneven_cluster_and_an_even_one_after_the_switch(tmp_path: Path) -> None:
    before = tmp_path / "before.json"
    with running_fleet(tmp_path, *CLUSTER.fleet_flags()) as fleet:
        uneven = ("--policy", "round_robin", "--dispatch", "instant")
        with under_load(tmp_path, fleet, CLUSTER, *uneven) as admin:
            first, said = listen(tmp_path, admin, CLUSTER, SECONDS, *FEW)
        before.write_text(json.dumps(first))
        with under_load(tmp_path, fleet, CLUSTER, "--policy", "bfio") as admin:
            flags = ("--before", str(before), *FEW)
            second, then = listen(tmp_path, admin, CLUSTER, SECONDS, *flags)
    changes = second["comparison"]["changes"]

    assert first["verdict"] == "balancing_pays"
    assert first["advice"] == {"policy": "bfio", "dispatch": "pool"}
    assert said.startswith("Balancing pays here.")
    assert second["verdict"] == "already_even"
    assert "After the switch from round_robin to bfio, pool:" in then
    assert second["waiting"]["idle_share"] < first["waiting"]["idle_share"] / 2
    for figure in ("idle_share", "imbalance_tokens"):
        assert abs(changes[figure]["gain_error"]) < 0.2, changes


def test_conversations_on_workers_that_compute_prompts(tmp_path: Path) -> None:
    trace, file = made_conversations(tmp_path, rounds=3), tmp_path / "run.jsonl"
    cluster = Emulated(
        step_time="2e-3,2e-7,0,2e-5", flags=("--batch-tokens", "2048", "--kv-tokens", "400000")
    )
    record = ("--policy", "least_tokens", "--record", str(file))
    with (
        running_fleet(tmp_path, *cluster.fleet_flags()) as fleet,
        running_router(tmp_path, *worker_flags(fleet), *record) as router,
    ):
        flags = ("--trace", str(trace), "--arrivals", "closed:48", "--time-scale", "2")
        assert run_replay(router.url, tmp_path / "replay.json", *flags)["completed"] == 432
    flags = ("--recording", str(file), "--time-scale", "2", "--policies", "prefix_score")
    report, said = diagnose(tmp_path, *flags)
    found = {row["policy"]: row["caching"]["cached_share"] for row in report["policies"]}

    assert report["caches"]["block_tokens"] == 64
    # In the emulated engines' caches are exactly the prompts of the trace.
    assert found["least_tokens"] == pytest.approx(report["caches"]["cached_share"], abs=0.05)
    assert found["prefix_score"] > 1.5 * found["least_tokens"]
    assert "least_tokens, pool (in force)" in " ".join(said.split())


@pytest.mark.slow
def test_a_cluster_that_somebody_else_balances(tmp_path: Path) -> None:
    with (
        running_fleet(tmp_path, *CLUSTER.fleet_flags()) as fleet,
        observed(tmp_path, fleet, CLUSTER) as admin,
    ):
        report, said = listen(tmp_path, admin, CLUSTER, FEWER, *FEW)

    assert report["verdict"] == "balancing_pays"
    assert report["conditions"]["source"] == "observe"
    assert report["simulation_error"] is None
    assert "Who balanced is not known: the baseline is what was measured." in " ".join(said.split())


@pytest.mark.slow
def test_workers_without_a_barrier(tmp_path: Path) -> None:
    alone = replace(CLUSTER, flags=("--no-barrier",))
    report, said = diagnosed(tmp_path, alone, FEWER, "--policy", "round_robin")

    assert report["verdict"] == "no_barrier"
    assert report["waiting"]["idle_share"] is None
    assert "there is no barrier" in said


@pytest.mark.slow
def test_workers_that_lack_memory(tmp_path: Path) -> None:
    starved = replace(CLUSTER, flags=("--kv-tokens", "9000"))
    report, said = diagnosed(tmp_path, starved, FEWER, "--policy", "round_robin")

    assert report["verdict"] == "kv_starved"
    assert report["memory"]["used_max"] > 0.9
    assert "KV memory is what is short here" in said
