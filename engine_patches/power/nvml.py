"""Power and energy of one rank's GPUs, from NVML."""

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from engine_patches.plugin.memory import cross_check
from engine_patches.power.devices import VISIBLE, RankGpus, UnknownGpusError, rank_devices
from engine_patches.power.source import EnergySum, PowerReading

log = logging.getLogger("vllm.evenstep")

RETRY_S = 30.0
"""How long to wait before a GPU that could not be read is tried again."""

_ORDER = "CUDA_DEVICE_ORDER"
_MODULES = ("pynvml", "vllm.third_party.pynvml")
_NO_GPU = "there is no such GPU: nvidia-smi -L lists indices and whole UUIDs"
_MENDS = {
    "NVMLError_LibraryNotFound": "there is no NVIDIA driver here: install it, or give the "
    "container access to the GPUs (NVIDIA_DRIVER_CAPABILITIES with utility)",
    "NVMLError_DriverNotLoaded": "the NVIDIA driver is not loaded: see what nvidia-smi says",
    "NVMLError_NoPermission": "the driver refuses permission: let this user read /dev/nvidia*",
    "NVMLError_NotFound": _NO_GPU,
    "NVMLError_InvalidArgument": _NO_GPU,
    "NVMLError_GpuIsLost": "it is lost: see dmesg for its Xid error, and reset it",
}
_ABSENT = frozenset({"NVMLError_NotSupported", "NVMLError_FunctionNotFound"})
# Some hosts give all users access to power, and few to the counter.
_ABSENT_COUNTER = _ABSENT | {"NVMLError_NoPermission"}


class NvmlError(Exception):
    """NVML has no data; the message has the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class _Gpus:
    """A rank's devices, and by UUID the name and handle of the whole GPUs behind them."""

    handles: tuple[Any, ...]
    whole: Mapping[str, tuple[str, Any]]


class Notices:
    """Logs each problem once, even if several ranks of a process have it.

    An agent has several ranks; with the plug-in each rank is a process of its own.
    """

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._owners: dict[str, object] = {}

    def _once(self, what: str, text: str, *values: object) -> None:
        if what not in self._said:
            self._said.add(what)
            log.warning(f"evenstep: {text}", *values)

    def begin(self, problem: str) -> None:
        self._once(problem, "power unknown: %s; tried again every %g s", problem, RETRY_S)

    def part(self, device: str) -> None:
        text = (
            "%s is part of a GPU: the power told of such parts is the whole GPU's, all of its "
            "parts together, since NVML knows no other"
        )
        self._once("part", text, device)

    def taken(self, device: str, uuid: str, owner: object) -> None:
        """Warn if another rank has this GPU too."""
        text = (
            "GPU %s is in several ranks: each reports the whole GPU's power, so that sums over "
            "them count it more than once"
        )
        if self._owners.setdefault(uuid, owner) is not owner:
            self._once(uuid, text, device)

    def end(self, problem: str | None, *, known: bool) -> None:
        """``known``: power is known again."""
        if problem in self._said:
            self._said.remove(problem)
            if known:
                log.info("evenstep: power is known again, after: %s", problem)


