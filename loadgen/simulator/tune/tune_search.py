"""Search for the best H, gamma, mu and lead of BF-IO by short simulations."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from loadgen.report.intervals import Estimate, paired

# Effective look-aheads 1 / (1 - gamma) in steps, and tie weights, of the first, coarse grid.
_WINDOWS = (2.0, 3.0, 5.0, 10.0, 20.0)
_TIE_WEIGHTS = (1e-5, 1e-4, 1e-3, 1e-2)
_PLAIN_HORIZONS = (4, 8)
_BLIND_TIE_WEIGHTS = (1e-3, 1e-2, 0.03, 0.1, 0.3, 1.0)
_WINDOWS_SEEN = 4.0  # the horizon, in effective look-aheads
_KEPT = 4  # of the coarse grid, to be refined
_ROUNDS = 4  # of refinement at most
LONGEST_HORIZON = 200


@dataclass(frozen=True, slots=True)
class Setting:
    """As ``router.core.forecast.look_ahead.Parameters``; lead None: by the rule."""

    horizon: int
    discount: float
    tie_weight: float
    lead_tokens: float | None = None

    @property
    def flags(self) -> str:
        """Options of ``serve``, where the lead is the rule's."""
        return (
            f"--horizon {self.horizon} --discount {self.discount:g} "
            f"--tie-weight {self.tie_weight:g}"
        )

    @property
    def simulation_flags(self) -> str:
        """Options of ``simulate decode``."""
        lead = "" if self.lead_tokens is None else f" --lead {self.lead_tokens:g}"
        return f"{self.flags}{lead}"


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of one simulation: imbalance in tokens, throughput in tokens per second."""

    imbalance_tokens: float
    throughput_tok_s: float
    used: Setting  # parameters in force, including the lead


# One simulation with a setting, or with the rule's (None), and a seed.
Measure = Callable[[Setting | None, int], Trial]
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Tuned:
    """Result of a search."""

    best: Setting  # of the least mean imbalance over the seeds of the search
    tried: Mapping[Setting, float]  # mean imbalance in tokens, over a setting's last set of seeds
    # With seeds outside the search, the same for both.
    rule_trials: Sequence[Trial]
    best_trials: Sequence[Trial]

    def difference(self, metric: str) -> Estimate:
        """Relative difference of the best from the rule, of paired seeds."""
        return paired(each_of(self.best_trials, metric), each_of(self.rule_trials, metric))

    @property
    def change(self) -> bool:
        """Whether the best has significantly less imbalance than the rule."""
        imbalance = self.difference("imbalance_tokens")
        return imbalance.mean < 0 and imbalance.surely_not_zero


def each_of(trials: Sequence[Trial], metric: str) -> list[float]:
    """A metric of every trial."""
    return [getattr(trial, metric) for trial in trials]


@dataclass(slots=True)
class Search:
    """Coarse grid, refinement around the best, then a comparison with the rule on fresh seeds."""

    measure: Measure
    seeds: int  # seeds of the search; the comparison uses as many others
    foresees: bool  # whether ends are predicted at all; then horizons above 0 are tried too
    tell: Tell = lambda _: None
    _trials: dict[tuple[Setting, int], Trial] = field(default_factory=dict)

    def run(self) -> Tuned:
        tried = self._means(coarse(self.foresees), 1, "coarse grid")
        kept = sorted(tried, key=tried.__getitem__)[:_KEPT]
        finer = self._means(kept, self.seeds, "the best of it")
        for number in range(1, _ROUNDS + 1):
            best = min(finer, key=finer.__getitem__)
            lead_tokens = self._trial(best, 0).used.lead_tokens or 0.0
            fresh = [setting for setting in near(best, lead_tokens) if setting not in finer]
            finer |= self._means(fresh, self.seeds, f"refinement {number}")
            if min(finer, key=finer.__getitem__) == best:
                break
        best = min(finer, key=finer.__getitem__)
        self.tell(f"the rule and the best on {self.seeds} fresh seeds")
        seeds = range(self.seeds, 2 * self.seeds)
        rule_trials = [self.measure(None, seed) for seed in seeds]
        best_trials = [self.measure(best, seed) for seed in seeds]
        return Tuned(best, tried | finer, rule_trials, best_trials)

    def _means(self, settings: Sequence[Setting], seeds: int, what: str) -> dict[Setting, float]:
        found = {}
        for number, setting in enumerate(settings, 1):
            imbalances = [self._trial(setting, seed).imbalance_tokens for seed in range(seeds)]
            found[setting] = fmean(imbalances)
            tried = f"{what} {number}/{len(settings)}: {setting.simulation_flags}"
            self.tell(f"{tried}: {found[setting]:,.0f}")
        return found

    def _trial(self, setting: Setting, seed: int) -> Trial:
        key = (setting, seed)
        if key not in self._trials:
            self._trials[key] = self.measure(setting, seed)
        return self._trials[key]


def coarse(foresees: bool) -> list[Setting]:
    """First grid; without predictions every horizon above 0 loses, so only mu varies."""
    blind = [Setting(0, 1.0, mu) for mu in _BLIND_TIE_WEIGHTS]
    if not foresees:
        return blind
    plain = [Setting(horizon, 1.0, 1e-4) for horizon in _PLAIN_HORIZONS]
    return [
        *blind,
        *plain,
        *(_windowed(window, mu) for window in _WINDOWS for mu in _TIE_WEIGHTS),
    ]


def near(setting: Setting, lead_tokens: float) -> list[Setting]:
    """Settings one step away in each direction."""
    ratio = 2.0 if setting.horizon == 0 else 3.0
    found = [
        replace(setting, tie_weight=_rounded(setting.tie_weight * by)) for by in (1 / ratio, ratio)
    ]
    if lead_tokens > 0:
        found += [replace(setting, lead_tokens=_rounded(lead_tokens * by)) for by in (0.5, 1.6)]
    if setting.horizon > 0:
        shorter = max(1, math.floor(setting.horizon / 1.5))
        longer = min(math.ceil(setting.horizon * 1.5), LONGEST_HORIZON)
        others = [other for other in (shorter, longer) if other != setting.horizon]
        found += [replace(setting, horizon=other) for other in others]
    if setting.discount < 1:
        window = 1 / (1 - setting.discount)
        moved = [_windowed(window * by, setting.tie_weight) for by in (0.75, 1.33)]
        found += [replace(each, lead_tokens=setting.lead_tokens) for each in moved]
    return found


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _windowed(window: float, tie_weight: float) -> Setting:
    window = max(window, 1.05)
    return Setting(math.ceil(_WINDOWS_SEEN * window), round(1 - 1 / window, 3), tie_weight)
