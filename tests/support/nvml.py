"""A double of the module ``pynvml``: GPUs and MIG parts that can be lost and reset."""

from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace


class NvmlError(Exception):
    """As pynvml's NVMLError: its subclasses are told apart by their names."""


def fault(name: str) -> Exception:
    """The error that pynvml raises under a name, such as GpuIsLost."""
    error: Exception = type(f"NVMLError_{name}", (NvmlError,), {})(f"double: {name}")
    return error


@dataclass
class Gpu:
    """Milliwatts and millijoules; ``None`` where the GPU has no such thing, or a fault's name."""

    uuid: str
    power_mw: int | str | None = 300_000
    energy_mj: int | str | None = 5_000_000
    fault: str | None = None
    name: str = "double"


@dataclass
class Mig:
    """A part of a GPU."""

    uuid: str
    parent: Gpu


@dataclass
class FakeNvml(ModuleType):
    """A machine's driver.

    Attributes:
        gpus: in the order of their indices.
        fault: what every start fails with.
        starts: times that it was initialized, less those that it was shut down.
    """

    gpus: list[Gpu]
    migs: list[Mig] = field(default_factory=list)
    fault: str | None = None
    starts: int = 0

    NVMLError = NvmlError

    def __post_init__(self) -> None:
        super().__init__("pynvml")

    def nvmlInit(self) -> None:  # noqa: N802
        if self.fault:
            raise fault(self.fault)
        self.starts += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.starts -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetName(self, gpu: Gpu) -> str:  # noqa: N802
        return self._found(gpu).name

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:  # noqa: N802
        if index >= len(self.gpus):
            raise fault("InvalidArgument")
        return self._found(self.gpus[index])

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Gpu | Mig:  # noqa: N802
        devices: list[Gpu | Mig] = [*self.gpus, *self.migs]
        by_uuid = {one.uuid: one for one in devices}
        if uuid not in by_uuid:
            raise fault("NotFound")
        return by_uuid[uuid]

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, mig: Mig) -> Gpu:  # noqa: N802
        return mig.parent

    def nvmlDeviceGetUUID(self, gpu: Gpu) -> str:  # noqa: N802
        return self._found(gpu).uuid

    def nvmlDeviceGetPowerUsage(self, gpu: Gpu) -> int:  # noqa: N802
        return self._number(self._found(gpu).power_mw)

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: Gpu) -> int:  # noqa: N802
        return self._number(self._found(gpu).energy_mj)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: Gpu) -> list[object]:  # noqa: N802
        return []

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(used=2 * 2**30)

    @staticmethod
    def _found(gpu: Gpu) -> Gpu:
        if gpu.fault:
            raise fault(gpu.fault)
        return gpu

    @staticmethod
    def _number(value: int | str | None) -> int:
        if not isinstance(value, int):
            raise fault(value or "NotSupported")
        return value
