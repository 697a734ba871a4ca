"""The cost of a group's step, learned from its own steps.

A step lasts ``C + max_g (t_l L_g + t_r n_g + t_p P_g)``: the slowest rank's row of KV tokens,
requests and prompt tokens, if that rank is known. Engines that time their wait tell which it was;
else it is the one with the most work by the present fit, so rows and fit are found in turn. Of a
step only rows are kept that could be the slowest.

The fit is least squares over the last steps. Errors are relative to the step, since long steps vary
more; decode-only steps and steps with prompts have a spread each. Steps that lie far off, hiccups
of an engine, are left out. A Gaussian prior, by which each term alone explains everything, decides
where the data do not: what always comes together, as requests and their tokens may, shares its
cost, and the intervals say so. No cost is negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from router.core.step_time import StepTime

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

MEMORY_STEPS = 2048
"""Steps that the fit remembers."""

LEAST_STEPS = 64
"""Steps before the first fit; later ones come as steps grow in number, down to 8 in the memory."""

NUMBERS = ("base_s", "per_token_s", "per_request_s", "per_prompt_token_s")

EXTRAS = ("prompt_context", "with_prompts", "graph_batch")
"""Terms beside the four numbers: prompt tokens computed times the tokens before them, whether any
rank computes prompts, and the largest batch, padded to a size of CUDA graphs."""

_REFITS = 8  # in the memory
_ROWS = 4  # of a step
_WIDTH = 3  # a row's values that always count: tokens, requests, prompt tokens
# Every choice of further terms; the first has none.
_CHOICES = np.array(
    [(True,) * _WIDTH + more for more in product((False, True), repeat=len(EXTRAS))]
)
_SHUT = 1e12  # precision of a cost that must be 0, against those of the data
_Z95 = 1.96
# The four explain the steps if their F statistic is above.
_SURE = 16.0
_LEAST_SPREAD = 1e-5  # relative; below, clocks make the difference
# A hiccup is this many standard deviations off. At most a share of the steps are hiccups.
_FAR, _MOST_HICCUPS = 6.0, 0.05
_FEW = 4  # steps whose own spread says nothing
_FIRST_TURNS, _TURNS = 12, 1
_GOOD = 0.8  # share explained, of all steps
# The engine has changed: errors of the last blocks, as a share of the step and of those before.
_CHANGED, _TIMES = 0.03, 3.0
# A further term earns its place by this much of the error on steps that were not learned yet.
_EARNS, _NO_WORSE = 0.97, 1.02
_JUDGED_STEPS = 512
# A number is known if its interval moves a step by no more than this share, either way.
_KNOWN = 0.1


@dataclass(frozen=True, slots=True)
class FittedStepTime(StepTime):
    """A learned step time.

    Attributes:
        intervals: 95 % intervals of the four ``NUMBERS``, from 0 up.
        known: those of the four that the steps tell; the others are guesses, by which steps like
            the present ones are predicted as well.
        explained: share of the variance of step times that the four explain, 0 to 1.
        extras: cost of those of ``EXTRAS`` that predict better, seconds per unit.
        decode_error, prompt_error: median error of predicting a step before it was learned, as a
            share of it, of steps without and with prompts; None: too few.
    """

    intervals: tuple[tuple[float, float], ...] = ((0.0, 0.0),) * 4
    known: tuple[str, ...] = ()
    explained: float = 0.0
    extras: tuple[tuple[str, float], ...] = ()
    decode_error: float | None = None
    prompt_error: float | None = None


_Row = tuple[int, int, int, float]


class _Steps(NamedTuple):
    """N steps, each with the rows that could be the slowest; one may stand there several times.

    Attributes:
        rows: shape (N, 4, 4), tokens, requests, prompt tokens, and these times those before them.
        shared: shape (N, 2), whether any rank has prompts, and the largest batch.
        seconds: shape (N,).
    """

    rows: Floats
    shared: Floats
    seconds: Floats

    def last(self, count: int) -> _Steps:
        return _Steps(*(part[-count:] for part in self))

    def terms(self, costs: Floats) -> Floats:
        """Of the slowest rows by these costs; shape (N, terms)."""
        slowest = (self.rows[:, :, :_WIDTH] @ costs[1 : _WIDTH + 1]).argmax(axis=1)
        return np.concatenate((self.rows[np.arange(len(slowest)), slowest], self.shared), axis=1)


class StepFit:
    """Learns a group's step time; ``fitted`` is None while it is unknown."""

    def __init__(self) -> None:
        self.fitted: FittedStepTime | None = None
        self._pending: list[tuple[list[_Row], tuple[int, int], float]] = []
        self._steps = _Steps(np.zeros((0, _ROWS, _WIDTH + 1)), np.zeros((0, 2)), np.zeros(0))
        self._solution: _Solution | None = None
        self._costs: Floats | None = None  # of every choice of terms
        # Errors of predictions, by choice of terms, without and with prompts: sums, and how many.
        self._misses, self._judged = np.zeros((len(_CHOICES), 2)), np.zeros(2)
        self._kept = 0
        self._recent: Floats = np.zeros((0, len(_CHOICES) + 1))  # the last; whether with prompts

    def observe(
        self,
        loads: Sequence[int],
        running: Sequence[int],
        prompts: Sequence[int],
        contexts: Sequence[float],
        step_s: float,
        *,
        slowest: int | None = None,
        likely: int | None = None,
    ) -> None:
        """Add a step.

        Args:
            loads: KV tokens of each rank.
            running: its requests.
            prompts: prompt tokens that it computed.
            contexts: each of these times the tokens before it, summed.
            step_s: duration.
            slowest: the rank that the others have waited for; None: unknown.
            likely: that rank by the present fit.
        """
        if step_s <= 0:
            return
        batch, prompt_tokens = max(running), max(prompts)
        if slowest is not None:
            places = {slowest}
        else:
            places = {loads.index(max(loads)), running.index(batch)}
            if prompt_tokens:
                places.add(prompts.index(prompt_tokens))
            if likely is not None:
                places.add(likely)
        rows: list[_Row] = [(loads[i], running[i], prompts[i], contexts[i]) for i in places]
        rows += rows[:1] * (_ROWS - len(rows))
        self._pending.append((rows, (prompt_tokens > 0, graph_size(batch)), step_s))
        if len(self._pending) >= max(LEAST_STEPS, len(self._steps.seconds) // _REFITS):
            self._learn()

    def finish(self) -> FittedStepTime | None:
        """Learn from the steps since the last fit too; ``fitted``."""
        if self._pending and len(self._pending) + len(self._steps.seconds) >= LEAST_STEPS:
            self._learn()
        return self.fitted

    def _learn(self) -> None:
        new = _Steps(*(np.array(part, np.float64) for part in zip(*self._pending, strict=True)))
        self._pending.clear()
        if self._costs is not None:
            self._judge(new, self._costs)
        both = zip(self._steps, new, strict=True)
        self._steps = _Steps(*(np.concatenate(parts)[-MEMORY_STEPS:] for parts in both))
        solution = _solved(self._steps, self._solution)
        if _changed(self._steps, solution, len(new.seconds)):
            self._steps = self._steps.last(len(new.seconds))
            self._misses[:], self._judged[:], self._recent = 0.0, 0.0, self._recent[:0]
            solution = _solved(self._steps, None)
        self._solution = solution
        self._costs = _with_extras(self._steps, solution)
        self.fitted = self._described(solution, self._costs)

    def _judge(self, new: _Steps, costs: Floats) -> None:
        """Predict steps that are not learned yet."""
        predicted = costs[:, :1] + costs[:, 1:] @ new.terms(costs[0]).T
        missed = np.minimum(1.0, np.abs(predicted / new.seconds - 1))
        kinds = np.stack((1 - new.shared[:, 0], new.shared[:, 0]), axis=1)
        remembered = 1 - len(kinds) / MEMORY_STEPS
        self._misses = remembered * self._misses + missed @ kinds
        self._judged = remembered * self._judged + kinds.sum(axis=0)
        told = np.concatenate((missed.T, new.shared[:, :1]), axis=1)
        self._recent = np.concatenate((self._recent, told))[-MEMORY_STEPS:]
        if self._judged.sum() < _JUDGED_STEPS:
            self._kept = 0
            return
        seen = self._judged >= LEAST_STEPS
        shares = self._misses[:, seen] / np.maximum(self._misses[0, seen], 1e-12)
        worth = shares.mean(axis=1) / _EARNS ** (_CHOICES.sum(axis=1) - _WIDTH)
        worth[(shares > _NO_WORSE).any(axis=1)] = np.inf
        self._kept = int(worth.argmin())

    def _described(self, found: _Solution, costs: Floats) -> FittedStepTime | None:
        """None if the steps do not follow the four."""
        count = int(found.kept.sum())
        if found.explained * max(0, count - 4) <= _SURE * 3 * (1 - found.explained):
            return None
        numbers, errors = found.costs, _Z95 * found.errors
        low, high = np.maximum(0.0, numbers - errors), np.maximum(0.0, found.free + errors)
        high = np.maximum(high, numbers)
        known = errors * found.usual <= _KNOWN * self._steps.seconds[found.kept].mean()
        extras = zip(EXTRAS, costs[self._kept, _WIDTH + 1 :].tolist(), strict=True)
        return FittedStepTime(
            **dict(zip(NUMBERS, numbers.tolist(), strict=True)),
            intervals=tuple(zip(low.tolist(), high.tolist(), strict=True)),
            known=tuple(name for name, is_ in zip(NUMBERS, known, strict=True) if is_),
            explained=_explained(self._steps.seconds, found),
            extras=tuple((name, cost) for name, cost in extras if cost > 0),
            decode_error=_median(self._recent[self._recent[:, -1] == 0, self._kept]),
            prompt_error=_median(self._recent[self._recent[:, -1] > 0, self._kept]),
        )


class _Solution(NamedTuple):
    """The four numbers that fit some steps.

    Attributes:
        costs: shape (4,), the numbers.
        free: the same, if they could be negative.
        errors: their standard errors.
        usual: what they are multiplied by in a usual step; infinite if it never varies.
        explained: weighted share of the variance explained.
        off: shape (N,), residuals as a share of the predicted step.
        weights: shape (N,), 1 / variance of a step; 0: a hiccup.
        terms: shape (N, terms), of the slowest rows.
    """

    costs: Floats
    free: Floats
    errors: Floats
    usual: Floats
    explained: float
    off: Floats
    weights: Floats
    terms: Floats

    @property
    def kept(self) -> Flags:
        return self.weights > 0


def graph_size(batch: int) -> int:
    """Batch to which vLLM pads a decode step, by the default sizes of its CUDA graphs."""
    if batch <= 2:
        return batch
    every = 4 if batch <= 4 else 8 if batch <= 256 else 16
    return -(-batch // every) * every


def _solved(steps: _Steps, before: _Solution | None) -> _Solution:
    """Find the slowest rows and their costs in turn; without a good fit before, from both ends.

    A fit with the wrong rows takes the steps that would correct it for hiccups.
    """
    found = [] if before is None else [_turned(steps, before.costs, _TURNS)]
    if found and _explained(steps.seconds, found[0]) >= _GOOD:
        return found[0]
    typical_s = float(np.median(steps.seconds))
    by_tokens, by_prompts = np.array(((typical_s, 1e-9, 0, 0), (typical_s, 1e-12, 0, 1e-9)))
    found += [_turned(steps, costs, _FIRST_TURNS) for costs in (by_tokens, by_prompts)]
    return min(found, key=lambda each: float(np.minimum(1.0, np.abs(each.off)).mean()))


def _turned(steps: _Steps, costs: Floats, turns: int) -> _Solution:
    seconds, with_prompts = steps.seconds, steps.shared[:, 0] > 0
    least_s = 0.1 * float(np.median(seconds))
    if turns == _FIRST_TURNS:  # costs that only order the rows
        terms, predicted = steps.terms(costs), np.full_like(seconds, costs[0])
        spread, kept = np.ones_like(seconds), np.ones(len(seconds), np.bool_)
    else:
        terms, predicted, off = _residuals(steps, costs, least_s)
        spread, kept = _spread(off, with_prompts)
    for _ in range(turns):
        weights = kept / (predicted * spread) ** 2
        found = _least_squares(terms[:, :_WIDTH], seconds, weights)
        terms, predicted, off = _residuals(steps, found.costs, least_s)
        spread, kept = _spread(off, with_prompts)
        if (np.abs(found.costs - costs) <= 1e-6 * costs).all():
            break
        costs = found.costs
    return found._replace(off=off, terms=terms)


def _residuals(steps: _Steps, costs: Floats, least_s: float) -> tuple[Floats, Floats, Floats]:
    """Terms of the slowest rows, predicted seconds, and the relative residuals."""
    terms = steps.terms(costs)
    predicted = np.maximum(least_s, costs[0] + terms[:, :_WIDTH] @ costs[1:])
    return terms, predicted, steps.seconds / predicted - 1


def _spread(off: Floats, with_prompts: Flags) -> tuple[Floats, Flags]:
    """Robust standard deviation of each step's kind, and which steps are no hiccups."""
    far = np.abs(off)
    spread, bound = np.empty((2, len(off)))
    for kind in (with_prompts, ~with_prompts):
        some = far[kind]
        few = len(some) < _FEW
        ranked = np.sort(far if few else some)
        deviation = max(_LEAST_SPREAD, 1.4826 * float(ranked[len(ranked) // 2]))
        most = max(_FAR * deviation, float(ranked[-1 - int(_MOST_HICCUPS * len(ranked))]))
        spread[kind], bound[kind] = deviation, np.inf if few else most
    return spread, far <= bound


class _Normal(NamedTuple):
    """Normal equations of weighted least squares, centred and scaled.

    Attributes:
        mean_s, deviation_s: weighted, of the seconds.
        means, scales: of each term; what the step varies by if a scaled cost is 1.
        varies: whether a term does.
        scaled: shape (N, terms), the centred terms over their scales.
        gram, moments: left and right side.
    """

    mean_s: float
    deviation_s: float
    means: Floats
    scales: Floats
    varies: Flags
    scaled: Floats
    gram: Floats
    moments: Floats


def _normal(terms: Floats, seconds: Floats, weights: Floats) -> _Normal:
    share = weights / weights.sum()
    means, mean_s = share @ terms, float(share @ seconds)
    centred, late = terms - means, seconds - mean_s
    scales = np.sqrt(share @ centred**2)
    deviation_s = max(_LEAST_SPREAD * mean_s, float(np.sqrt(share @ late**2)))
    varies = scales > 1e-9 * np.abs(means)
    # A term that never varies may be any part of C.
    constant = np.where(means > 0, means * deviation_s / mean_s, 1.0)
    scales = np.where(varies, scales, np.maximum(constant, 1e-300))
    scaled = np.where(varies, centred, 0.0) / scales
    weighted = scaled * weights[:, None]
    return _Normal(
        mean_s, deviation_s, means, scales, varies, scaled, weighted.T @ scaled, weighted.T @ late
    )


def _costs(normal: _Normal, prior: float, open_: Flags) -> Floats:
    """The costs of several choices of terms, none below 0; shape (choices, 1 + terms)."""
    shut = ~(open_ & normal.varies)
    size = len(normal.means)
    hard = _SHUT * (np.trace(normal.gram) + prior)
    while True:
        left = normal.gram + (prior + hard * shut)[:, :, None] * np.eye(size)
        scaled = np.linalg.solve(left, np.broadcast_to(normal.moments[:, None], (*shut.shape, 1)))
        scaled = np.where(shut, 0.0, scaled[:, :, 0])
        worst = scaled.argmin(axis=1)
        below = scaled[np.arange(len(shut)), worst] < 0
        if not below.any():
            break
        shut[below, worst[below]] = True
    costs = scaled / normal.scales
    base_s = np.maximum(0.0, normal.mean_s - costs @ normal.means)
    return np.concatenate((base_s[:, None], costs), axis=1)


def _least_squares(terms: Floats, seconds: Floats, weights: Floats) -> _Solution:
    normal = _normal(terms, seconds, weights)
    prior = 1 / normal.deviation_s**2
    costs = _costs(normal, prior, np.ones((1, _WIDTH), np.bool_))[0]
    # Errors as if costs could be negative: robust to steps that vary unequally.
    inverse = np.linalg.inv(normal.gram + prior * np.eye(_WIDTH))
    free = inverse @ normal.moments / normal.scales
    free = np.array((normal.mean_s - free @ normal.means, *free))
    pull = (seconds - free[0] - terms @ free[1:]) * weights
    slopes = normal.scaled @ inverse * pull[:, None] / normal.scales
    influence = np.concatenate(
        ((pull / weights.sum() - slopes @ normal.means)[:, None], slopes), axis=1
    )
    kept = int(np.count_nonzero(weights))
    guessed = prior * inverse @ inverse / np.outer(normal.scales, normal.scales)
    shift = np.concatenate((-normal.means[None], np.eye(_WIDTH)))
    cover = influence.T @ influence * (kept / max(1, kept - 4)) + shift @ guessed @ shift.T
    left = weights @ (seconds - costs[0] - terms @ costs[1:]) ** 2
    whole = weights @ (seconds - normal.mean_s) ** 2
    varied = normal.deviation_s > _LEAST_SPREAD * normal.mean_s
    present = terms > 0
    usual = terms.sum(axis=0) / np.maximum(1.0, present.sum(axis=0))
    return _Solution(
        costs=costs,
        free=free,
        errors=np.sqrt(np.diag(cover)),
        usual=np.array((1.0, *np.where(normal.varies, usual, np.inf))),
        explained=max(0.0, 1 - float(left / whole)) if varied else 0.0,
        off=seconds,
        weights=weights,
        terms=terms,
    )


def _with_extras(steps: _Steps, found: _Solution) -> Floats:
    """Costs of every choice of terms; the first are the four."""
    normal = _normal(found.terms, steps.seconds, found.weights)
    costs = _costs(normal, 1 / normal.deviation_s**2, _CHOICES)
    costs[0, : _WIDTH + 1] = found.costs
    return costs


def _changed(steps: _Steps, found: _Solution, count: int) -> bool:
    """Whether the last steps follow another law than those before."""
    far = np.abs(found.off)
    recent, before = far[-count:], far[:-count]
    if not len(before):
        return False
    missed = float(np.median(recent))
    if missed < max(_CHANGED, _TIMES * float(np.median(before))):
        return False
    alone = _solved(steps.last(count), None)
    return _TIMES * float(np.median(np.abs(alone.off))) < missed


def _explained(seconds: Floats, found: _Solution) -> float:
    seconds, terms = seconds[found.kept], found.terms[found.kept, :_WIDTH]
    left = seconds - found.costs[0] - terms @ found.costs[1:]
    return max(0.0, 1 - float(left @ left) / max(1e-300, float(seconds.var()) * len(seconds)))


def _median(values: Floats) -> float | None:
    return float(np.median(values)) if len(values) >= LEAST_STEPS else None
