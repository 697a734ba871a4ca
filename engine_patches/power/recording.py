"""A recording of GPU power as JSON lines, and its replay."""

import logging
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

import msgspec

from engine_patches.power.source import EnergySum, PowerReading

log = logging.getLogger("vllm.evenstep")


class RecordingError(Exception):
    """An unusable recording; the message names the place and the remedy."""


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line: the reading of one device (index or UUID) on any clock; None: unreadable."""

    time_s: float
    device: str
    power_w: float | None = None
    energy_j: float | None = None


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
        """A device's latest reading; unknown before its first and after the last of all."""
        samples = self._samples[device]
        index = bisect_right(samples, time_s, key=attrgetter("time_s")) - 1
        if index < 0 or time_s > self.end_s:
            return PowerReading()
        return PowerReading(samples[index].power_w, samples[index].energy_j)


class RecordingSource:
    """Replays a recording, starting at the first read."""

    def __init__(self, recording: Recording, devices: Sequence[str]) -> None:
        self._recording = recording
        self._devices = tuple(dict.fromkeys(devices))
        self._energy = EnergySum()
        self._offset_s: float | None = None
        self._end_said = False

    def read(self, now_s: float) -> PowerReading:
        if self._offset_s is None:
            self._offset_s = self._recording.begin_s - now_s
        time_s = now_s + self._offset_s
        if time_s > self._recording.end_s and not self._end_said:
            self._end_said = True
            log.warning("evenstep: power unknown: the recording has come to its end")
        told = {device: self._recording.at(device, time_s) for device in self._devices}
        return self._energy.add(now_s, told)


def read_recording(file: str) -> Recording:
    """Read JSON lines like ``{"time_s": 0.5, "device": "0", "power_w": 300, "energy_j": 12.5}``.

    RecordingError: it is unreadable or empty, or names an invalid line.
    """
    try:
        lines = Path(file).read_bytes().splitlines()
    except OSError as error:
        raise RecordingError(f"{file}: {error.strerror}") from None
    samples: list[Sample] = []
    last_s: dict[str, float] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            sample = _sample(line, f"{file}, line {number}")
            if sample.time_s < last_s.get(sample.device, -math.inf):
                raise RecordingError(
                    f"{file}, line {number}: time_s goes back for device {sample.device}; "
                    "each device's lines should be in the order of their times"
                )
            last_s[sample.device] = sample.time_s
            samples.append(sample)
    if not samples:
        raise RecordingError(f"{file} is empty; it should have a JSON object a line")
    return Recording(samples)


def _sample(line: bytes, place: str) -> Sample:
    try:
        sample = msgspec.json.decode(line, type=Sample)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordingError(
            f"{place}: {error}; a line is like "
            '{"time_s": 0.5, "device": "0", "power_w": 300, "energy_j": 12.5}'
        ) from None
    for name in ("power_w", "energy_j"):
        value = getattr(sample, name)
        if value is not None and value < 0:
            raise RecordingError(f"{place}: {name} is {value:g}, which should be from 0 up")
    return sample
