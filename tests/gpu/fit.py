"""What is fitted to a GPU's measurements: step times and power, as the simulator reads them.

A step takes C + t_l * load + t_r * requests + t_p * prompt tokens. Every fit tells how far off it
is at each point.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Point:
    """Steps of one kind: medians.

    Attributes:
        requests: in the step.
        load_tokens: KV tokens resident.
        step_s: length of a step.
        steps: how many were measured.
        power_w: mean of the GPU; None where there is none.
        prompt_tokens: computed in the step.
    """

    requests: int
    load_tokens: float
    step_s: float
    steps: int
    power_w: float | None = None
    prompt_tokens: int = 0


Points = Mapping[str, Point]


def fit_decode(points: Points) -> dict[str, Any]:
    """C, t_l and t_r: least squares, C above zero and no cost below it; t_r only beside a t_l.

    Raises:
        ValueError: fewer than three points.
    """
    if len(points) < 3:
        raise ValueError(f"three numbers cannot be fitted to {len(points)} points")
    columns = np.array([(1.0, each.load_tokens, each.requests) for each in points.values()])
    seconds = np.array([each.step_s for each in points.values()])
    cost = _from_the_first(columns, seconds)
    return {
        **dict(zip(("base_s", "per_token_s", "per_request_s"), map(float, cost), strict=True)),
        **_quality(points, columns @ cost, seconds),
    }


def fit_prompts(points: Points, decode: Mapping[str, float]) -> dict[str, Any]:
    """t_p with the decode fit held, and C + t_p of steps of each kind by themselves.

    Where a step of prompts alone and one that decodes beside them differ by more than what is
    decoded, one t_p for both is not enough: the residuals show it.

    Args:
        points: with prompt tokens.
        decode: C, t_l and t_r.
    """
    alone = {name: each for name, each in points.items() if each.requests == 1}
    mixed = {name: each for name, each in points.items() if each.requests > 1}
    rest = np.array([_decode_s(decode, each) for each in points.values()])
    tokens = np.array([[float(each.prompt_tokens)] for each in points.values()])
    seconds = np.array([each.step_s for each in points.values()])
    cost = max(0.0, float(np.linalg.lstsq(tokens, seconds - rest, rcond=None)[0][0]))
    return {
        "per_prompt_token_s": cost,
        **_quality(points, rest + tokens[:, 0] * cost, seconds),
        "alone": _own_line(alone),
        "mixed": _own_line(mixed),
    }


def fit_power(points: Points, idle_w: float) -> dict[str, Any] | None:
    """P(u) = idle + (max - idle) * u ** exponent of u, the load by the largest one.

    Returns:
        None with fewer than two points above ``idle_w``.
    """
    known = {
        name: each
        for name, each in points.items()
        if each.power_w is not None and each.power_w > idle_w
    }
    if len(known) < 2:
        return None
    loads = np.array([each.load_tokens for each in known.values()])
    used = loads / loads.max()
    watts = np.array([each.power_w for each in known.values()], dtype=float)
    columns = np.column_stack((np.ones(len(known)), np.log(used)))
    logs = np.log(watts - idle_w)
    level, exponent = map(float, np.linalg.lstsq(columns, logs, rcond=None)[0])
    if exponent < 0:  # the load says nothing of it: one level is fitted to all
        level, exponent = float(logs.mean()), 0.0
    fitted = idle_w + float(np.exp(level)) * used**exponent
    return {
        "idle_w": idle_w,
        "max_w": idle_w + float(np.exp(level)),
        "exponent": exponent,
        **_quality(known, fitted, watts),
    }


def _decode_s(decode: Mapping[str, float], point: Point) -> float:
    of_load_s = decode["per_token_s"] * point.load_tokens
    return decode["base_s"] + of_load_s + decode["per_request_s"] * point.requests


def _own_line(points: Points) -> dict[str, Any] | None:
    """C + t_p * tokens of one kind of steps; what it decodes is in C."""
    if len(points) < 2:
        return None
    columns = np.array([(1.0, each.prompt_tokens) for each in points.values()])
    seconds = np.array([each.step_s for each in points.values()])
    cost = _from_the_first(columns, seconds)
    return {
        "base_s": float(cost[0]),
        "per_prompt_token_s": float(cost[1]),
        **_quality(points, columns @ cost, seconds),
    }


def _quality(names: Sequence[str] | Points, fitted: Floats, measured: Floats) -> dict[str, Any]:
    """How well it fits; a residual is what the fit is too high by, as a share of the measured."""
    wrong = fitted - measured
    spread = float(((measured - measured.mean()) ** 2).sum())
    shares = wrong / measured
    return {
        "r_squared": 1 - float((wrong**2).sum()) / spread if spread else 1.0,
        "largest_relative_error": float(np.abs(shares).max()),
        "residuals": dict(zip(names, map(float, shares), strict=True)),
    }


def _from_the_first(columns: Floats, values: Floats) -> Floats:
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
