from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from engine_patches.power import GpuMeter, open_meter, rank_devices


class FakeNvml(ModuleType):
    """Two GPUs, "0" and "GPU-b"; milliwatts and millijoules."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, counter: bool = True, driver: bool = True) -> None:
        super().__init__("pynvml")
        self.counter, self.driver = counter, driver
        self.power_mw = {"0": 300_000, "GPU-b": 200_500}
        self.energy_mj = {"0": 5_000_000, "GPU-b": 7_000_000}

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.driver:
            raise self.NVMLError

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return self.nvmlDeviceGetHandleByUUID(str(index))

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid not in self.power_mw:
            raise self.NVMLError
        return uuid

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:  # noqa: N802
        return self.power_mw[handle]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:  # noqa: N802
        if not self.counter:
            raise self.NVMLError
        return self.energy_mj[handle]


def test_power_and_energy_are_sums_in_watts_and_joules() -> None:
    nvml = FakeNvml()
    meter = GpuMeter(nvml, ["0", "GPU-b"])
    assert meter.read() == (500.5, 0.0)
    nvml.energy_mj["0"] += 1_500
    nvml.energy_mj["GPU-b"] += 500
    nvml.power_mw["0"] = 100_000
    assert meter.read() == (300.5, 2.0)


def test_a_gpu_without_an_energy_counter_has_power_only() -> None:
    assert GpuMeter(FakeNvml(counter=False), ["0"]).read() == (300.0, None)


@pytest.mark.parametrize(
    ("visible", "gpus", "local_rank", "devices"),
    [
        (None, 2, 0, ("0", "1")),
        (None, 2, 1, ("2", "3")),
        ("4, 5,6,7", 2, 1, ("6", "7")),
        ("GPU-a,GPU-b", 1, 1, ("GPU-b",)),
        ("3", 1, 2, ("3",)),  # each rank sees its own alone
        ("", 1, 0, ()),
    ],
)
def test_a_rank_has_its_share_of_what_is_visible(
    visible: str | None, gpus: int, local_rank: int, devices: tuple[str, ...]
) -> None:
    assert rank_devices(visible, gpus, local_rank) == devices


def test_the_meter_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,GPU-b")
    meter = open_meter(1, 1)
    assert meter is not None
    assert meter.read() == (200.5, 0.0)


@pytest.mark.parametrize(
    ("nvml", "visible"),
    [
        pytest.param(None, "0", id="no pynvml"),
        pytest.param(FakeNvml(driver=False), "0", id="no driver"),
        pytest.param(FakeNvml(), "9", id="no such GPU"),
        pytest.param(FakeNvml(), "", id="no GPU for this process"),
    ],
)
def test_without_gpus_there_is_no_meter(
    monkeypatch: pytest.MonkeyPatch, nvml: Any, visible: str
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert open_meter(1, 0) is None
