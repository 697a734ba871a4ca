"""Power and energy of the GPUs that one rank runs on, from NVML where there is one.

At the start it is also asked how much memory the engine has taken there: see ``memory``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from engine_patches.memory import cross_check

_VISIBLE = "CUDA_VISIBLE_DEVICES"


class GpuMeter:
    """Sums over some GPUs.

    Args:
        nvml: the module ``pynvml``, initialized.
        devices: index or UUID of each GPU.

    Raises:
        Exception: as NVML's, for a GPU that it does not know.
    """

    def __init__(self, nvml: Any, devices: Sequence[str]) -> None:
        self._nvml = nvml
        self._handles = [self._handle(device) for device in devices]
        self._counted = True
        self._first_mj = self._energy_mj()

    def read(self) -> tuple[float, float | None]:
        """Watts now, and joules since the start; None where a GPU has no energy counter."""
        milliwatts = sum(self._nvml.nvmlDeviceGetPowerUsage(one) for one in self._handles)
        joules = (self._energy_mj() - self._first_mj) / 1e3 if self._counted else None
        return milliwatts / 1e3, joules

    def cross_check(self, kv_bytes: int, blocks: int) -> tuple[bool, str]:
        """Whether the engine holds a KV cache of this size, and a line for the log.

        Raises:
            Exception: NVML's, where it cannot tell.
        """
        return cross_check(self._nvml, self._handles, kv_bytes, blocks)

    def _handle(self, device: str) -> Any:
        if device.isdecimal():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(device))
        return self._nvml.nvmlDeviceGetHandleByUUID(device)

    def _energy_mj(self) -> int:
        try:
            return sum(self._nvml.nvmlDeviceGetTotalEnergyConsumption(one) for one in self._handles)
        except self._nvml.NVMLError:
            self._counted = False
            return 0


def rank_devices(visible: str | None, gpus: int, local_rank: int) -> tuple[str, ...]:
    """The GPUs of one data-parallel rank, which vLLM takes in order.

    Args:
        visible: what ``CUDA_VISIBLE_DEVICES`` says.
        gpus: how many one rank has.
        local_rank: number of the rank among those of this machine.

    Returns:
        Index or UUID of each; fewer where fewer are visible.
    """
    first = local_rank * gpus
    if visible is None:
        return tuple(str(index) for index in range(first, first + gpus))
    devices = [name.strip() for name in visible.split(",") if name.strip()]
    return tuple(devices[first : first + gpus] or devices[:gpus])


def open_meter(gpus: int, local_rank: int) -> GpuMeter | None:
    """A meter of this rank's GPUs; None where there is no NVML, or no such GPU."""
    try:
        nvml: ModuleType = import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        devices = rank_devices(os.environ.get(_VISIBLE), gpus, local_rank)
        return GpuMeter(nvml, devices) if devices else None
    except nvml.NVMLError:
        return None
