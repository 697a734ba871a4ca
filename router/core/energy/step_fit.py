"""Cost of a group's step, fitted to its own steps: C + t_l max L (arXiv 2601.17855)."""

from __future__ import annotations

import math
from dataclasses import dataclass

_MEMORY_STEPS = 2000
_LEAST_STEPS = 50
# A slope this many times its standard error is significant.
_SURE = 4.0


@dataclass(frozen=True, slots=True)
class FittedStep:
    """Fitted time of a step.

    Attributes:
        base_s: C, seconds of any step.
        per_token_s: t_l, seconds per KV token of the fullest worker.
        explained: share of the variance of step times explained, 0 to 1.
    """

    base_s: float
    per_token_s: float
    explained: float


class StepFit:
    """Linear regression over recent steps; sums are relative to the first step, and decay."""

    def __init__(self) -> None:
        self._origin: tuple[float, float] | None = None
        self._steps = 0.0
        self._x = self._y = self._xx = self._xy = self._yy = 0.0

    def observe(self, peak_tokens: int, step_s: float) -> None:
        if step_s <= 0:
            return
        if self._origin is None:
            self._origin = (peak_tokens, step_s)
        x, y = peak_tokens - self._origin[0], step_s - self._origin[1]
        kept = 1 - 1 / _MEMORY_STEPS
        self._steps = kept * self._steps + 1
        self._x, self._y = kept * self._x + x, kept * self._y + y
        self._xx, self._xy = kept * self._xx + x * x, kept * self._xy + x * y
        self._yy = kept * self._yy + y * y

    def fitted(self) -> FittedStep | None:
        """None while loads were too few or too alike."""
        if self._origin is None or self._steps < _LEAST_STEPS:
            return None
        n = self._steps
        mean_x, mean_y = self._x / n, self._y / n
        var_x = self._xx / n - mean_x**2
        var_y = self._yy / n - mean_y**2
        cov = self._xy / n - mean_x * mean_y
        if var_x <= 0 or var_y <= 0 or cov <= 0:
            return None
        explained = min(1.0, cov**2 / (var_x * var_y))
        slope = cov / var_x
        error = math.sqrt((1 - explained) * var_y / var_x / (n - 2))
        if slope < _SURE * error:
            return None
        base_s = self._origin[1] + mean_y - slope * (self._origin[0] + mean_x)
        return FittedStep(max(0.0, base_s), slope, explained)
