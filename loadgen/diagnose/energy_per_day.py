"""Energy and cost per day, extrapolated from the window."""

from dataclasses import dataclass

import numpy as np

from loadgen.diagnose.analysis.findings import MOSTLY, Findings
from loadgen.diagnose.analysis.prospects import Prospects
from loadgen.diagnose.analysis.window import Window
from loadgen.model.power_model import PowerModel
from router.core.energy.joules import PowerLevels

DAY_S = 86400.0
JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True, slots=True)
class Energy:
    """Energy per day of the group's workers during their steps."""

    power_is: str  # ``measured``; ``modelled`` from calibrated levels; ``unknown`` without either
    power_w: float | None  # mean power of all workers together in steps; None: unknown
    per_day_j: float | None  # at the engines' present share of time in steps
    # Part of it spent waiting for the fullest worker, by calibrated levels.
    waiting_per_day_j: float | None
    # What the best policy would save for the same tokens; by calibrated levels, else by the paper's
    # P(u). None: no switch would pay. Negative: it takes more.
    saved_share: float | None
    saved_per_day_j: float | None
    price_per_kwh: float | None

    def money(self, joules: float | None) -> float | None:
        if joules is None or self.price_per_kwh is None:
            return None
        return joules / JOULES_PER_KWH * self.price_per_kwh


def energy(
    window: Window, found: Findings, prospects: Prospects | None, price_per_kwh: float | None
) -> Energy | None:
    """Energy of the window, scaled to a day; None without steps."""
    if not window.steps:
        return None
    idle_share = found.waiting.idle_share if found.barrier.there is not False else 0.0
    power_w, power_is = _power(window, idle_share)
    per_day_j = None if power_w is None else power_w * DAY_S * found.barrier.stepping_share
    waiting_j = saved_share = saved_j = None
    if per_day_j is not None and window.levels is not None and idle_share is not None:
        levels = window.levels
        waiting_j = per_day_j * levels.spin_w * idle_share / _mean_w(levels, idle_share)
    if prospects is not None:
        saved_share = 1 - _relative(window, found, prospects)
        saved_j = None if per_day_j is None else saved_share * per_day_j
    return Energy(power_is, power_w, per_day_j, waiting_j, saved_share, saved_j, price_per_kwh)


def _power(window: Window, idle_share: float | None) -> tuple[float | None, str]:
    """Of all workers in steps; and whether it is measured, modelled or unknown."""
    # Measured only if nearly every worker reported it at nearly every step.
    known = ~np.isnan(window.power_w)
    if known.sum() >= MOSTLY * window.counted.sum():
        sum_w = np.where(known, window.power_w, 0.0).sum(axis=0)
        filled_w = np.where(known, window.power_w, sum_w / np.maximum(1, known.sum(axis=0)))
        total_w = np.where(window.counted, filled_w, 0.0).sum(axis=1)
        return float(total_w @ window.step_s / window.step_s.sum()), "measured"
    if window.levels is not None and idle_share is not None:
        workers = window.worker_seconds / float(window.step_s.sum())
        return workers * _mean_w(window.levels, idle_share), "modelled"
    return None, "unknown"


def _mean_w(levels: PowerLevels, idle_share: float) -> float:
    return levels.spin_w * idle_share + levels.busy_w * (1 - idle_share)


def _relative(window: Window, found: Findings, prospects: Prospects) -> float:
    """Modelled energy per token with the best policy, relative to the present one."""
    best, now = prospects.best, found.waiting
    if window.levels is not None:
        assert now.idle_share is not None
        power = _mean_w(window.levels, best.predicted.idle_share)
        power /= _mean_w(window.levels, now.idle_share)
        return power * now.throughput_tok_s / best.predicted.throughput_tok_s
    current = prospects.current
    if current is not None:
        return best.energy_j_per_token / current.energy_j_per_token
    # Mean power of all workers in steps, by the paper's P(u).
    used = window.loads / np.maximum(1, window.peak_tokens)[:, np.newaxis]
    watts = np.where(window.counted, PowerModel().watts(used), 0.0).sum(axis=1)
    power_w = float(watts @ window.step_s / window.step_s.sum())
    return best.energy_j_per_token * now.throughput_tok_s / power_w
