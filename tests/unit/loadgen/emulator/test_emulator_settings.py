from typing import Any

import pytest

from loadgen.emulator.emulate_command import EmulateOptions
from loadgen.emulator.emulator_settings import EmulatorSettings, snapshot_endpoints
from loadgen.emulator.faults import FAULT_KINDS, Fault
from loadgen.engine.engine_features import EngineFeatures
from loadgen.engine.kv_handoff import TransferTime
from loadgen.engine.prefill_settings import (
    KvLoadFailure,
    PrefillSettings,
    PrefillTime,
    parse_prefill,
)
from router.core.errors import ConfigError, InputError
from router.core.step_time import PAPER_STEP_TIME, StepTime, numbers


def test_ports_follow_the_first() -> None:
    settings = EmulatorSettings(workers=3, port=8100)
    assert [settings.worker_port(rank) for rank in range(3)] == [8100, 8101, 8102]
    assert settings.fault_port == 8103
    assert EmulatorSettings(workers=3, port=8100, control_port=9000).fault_port == 9000
    assert EmulatorSettings(port=0).fault_port == 0


@pytest.mark.parametrize(
    ("given", "speeds"), [("", [1, 1, 1]), ("2", [2, 2, 2]), ("1,.5,3", [1, 0.5, 3])]
)
def test_a_speed_for_each_worker_or_for_all(given: str, speeds: list[float]) -> None:
    settings = EmulatorSettings(workers=3, speeds=tuple(numbers("--speed", given)) if given else ())
    assert [settings.speed(rank) for rank in range(3)] == speeds


def test_step_times() -> None:
    assert StepTime.parse("4.95e-3,9.5e-8") == PAPER_STEP_TIME
    assert StepTime.parse("0.01,0,1e-4") == StepTime(0.01, 0.0, 1e-4)


def test_snapshot_streams_take_two_ports_each() -> None:
    assert snapshot_endpoints(9000, 2) == ("tcp://127.0.0.1:9000", "tcp://127.0.0.1:9002")
    with pytest.raises(ConfigError, match="--snapshot-port"):
        snapshot_endpoints(65_534, 2)


@pytest.mark.parametrize("text", ["", "1", "1,2,3,4,5", "a,b", "0,1e-7", "-1,0", "1,inf", "nan,0"])
def test_step_times_that_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--step-time"):
        StepTime.parse(text)


