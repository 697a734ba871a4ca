"""Power at rest, waiting and computing, fitted to the meters of a group.

A span's joules are the sum of its seconds times watts per activity. Least squares over the spans
yields the watts, given enough time of each activity and varying proportions.
"""

from collections.abc import Sequence

import numpy as np

from router.core.energy.joules import Span

# Seconds of each activity, summed over workers, below which there is no result.
LEAST_S = 0.5

STATES = ("idle", "waiting", "computing")

# Condition of the scaled normal equations; beyond it the activities came in one proportion.
_WORST_CONDITION = 1e4
# Standard error of a level, as a share of the highest level.
_WORST_ERROR = 0.1


class LevelFit:
    """Sums over the spans of a group's workers; a span's error grows as the root of its length."""

    def __init__(self) -> None:
        self.seconds = [0.0, 0.0, 0.0]  # time of all spans by ``STATES``
        # Time of spans left out, since the wait in some of their steps is unknown.
        self.unknown_s = 0.0
        self._spans = 0
        self._energy_w = 0.0
        self._xx = [[0.0] * 3 for _ in range(3)]
        self._xy = [0.0] * 3

    def observe(self, energy_j: float, span: Span) -> None:
        length_s = span.step_s + span.idle_s
        if span.unknown_s > 0 or length_s <= 0:
            self.unknown_s += length_s
            return
        parts = span.idle_s, span.waiting_s, span.computing_s
        self._spans += 1
        self._energy_w += energy_j * energy_j / length_s
        for i, part in enumerate(parts):
            self.seconds[i] += part
            weight = part / length_s
            self._xy[i] += weight * energy_j
            row = self._xx[i]
            for j in range(3):
                row[j] += weight * parts[j]

    def fitted(self) -> Sequence[float] | None:
        """Watts by ``STATES``; None while they are too uncertain."""
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
        errors = np.sqrt(left / (self._spans - len(STATES)) * np.diag(inverse))
        if errors.max() > _WORST_ERROR * watts.max():
            return None
        found: list[float] = watts.tolist()
        return found
