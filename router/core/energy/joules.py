"""Division of a worker's joules into useful work, barrier wait, idleness, and requests.

In a step a worker computes, then waits for the fullest one. Waiting ranks spin in a collective
operation, which draws less than work and more than rest. Counted energy is divided by time times
calibrated power, so the parts always add up to the counter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from operator import add, attrgetter

import msgspec

from router.core.errors import ConfigError
from router.core.events import PowerTold
from router.core.step_time import StepTime, Work
from router.core.types import Snapshot

_BY_TOKENS = StepTime(0.0, 1.0)

# Silence after which an agent's last power value is unknown again.
METER_SILENT_S = 10.0


@dataclass(frozen=True, slots=True)
class PowerLevels:
    """Calibrated watts of one worker's GPUs; ``spin_w``: waiting in a step. ConfigError: wrong."""

    idle_w: float
    spin_w: float
    busy_w: float

    def __post_init__(self) -> None:
        for each in fields(self):
            watts = getattr(self, each.name)
            if not 0 < watts < float("inf"):
                raise ConfigError(f"power: {each.name} must be watts above 0, got {watts:g}")
        if self.idle_w > min(self.spin_w, self.busy_w):
            raise ConfigError(
                f"power: idle_w {self.idle_w:g} is above spin_w {self.spin_w:g} or busy_w "
                f"{self.busy_w:g}; give watts at rest, waiting in a step, and computing"
            )


@dataclass(frozen=True, slots=True)
class Joules:
    """Energy by use; ``idle_j``: between steps, without work.

    ``unknown_j``: steps that cannot be divided: levels not calibrated, or wait unknown. Also what a
    worker used while nothing was heard of it.
    """

    useful_j: float = 0.0
    waiting_j: float = 0.0
    idle_j: float = 0.0
    unknown_j: float = 0.0

    @property
    def total_j(self) -> float:
        return self.useful_j + self.waiting_j + self.idle_j + self.unknown_j

    def __add__(self, other: Joules) -> Joules:
        return Joules(*map(add, _parts(self), _parts(other)))


# Far faster than ``astuple``, which copies deeply: each step adds.
_parts = attrgetter(*(each.name for each in fields(Joules)))


@dataclass(slots=True)
class Span:
    """Seconds of one worker by activity; ``unknown_s``: steps whose wait is unknown."""

    computing_s: float = 0.0
    waiting_s: float = 0.0
    idle_s: float = 0.0
    unknown_s: float = 0.0

    @property
    def step_s(self) -> float:
        return self.computing_s + self.waiting_s + self.unknown_s

    def step(self, step_s: float, share: float | None) -> None:
        if share is None:
            self.unknown_s += step_s
        else:
            self.waiting_s += share * step_s
            self.computing_s += (1 - share) * step_s


def divided(energy_j: float, span: Span, levels: PowerLevels | None) -> Joules:
    """Divide a worker's energy over a span; the parts add up to it.

    Steps of unknown wait weigh as computing, so that waiting is never overstated. Without levels a
    span that holds a step is unknown as a whole.
    """
    if span.step_s <= 0:
        return Joules(idle_j=energy_j)
    if levels is None:
        return Joules(unknown_j=energy_j)
    idle, waiting = levels.idle_w * span.idle_s, levels.spin_w * span.waiting_s
    unknown, busy = levels.busy_w * span.unknown_s, levels.busy_w * span.computing_s
    scale = energy_j / (idle + waiting + unknown + busy)
    return Joules(scale * busy, scale * waiting, scale * idle, scale * unknown)


class EnergyCounter:
    """Energy since the last reading, from a worker's counter or else from its power.

    A counter that falls was reset with its engine: its value has been used since. The counter's
    next value covers a gap in the readings.
    """

    def __init__(self) -> None:
        self._counted_j: float | None = None

    @property
    def counting(self) -> bool:
        return self._counted_j is not None

    def since(self, counted_j: float | None, power_w: float | None, seconds: float) -> float | None:
        """None: unknown, as at a counter's first reading."""
        if counted_j is None and power_w is None:
            return None
        before, self._counted_j = self._counted_j, counted_j
        if counted_j is None:
            return (power_w or 0.0) * seconds
        if before is None:
            return None
        return counted_j - before if counted_j >= before else counted_j


class AgentMeter:
    """Power and energy by an agent; ``replaced``: the worker's engine reports its own."""

    def __init__(self) -> None:
        self.told: PowerTold | None = None
        self.replaced = False

    def added_to(self, snapshot: Snapshot, received_s: float) -> Snapshot:
        told = self.told
        self.replaced |= not (snapshot.power_w is None and snapshot.energy_j is None)
        if told is None or self.replaced or received_s - told.received_s >= METER_SILENT_S:
            return snapshot
        return msgspec.structs.replace(snapshot, power_w=told.power_w, energy_j=told.energy_j)

    def power_w(self, now_s: float) -> float | None:
        told = self.told
        return None if told is None or now_s - told.received_s >= METER_SILENT_S else told.power_w


class RequestShares:
    """A worker's energy by metered request, in proportion to the work of each in its steps.

    Work is KV tokens held, the request itself and prompt tokens computed, by their cost; while that
    is unknown, KV tokens. Joules arrive late, for many steps at once; until then steps count at the
    power of those before.
    """

    def __init__(self) -> None:
        self._paid_j: dict[str, float] = {}
        self._open_s: dict[str, float] = {}
        self._power_w: float | None = None

    def step(
        self, step_s: float, whole: Work, parts: Mapping[str, Work], cost: StepTime | None
    ) -> None:
        if not parts:
            return
        cost = cost if cost is not None and cost.work_s(*whole) > 0 else _BY_TOKENS
        all_s = cost.work_s(*whole)
        for request_id, part in parts.items():
            share_s = step_s * cost.work_s(*part) / all_s if all_s else 0.0
            self._open_s[request_id] = self._open_s.get(request_id, 0.0) + share_s

    def pay(self, joules: float, seconds: float) -> None:
        if seconds <= 0:
            return
        self._power_w = joules / seconds
        for request_id in self._open_s:
            self._paid_j[request_id] = self.of(request_id) or 0.0
        self._open_s.clear()

    def of(self, request_id: str) -> float | None:
        paid_j, open_s = self._paid_j.get(request_id), self._open_s.get(request_id)
        if open_s is None or self._power_w is None:
            return paid_j
        return (paid_j or 0.0) + self._power_w * open_s

    def forget(self, request_id: str) -> None:
        self._paid_j.pop(request_id, None)
        self._open_s.pop(request_id, None)