@pytest.mark.parametrize(
    ("fields", "option"),
    [
        ({"workers": 0}, "--workers"),
        ({"slots": 0}, "--slots"),
        ({"kv_tokens": 0}, "--kv-tokens"),
        ({"stream_interval": 0}, "--stream-interval"),
        ({"max_model_len": 0}, "--max-model-len"),
        ({"max_model_len": 17, "kv_tokens": 16}, "--max-model-len"),
        ({"kv_tokens": 10}, "--kv-tokens in whole blocks must be at least 1, got 0"),
        ({"max_model_len": 999, "kv_tokens": 1000}, "--max-model-len cannot exceed 992"),
        ({"kv_events_port": 65_533}, "--kv-events-port 65533 leaves no room for 4 workers"),
        (
            {"kv_events_port": 5557, "features": EngineFeatures(prefix_caching=False)},
            "--kv-events-port: without prefix caching",
        ),
        ({"time_scale": 0}, "--time-scale"),
        ({"time_scale": float("nan")}, "--time-scale"),
        ({"speeds": (1.0,) * 5}, "--speed has 5 numbers for 4 workers: give one for all of them"),
        ({"speeds": (1.0,) * 2}, "--speed has 2 numbers for 4 workers: give one for all of them"),
        ({"speeds": (0.0,)}, "--speed"),
        ({"lockstep": True, "barrier": False}, "--lockstep: workers that step alone"),
        ({"port": 65_533}, "--port"),
        ({"port": -1}, "--port"),
        ({"control_port": 70_000}, "--control-port"),
        ({"port": 8100, "control_port": 8101}, "--control-port"),
    ],
)
def test_settings_that_are_refused_name_the_option(fields: dict[str, Any], option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        EmulatorSettings(**fields)


def test_prefill_workers_come_after_the_others() -> None:
    settings = EmulatorSettings(workers=2, port=8100, prefill=PrefillSettings(workers=2))
    assert [settings.role(rank) for rank in range(settings.ranks)] == ["both"] * 2 + ["prefill"] * 2
    assert settings.worker_port(3) == 8103
    assert settings.fault_port == 8104


def test_prefill_workers_have_memory_of_their_own() -> None:
    prefill = PrefillSettings(workers=1, kv_tokens=896)
    settings = EmulatorSettings(workers=1, kv_tokens=512, max_model_len=400, prefill=prefill)
    assert [settings.new_engine(rank).kv_tokens for rank in range(2)] == [512, 896]


def test_prompts_cost_time_where_the_options_say_so() -> None:
    assert parse_prefill(0, None) is None
    assert parse_prefill(2, None) == PrefillSettings(workers=2)
    assert parse_prefill(0, None, prompts_cost=True) == PrefillSettings()
    assert parse_prefill(0, "0.01,1e-4") == PrefillSettings(time=PrefillTime(0.01, 1e-4))
    assert parse_prefill(
        1,
        None,
        chunk=100,
        kv_tokens=9,
        transfer_time="0,1e-6",
        kv_expiry_s=5.0,
        load_failure=KvLoadFailure.RECOMPUTE,
    ) == PrefillSettings(
        workers=1,
        chunk=100,
        kv_tokens=9,
        transfer=TransferTime(0.0, 1e-6),
        kv_expiry_s=5.0,
        recompute=True,
    )


@pytest.mark.parametrize(
    ("workers", "step_time", "options", "message"),
    [
        (-1, None, {}, "--prefill-workers must be from 0 to 4096, got -1"),
        (1, "1", {}, "--prefill-step-time takes C,t_p"),
        (1, "0,1", {}, "--prefill-step-time takes C,t_p"),
        (1, "1,-1", {}, "--prefill-step-time takes C,t_p"),
        (1, "a,b", {}, "--prefill-step-time takes numbers"),
        (1, None, {"transfer_time": "1"}, "--kv-transfer-time takes L,t"),
        (1, None, {"transfer_time": "-1,0"}, "--kv-transfer-time takes L,t"),
        (1, None, {"kv_expiry_s": 0.0}, "--kv-expiry must be above 0"),
        (1, None, {"kv_expiry_s": float("nan")}, "--kv-expiry must be above 0"),
        (0, "1,1", {"kv_tokens": 5}, "give --prefill-workers"),
        (0, None, {"chunk": 5}, "--batch-tokens does nothing"),
        (0, None, {"kv_expiry_s": 5.0}, "--kv-expiry does nothing"),
        (0, None, {"load_failure": KvLoadFailure.FAIL}, "--kv-load-failure does nothing"),
    ],
)
def test_prefill_options_that_are_refused(
    workers: int, step_time: str | None, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_prefill(workers, step_time, **options)


@pytest.mark.parametrize(
    ("prefill", "message"),
    [
        (PrefillSettings(chunk=72), "--batch-tokens 72 must be above --slots 72"),
        (PrefillSettings(workers=1, kv_tokens=9), "--prefill-kv-tokens 9 cannot be below"),
    ],
)
def test_prefill_that_does_not_fit_the_fleet(prefill: PrefillSettings, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EmulatorSettings(prefill=prefill)


def test_drafts_are_of_the_batch() -> None:
    features, chunk = EngineFeatures(acceptance=(0.5,) * 7), 72 * 8
    with pytest.raises(ConfigError, match="--batch-tokens 576 must be above 576, for --slots 72"):
        EmulatorSettings(features=features, prefill=PrefillSettings(chunk=chunk))
    assert EmulatorSettings(features=features, prefill=PrefillSettings(chunk=chunk + 1))


@pytest.mark.parametrize(
    "options",
    [
        {"workers": 10**9, "port": 0},
        {"slots": 10**400},
        {"kv_tokens": 10**30},
        {"kv_tokens": 10**400},
        {"kv_tokens": 10**11, "block_tokens": 10**9},
        {"max_model_len": 10**400},
        {"seed": -1, "speculate": "1,.5"},
        {"seed": -1, "admission": "wait"},
        {"stream_interval": 10**400},
        {"prefill_workers": 10**9},
        {"batch_tokens": 10**30, "step_time": "1,0,0,1"},
        {"prefill_kv_tokens": 10**30, "prefill_workers": 1},
        {"prompt_budget": 10**400},
        {"prefill_every": 10**400},
        {"speculate": "1e8,.5"},
        {"window": "10,1e99999999"},
    ],
    ids=str,
)
def test_numbers_out_of_range_name_the_option(options: dict[str, Any]) -> None:
    named = "|".join(f"--{name.replace('_', '-')}" for name in options)
    with pytest.raises(ConfigError, match=f"^({named}|--batch-tokens) "):
        EmulateOptions(**options).settings()


def test_faults_that_are_refused() -> None:
    with pytest.raises(InputError) as caught:
        Fault("melt")
    assert all(kind in str(caught.value) for kind in FAULT_KINDS)
    for refused in (
        {"kind": "slow", "factor": 0.0},
        {"kind": "drip", "bytes_per_s": float("inf")},
        {"kind": "error", "status": 200},
        {"kind": "error", "delay_s": -1.0},
        {"kind": "error", "retry_after_s": -1},
        {"kind": "stall", "after_events": -1},
        {"kind": "drip", "mid_event": True},
    ):
        with pytest.raises(InputError, match=list(refused)[-1]):
            Fault(**refused)  # type: ignore[arg-type]
