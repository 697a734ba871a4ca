"""Where the joules of a worker go: useful work, waiting at the barrier, idleness, and requests.

Within a step a worker computes for a while and waits for the fullest one for the rest: the ranks
spin in a collective operation then, and draw more than at rest and less than at work. What an
energy counter has counted is divided in proportion to the time and the calibrated power of each, so
that the parts always add up to the counter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from router.errors import ConfigError

METER_SILENT_S = 10.0
"""How long an agent may say nothing before the power that it told is unknown again."""


@dataclass(frozen=True, slots=True)
class PowerLevels:
    """Calibrated power of one worker's GPUs, watts.

    Attributes:
        idle_w: nothing runs.
        spin_w: it waits for the other ranks in a step.
        busy_w: it computes.

    Raises:
        ConfigError: one is not above 0, or idleness takes the most.
    """

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
    """Energy by what it was spent on.

    Attributes:
        useful_j: computing.
        waiting_j: waiting for the fullest worker of the group.
        idle_j: between steps, with nothing to run.
        unknown_j: of steps that cannot be divided: the power levels are not calibrated, or nobody
            knows how long the worker waited.
    """

    useful_j: float = 0.0
    waiting_j: float = 0.0
    idle_j: float = 0.0
    unknown_j: float = 0.0

    @property
    def total_j(self) -> float:
        """All of it, as the counter has it."""
        return self.useful_j + self.waiting_j + self.idle_j + self.unknown_j

    def __add__(self, other: Joules) -> Joules:
        return Joules(
            self.useful_j + other.useful_j,
            self.waiting_j + other.waiting_j,
            self.idle_j + other.idle_j,
            self.unknown_j + other.unknown_j,
        )


@dataclass(slots=True)
class Span:
    """Seconds of one worker by what it did in them, since its energy was last divided.

    Attributes:
        computing_s: in steps.
        waiting_s: in steps, for the fullest worker.
        idle_s: between steps, with nothing to run.
        unknown_s: in steps of which nobody knows how long it waited.
    """

    computing_s: float = 0.0
    waiting_s: float = 0.0
    idle_s: float = 0.0
    unknown_s: float = 0.0

    @property
    def step_s(self) -> float:
        """In steps."""
        return self.computing_s + self.waiting_s + self.unknown_s

    def step(self, step_s: float, share: float | None) -> None:
        """One more step, and the share of it that was waiting; None: not known."""
        if share is None:
            self.unknown_s += step_s
        else:
            self.waiting_s += share * step_s
            self.computing_s += (1 - share) * step_s


def waiting_share(
    load_tokens: int, peak_tokens: int, step_s: float, per_token_s: float | None
) -> float | None:
    """Share of a step for which a worker waits, modelled: t_l (max L - L_g) / dt.

    Args:
        load_tokens: L_g, resident KV tokens of the worker in the step.
        peak_tokens: max L, those of the fullest worker of its group.
        step_s: dt, how long the step took.
        per_token_s: t_l, seconds per resident KV token; None: not known.

    Returns:
        From 0 to 1; None where t_l or dt are not known.
    """
    if per_token_s is None or step_s <= 0:
        return None
    return min(1.0, per_token_s * (peak_tokens - load_tokens) / step_s)


def divided(energy_j: float, span: Span, levels: PowerLevels | None) -> Joules:
    """What a worker's energy over a span was spent on; the parts add up to it.

    Steps of which it is not known how long it waited weigh as though it had computed, so that no
    more is called waiting than was. Without calibrated levels a span that holds a step is unknown
    as a whole, since what it took to be idle is not known either.
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
    """What a worker has used since the last reading, from its counter or else from its power.

    A counter that falls has begun anew with its engine: what it shows has been used since. While
    neither can be read a counter goes on, and shows afterwards what was used.
    """

    def __init__(self) -> None:
        self._counted_j: float | None = None

    @property
    def counting(self) -> bool:
        """A counter has been read."""
        return self._counted_j is not None

    def since(self, counted_j: float | None, power_w: float | None, seconds: float) -> float | None:
        """Joules since the last reading; None where they are not known, as at a counter's first.

        Args:
            counted_j: the counter; None: there is none.
            power_w: power now; None: unknown.
            seconds: since the last reading.
        """
        if counted_j is None and power_w is None:
            return None
        before, self._counted_j = self._counted_j, counted_j
        if counted_j is None:
            return (power_w or 0.0) * seconds
        if before is None:
            return None
        return counted_j - before if counted_j >= before else counted_j


class KvShares:
    """A worker's energy by request: joules of its steps by the tokens that each holds in KV memory.

    Only requests that somebody asks about are followed; what others hold is theirs. Joules come
    now and then, for all steps since the last ones; those of steps that wait for theirs are
    reckoned by the power of the steps before.
    """

    def __init__(self) -> None:
        self._paid_j: dict[str, float] = {}
        self._open_s: dict[str, float] = {}
        self._power_w: float | None = None

    def step(self, step_s: float, load_tokens: int, tokens: Mapping[str, int]) -> None:
        """A step, with all tokens that were resident in it, and those of requests."""
        for request_id, held in tokens.items():
            share_s = step_s * held / load_tokens if load_tokens else 0.0
            self._open_s[request_id] = self._open_s.get(request_id, 0.0) + share_s

    def pay(self, joules: float, seconds: float) -> None:
        """What the steps since the last payment have used, and how long they took together."""
        if seconds <= 0:
            return
        self._power_w = joules / seconds
        for request_id in self._open_s:
            self._paid_j[request_id] = self.of(request_id) or 0.0
        self._open_s.clear()

    def of(self, request_id: str) -> float | None:
        """A request's joules so far; None: no step has shown it, or the power is not known."""
        paid_j, open_s = self._paid_j.get(request_id), self._open_s.get(request_id)
        if open_s is None or self._power_w is None:
            return paid_j
        return (paid_j or 0.0) + self._power_w * open_s

    def forget(self, request_id: str) -> None:
        """Nobody asks about it any more."""
        self._paid_j.pop(request_id, None)
        self._open_s.pop(request_id, None)
