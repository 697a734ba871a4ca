"""Power sources, and a sum of energy that never falls."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class PowerReading:
    """Power now, and energy since the source's start, which never falls; None: unknown."""

    power_w: float | None = None
    energy_j: float | None = None


UNKNOWN = PowerReading()


class PowerSource(Protocol):
    """Source of the power of one rank's GPUs."""

    def read(self, now_s: float) -> PowerReading:
        """Unreadable values are unknown, and nothing is raised; the clock does not go back."""


class EnergySum:
    """Total power and energy of some devices, from their readings at intervals.

    Energy grows by a device's counter. If it has none, or the counter went back as after a driver's
    reset, energy grows by power over time (trapezoid). A gap without readings adds nothing, except
    what a continued counter shows afterwards.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, PowerReading]] = {}
        self._energy_j = 0.0

    def add(self, now_s: float, told: Mapping[str, PowerReading]) -> PowerReading:
        """Add each device's reading; ``energy_j`` is its counter, from any start.

        The sum is unknown if one device has no reading.
        """
        for device, one in told.items():
            self._energy_j += self._advance(device, now_s, one)
        watts = [one.power_w for one in told.values() if one.power_w is not None]
        known = UNKNOWN not in told.values()
        return PowerReading(
            power_w=sum(watts) if len(watts) == len(told) else None,
            energy_j=self._energy_j if known else None,
        )

    def miss(self, now_s: float) -> PowerReading:
        self.add(now_s, dict.fromkeys(self._last, UNKNOWN))
        return UNKNOWN

    def _advance(self, device: str, now_s: float, now: PowerReading) -> float:
        """Joules since the device's last reading."""
        before_s, before = self._last.get(device, (now_s, UNKNOWN))
        if now == UNKNOWN:
            # A counter continues while it is unreadable; power does not cover the gap.
            now = PowerReading(energy_j=before.energy_j)
        self._last[device] = now_s, now
        if before.energy_j is not None and now.energy_j is not None:
            grown_j = now.energy_j - before.energy_j
            if grown_j >= 0:
                return grown_j
        if before.power_w is not None and now.power_w is not None:
            return (before.power_w + now.power_w) / 2 * max(0.0, now_s - before_s)
        return 0.0