class NvmlSource:
    """Sums over some GPUs, unknown while one of them cannot be read.

    Args:
        devices: index or UUID of each; a MIG device stands for its whole GPU, because NVML has no
            power of parts.
        by_speed: true if indices are CUDA's, which may number a machine's GPUs fastest first; NVML
            always numbers them by bus position.
    """

    def __init__(
        self,
        devices: Sequence[str],
        notices: Notices | None = None,
        load: Callable[[], Any] | None = None,
        *,
        by_speed: bool = False,
    ) -> None:
        self._devices = tuple(devices)
        self._notices = notices or Notices()
        self._load = load or _pynvml
        self._by_speed = by_speed
        self._nvml: Any = None
        self._gpus: _Gpus | None = None
        self._energy = EnergySum()
        self._again_s: float | None = None
        self._problem: str | None = None

    def read(self, now_s: float) -> PowerReading:
        """Read the sums; an error is logged once and the GPUs are tried again later."""
        if self._again_s is not None and now_s < self._again_s:
            return self._energy.miss(now_s)
        try:
            self._gpus = self._gpus or self._open()
            told = {uuid: self._told(*gpu) for uuid, gpu in self._gpus.whole.items()}
        except NvmlError as error:
            self._gpus, self._again_s = None, now_s + RETRY_S
            if str(error) != self._problem:
                self._notices.end(self._problem, known=False)
                self._problem = str(error)
                self._notices.begin(self._problem)
            return self._energy.miss(now_s)
        self._notices.end(self._problem, known=True)
        self._again_s = self._problem = None
        return self._energy.add(now_s, told)

    def cross_check(self, kv_bytes: int, blocks: int) -> tuple[bool, str] | None:
        """As ``memory.cross_check``; None while the GPUs are unreadable."""
        if self._gpus is None:
            return None
        return cross_check(self._nvml, self._gpus.handles, kv_bytes, blocks)

    def _open(self) -> _Gpus:
        if self._nvml is not None:  # its driver may have been reloaded since
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()
            self._nvml = None
        try:
            nvml = self._load()
        except ImportError:
            raise NvmlError("pynvml is missing: pip install nvidia-ml-py") from None
        try:
            nvml.nvmlInit()
            self._nvml = nvml
        except nvml.NVMLError as error:
            raise NvmlError(_mend(error)) from error
        self._check_order()
        handles = tuple(self._handle(device) for device in self._devices)
        whole: dict[str, tuple[str, Any]] = {}
        for device, handle in zip(self._devices, handles, strict=True):
            gpu = handle
            if device.startswith("MIG-"):  # the GPU that it is a part of
                self._notices.part(device)
                gpu = self._ask(device, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
            uuid = self._ask(device, "nvmlDeviceGetUUID", gpu)
            whole.setdefault(uuid, (device, gpu))
            self._notices.taken(device, uuid, self)
        return _Gpus(handles, whole)

    def _check_order(self) -> None:
        """Reject indices that may mean other GPUs; GPUs of one kind have the same order in both."""
        if not self._by_speed or not any(map(str.isdecimal, self._devices)):
            return
        indices = range(self._ask("0", "nvmlDeviceGetCount"))
        handles = [self._handle(str(index)) for index in indices]
        if len({self._ask("0", "nvmlDeviceGetName", handle) for handle in handles}) > 1:
            raise NvmlError(
                f"the GPUs here are of several kinds, which CUDA numbers by their speed: set "
                f"{_ORDER}=PCI_BUS_ID, or name GPUs by their UUIDs in {VISIBLE}"
            )

    def _handle(self, device: str) -> Any:
        if device.isdecimal():
            return self._ask(device, "nvmlDeviceGetHandleByIndex", int(device))
        return self._ask(device, "nvmlDeviceGetHandleByUUID", device)

    def _told(self, device: str, gpu: Any) -> PowerReading:
        counter = "nvmlDeviceGetTotalEnergyConsumption"
        power_w = self._thousandths(device, "nvmlDeviceGetPowerUsage", gpu, _ABSENT)
        counter_j = self._thousandths(device, counter, gpu, _ABSENT_COUNTER)
        if power_w is None and counter_j is None:
            raise NvmlError(
                f"GPU {device} has neither a power sensor nor an energy counter to read"
            )
        return PowerReading(power_w, counter_j)

    def _thousandths(
        self, device: str, function: str, gpu: Any, absent: Collection[str]
    ) -> float | None:
        """W or J; None for an error in ``absent``."""
        try:
            return int(self._ask(device, function, gpu)) / 1e3
        except NvmlError as error:
            if type(error.__cause__).__name__ in absent:
                return None
            raise

    def _ask(self, device: str, function: str, *arguments: Any) -> Any:
        """Call an NVML function; NvmlError names the device."""
        try:
            return getattr(self._nvml, function)(*arguments)
        except self._nvml.NVMLError as error:
            raise NvmlError(f"GPU {device}: {_mend(error)}") from error


def _mend(error: Exception) -> str:
    return _MENDS.get(type(error).__name__, f"NVML says: {error}")


def _pynvml() -> Any:
    """The package nvidia-ml-py, or vLLM's copy of it."""
    for name in _MODULES:
        with contextlib.suppress(ImportError):
            return import_module(name)
    raise ImportError


def open_source(rank: RankGpus) -> NvmlSource | None:
    """Power source of a rank's GPUs; None, with a log line, if they are unknown."""
    try:
        devices = rank_devices(rank, os.environ.get(VISIBLE))
    except UnknownGpusError as error:
        log.warning("evenstep: power unknown: %s", error)
        return None
    return NvmlSource(devices, by_speed=os.environ.get(_ORDER) != "PCI_BUS_ID")
