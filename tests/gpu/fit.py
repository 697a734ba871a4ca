"""Step times fitted by the model that the simulator reads: C + t_l * load + t_r * requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Point:
    """Steps of one batch: medians.

    Attributes:
        requests: that decode.
        load_tokens: KV tokens resident.
        step_s: length of a step.
        steps: how many were measured.
        power_w: mean of the GPU; None where there is none.
    """

    requests: int
    load_tokens: float
    step_s: float
    steps: int
    power_w: float | None = None


def fit(points: Sequence[Point]) -> dict[str, Any]:
    """Least squares with C above zero and no cost below it; t_r only beside a t_l.

    Raises:
        ValueError: fewer than three points.
    """
    if len(points) < 3:
        raise ValueError(f"three numbers cannot be fitted to {len(points)} points")
    columns = np.array([(1.0, each.load_tokens, each.requests) for each in points])
    seconds = np.array([each.step_s for each in points])
    cost = _least_squares(columns, seconds)
    wrong = columns @ cost - seconds
    spread = float(((seconds - seconds.mean()) ** 2).sum())
    return {
        "base_s": float(cost[0]),
        "per_token_s": float(cost[1]),
        "per_request_s": float(cost[2]),
        "r_squared": 1 - float((wrong**2).sum()) / spread if spread else 1.0,
        "largest_relative_error": float(np.abs(wrong / seconds).max()),
    }


def _least_squares(columns: Floats, values: Floats) -> Floats:
    """The best of the plain solutions over the first columns that has no cost below zero."""
    best, least = np.zeros(columns.shape[1]), np.inf
    for count in range(1, columns.shape[1] + 1):
        part = columns[:, :count]
        scale = np.abs(part).max(axis=0)
        solution = np.linalg.lstsq(part / scale, values, rcond=None)[0] / scale
        error = float(((part @ solution - values) ** 2).sum())
        if solution[0] > 0 and solution.min() >= 0 and error < least:
            best, least = np.zeros(columns.shape[1]), error
            best[:count] = solution
    return best
