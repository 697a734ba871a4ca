"""What GPUs' meters showed over time, to be played to a double of NVML."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from engine_patches.power.source import PowerReading


@dataclass(frozen=True)
class Sample:
    """A device's reading, on any clock."""

    time_s: float
    device: str
    power_w: float
    energy_j: float


class Recording:
    """Samples of some devices, each device's in the order of their times."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples: defaultdict[str, list[Sample]] = defaultdict(list)
        for sample in samples:
            self._samples[sample.device].append(sample)
        self.begin_s = min(sample.time_s for sample in samples)
        self.end_s = max(sample.time_s for sample in samples)

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(self._samples)

    def at(self, device: str, time_s: float) -> PowerReading:
        """A device's latest reading; unknown before its first."""
        samples = self._samples[device]
        index = bisect_right(samples, time_s, key=attrgetter("time_s")) - 1
        if index < 0:
            return PowerReading()
        return PowerReading(samples[index].power_w, samples[index].energy_j)
