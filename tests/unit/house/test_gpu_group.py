"""What a node of GPUs is asked for, and what is made of its rounds and its ranks' power."""

import json
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import pytest

from router.core.types import Snapshot
from tests.gpu.barrier import ALL, LONG, REST, SHORT, Holding, _held, _watts, power_figures
from tests.gpu.group import BALANCER, MEDIANS, WAYS, energy_j, figures, ranks, whole_rounds
from tests.gpu.parts import Budget
from tests.gpu.serving import Engine, Machine, engine_environment, gpus_there
from tests.support.rank_steps import SnapshotLog


def machine(tmp_path: Path, **more: Any) -> Machine:
    return Machine(Path("/python"), "qwen3-30b-a3b", False, (), tmp_path, "5f1e", **more)


def test_a_group_is_one_server_with_its_experts_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = machine(tmp_path, ranks=8)
    flags = where.group_flags(6017)
    assert flags[:3] == ("--data-parallel-size", "8", "--enable-expert-parallel")
    assert flags[-2:] == ("--data-parallel-rpc-port", "6017")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert engine_environment(where)["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"
    command = where.command(flags)
    assert "--load-format" in command
    shape = json.loads((tmp_path / "qwen3-30b-a3b" / "config.json").read_text())
    assert (shape["model_type"], shape["num_experts"]) == ("qwen3_moe", 128)
    assert machine(tmp_path).group_flags(6017) == ()


def test_real_weights_take_the_place_of_the_shape(tmp_path: Path) -> None:
    where = machine(tmp_path, weights="/models/moe")
    command = where.command(())
    assert "/models/moe" in command
    assert "--load-format" not in command
    assert list(tmp_path.iterdir()) == []
    assert where.settings.items() >= {"shape": None, "weights": "/models/moe"}.items()


@pytest.mark.parametrize(
    ("visible", "there"), [(None, 3), ("", 3), ("0,2", 2), ("0,1,2,3", 3), ("1", 1)]
)
def test_the_gpus_are_those_that_engines_see(
    visible: str | None, there: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = tmp_path / "nvidia-smi"
    lines = "GPU 0: H200\\n  MIG 1g.18gb\\nGPU 1: H200\\nGPU 2: H200\\n"
    listing.write_text(f"#!/bin/sh\nprintf '{lines}'\n")
    listing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus_there() == there


def test_each_rank_has_a_stream_of_its_own() -> None:
    group = Engine(None, "tcp://127.0.0.1:6001", 3)  # type: ignore[arg-type]
    assert group.endpoints == [f"tcp://127.0.0.1:{port}" for port in (6001, 6003, 6005)]


@pytest.mark.parametrize("text", ["1", "0", "-2", "two"])
def test_one_rank_is_no_group(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="should be 2 or more"):
        ranks(text)


def test_a_round_begins_only_if_the_last_one_would_still_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [0.0]
    monkeypatch.setattr("tests.gpu.group.time.monotonic", lambda: now_s[0])
    budget = Budget(40 + 25, {"all": 1.0}, lambda: now_s[0])
    begun = []
    for number in whole_rounds(budget, ["1", "2", "3"]):
        begun.append(number)
        now_s[0] += 10.0
    assert begun == ["1", "2"]


# --- figures --------------------------------------------------------------------------------------


def load(step_s: float, *power_w: float | None) -> dict[str, Any]:
    return {"step_s": step_s, "power_w": list(power_w)}


def test_what_a_waiting_gpu_draws_is_what_a_longer_step_adds() -> None:
    # 300 W for 10 ms of work, then 200 W for 5 ms of waiting.
    found = power_figures(
        {
            REST: {"power_w": [80.0, 90.0]},
            SHORT: load(0.010, 320.0, 300.0, 300.0),
            LONG: load(0.015, 500.0, 260.0, 4000 / 15),
            ALL: load(0.015, 500.0, 520.0, 540.0),
        }
    )
    assert found["idle_w"] == 85.0
    assert found["busy_alone_w"] == 500.0
    assert found["busy_together_w"] == 520.0
    assert found["step_longer_by"] == pytest.approx(1.5)
    waits_w = (260 + 4000 / 15) / 2
    assert found["waiting_w"] == pytest.approx((waits_w * 15 - 300 * 10) / 5)


def test_what_nobody_can_tell_is_unknown() -> None:
    short, long = load(0.010, 320.0, 300.0), load(0.0104, 330.0, 290.0)
    assert power_figures({SHORT: short, LONG: long})["waiting_w"] is None  # hardly longer
    assert power_figures({SHORT: short})["waiting_w"] is None
    assert set(power_figures({}).values()) == {None}
    part = power_figures({SHORT: load(0.01, None, None), LONG: load(0.02, None, None)})
    assert (part["waiting_w"], part["step_longer_by"]) == (None, 2.0)
    assert power_figures({REST: {"power_w": [80.0, None]}})["idle_w"] is None


def run(value: float, **other: Any) -> dict[str, Any]:
    counts = {"completed": 10, "failed": 0, "preemptions": 1}
    return {**dict.fromkeys(MEDIANS, value), **counts, **other}


def test_ratios_are_those_of_a_round_and_medians_those_of_all() -> None:
    rounds = {
        str(number): {
            BALANCER: run(slow),
            "least_tokens": run(2 * slow, energy_j_per_output_token=None),
            "bfio": run(fast, failed=1),
        }
        for number, slow, fast in ((1, 10.0, 30.0), (2, 40.0, 40.0), (3, 20.0, 40.0))
    }
    found = figures({"rounds": rounds})[1]
    assert list(found["ways"]) == list(WAYS)
    assert found["ways"][BALANCER]["output_throughput"] == 20.0
    assert found["ways"]["bfio"]["failed"] == 3
    assert found["ways"]["least_tokens"]["energy_j_per_output_token"] is None
    ratio = found["ratios"]["bfio"]["output_throughput"]
    assert ratio == {"median": 2.0, "rounds": [3.0, 1.0, 2.0]}
    assert found["ratios"]["least_tokens"]["energy_j_per_output_token"] is None
    assert figures({})[1]["ways"] == {}


# --- what ranks tell ------------------------------------------------------------------------------


def told(time_s: float, power_w: float | None, energy_j: float | None) -> Snapshot:
    return Snapshot(
        group="g",
        worker="w",
        rank=0,
        epoch="e",
        version=1,
        sequence=0,
        kind="delta",
        step=0,
        time_s=time_s,
        step_s=0.0,
        power_w=power_w,
        energy_j=energy_j,
        admissible_kv_tokens=9000,
    )


def test_power_and_energy_are_those_of_the_time_that_is_asked_for() -> None:
    log = SnapshotLog(2)
    log.snapshots[0] = [told(t, 100.0 * t, 50.0 * t * t) for t in (1.0, 2.0, 3.0, 4.0)]
    log.snapshots[1] = [told(t, 70.0, 70.0 * t) for t in (1.0, 2.0, 3.0, 4.0)]
    assert _watts(log, 2.0, 3.0) == [250.0, 70.0]
    assert energy_j(log, 1.5, 2.0) == pytest.approx(50 * (9 - 1) + 70 * 2)
    assert energy_j(log, 0.5, 2.0) is None  # nothing was told before
    log.snapshots[1].append(told(5.0, None, None))
    assert energy_j(log, 1.5, 4.0) is None
    assert _watts(log, 4.5, 5.5) == [None, None]


def test_a_long_context_is_one_that_the_kv_memory_holds() -> None:
    log = SnapshotLog(1)
    log.snapshots[0] = [told(1.0, None, None)]
    assert _held(log, Holding(8, 512, 1.0), 100) == 512
    assert _held(log, Holding(8, 8192, 1.0), 100) == int(0.9 * 9000 / 8) - 100
