from typing import Any

import pytest

from loadgen.emulator.faults import FAULT_KINDS, Fault
from loadgen.emulator.settings import (
    EmulatorSettings,
    parse_speeds,
    snapshot_endpoints,
)
from loadgen.step_model import StepTime, parse_step_time
from router.errors import ConfigError, InputError


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
    settings = EmulatorSettings(workers=3, speeds=parse_speeds(given) if given else ())
    assert [settings.speed(rank) for rank in range(3)] == speeds


def test_step_times() -> None:
    assert parse_step_time("4.95e-3,9.5e-8") == StepTime()
    assert parse_step_time("0.01,0,1e-4") == StepTime(0.01, 0.0, 1e-4)


def test_snapshot_streams_take_two_ports_each() -> None:
    assert snapshot_endpoints(9000, 2) == ("tcp://127.0.0.1:9000", "tcp://127.0.0.1:9002")
    with pytest.raises(ConfigError, match="--snapshot-port"):
        snapshot_endpoints(65_534, 2)


@pytest.mark.parametrize("text", ["", "1", "1,2,3,4", "a,b", "0,1e-7", "-1,0", "1,inf", "nan,0"])
def test_step_times_that_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--step-time"):
        parse_step_time(text)


@pytest.mark.parametrize(
    ("fields", "option"),
    [
        ({"workers": 0}, "--workers"),
        ({"slots": 0}, "--slots"),
        ({"kv_tokens": 0}, "--kv-tokens"),
        ({"stream_interval": 0}, "--stream-interval"),
        ({"max_model_len": 0}, "--max-model-len"),
        ({"max_model_len": 11, "kv_tokens": 10}, "--max-model-len"),
        ({"time_scale": 0}, "--time-scale"),
        ({"time_scale": float("nan")}, "--time-scale"),
        ({"speeds": (1.0,) * 5}, "--speed has 5 numbers for 4 workers: give one for all of them"),
        ({"speeds": (1.0,) * 2}, "--speed has 2 numbers for 4 workers: give one for all of them"),
        ({"speeds": (0.0,)}, "--speed"),
        ({"port": 65_533}, "--port"),
        ({"port": -1}, "--port"),
        ({"control_port": 70_000}, "--control-port"),
        ({"port": 8100, "control_port": 8101}, "--control-port"),
    ],
)
def test_settings_that_are_refused_name_the_option(fields: dict[str, Any], option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        EmulatorSettings(**fields)


def test_faults_that_are_refused() -> None:
    with pytest.raises(InputError) as caught:
        Fault("melt")  # type: ignore[arg-type]
    assert all(kind in str(caught.value) for kind in FAULT_KINDS)
    with pytest.raises(InputError, match="factor"):
        Fault("slow", factor=0)
    with pytest.raises(InputError, match="status"):
        Fault("error", status=404)
