"""Power at rest, waiting and computing, from what meters count while workers do some of each.

A span's joules are its seconds of each kind times the watts of each: least squares over the spans
of a group find the watts, if its workers have done enough of each and not always in one proportion.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from router.energy.joules import Span

LEAST_S = 0.5
"""Seconds of each kind, summed over workers, below which nothing is said."""

STATES = ("idle", "waiting", "computing")

# Of the normal equations, scaled: beyond it the kinds have come in one proportion.
_WORST_CONDITION = 1e4
# A level's standard error, of the highest level.
_WORST_ERROR = 0.1


@dataclass(frozen=True, slots=True)
class FittedLevels:
    """What the meters say.

    Attributes:
        watts: at rest, waiting in a step, computing.
        error_w: standard errors of these.
        explained: share of the spans' variance of power that the three explain, 0 to 1.
    """

    watts: tuple[float, float, float]
    error_w: tuple[float, float, float]
    explained: float


class LevelFit:
    """Sums over the spans of a group's workers; a span's error grows as the root of its length.

    Attributes:
        seconds: at rest, waiting and computing, of all spans.
        unknown_s: seconds of spans that are left out: in some of their steps it is not known how
            long the worker waited.
    """

    def __init__(self) -> None:
        self.seconds = [0.0, 0.0, 0.0]
        self.unknown_s = 0.0
        self._spans = 0
        self._length_s = self._energy_j = self._energy_w = 0.0
        self._xx = [[0.0] * 3 for _ in range(3)]
        self._xy = [0.0] * 3

    def observe(self, energy_j: float, span: Span) -> None:
        """A meter has counted so much while a worker did this."""
        length_s = span.step_s + span.idle_s
        if span.unknown_s > 0 or length_s <= 0:
            self.unknown_s += length_s
            return
        parts = span.idle_s, span.waiting_s, span.computing_s
        self._spans += 1
        self._length_s += length_s
        self._energy_j += energy_j
        self._energy_w += energy_j * energy_j / length_s
        for i, part in enumerate(parts):
            self.seconds[i] += part
            weight = part / length_s
            self._xy[i] += weight * energy_j
            row = self._xx[i]
            for j in range(3):
                row[j] += weight * parts[j]

    def fitted(self) -> FittedLevels | None:
        """The levels; None while the spans do not tell, or not surely enough."""
        if min(self.seconds) < LEAST_S or self._spans <= len(STATES):
            return None
        xx, xy = np.array(self._xx), np.array(self._xy)
        scale = 1 / np.sqrt(np.diag(xx))
        scaled = xx * np.outer(scale, scale)
        if np.linalg.cond(scaled) > _WORST_CONDITION:
            return None
        inverse = np.linalg.inv(scaled) * np.outer(scale, scale)
        watts = inverse @ xy
        left = max(0.0, self._energy_w - float(watts @ xy))
        spread = self._energy_w - self._energy_j**2 / self._length_s
        errors = np.sqrt(left / (self._spans - len(STATES)) * np.diag(inverse))
        if errors.max() > _WORST_ERROR * watts.max():
            return None
        explained = 1 - left / spread if spread > 0 else 0.0
        return FittedLevels(_three(watts), _three(errors), max(0.0, explained))


def _three(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> tuple[float, float, float]:
    idle, waiting, computing = map(float, values)
    return idle, waiting, computing
