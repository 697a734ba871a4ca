"""Least squares for the cost of a step: slowest rows and costs, found in turn."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

EXTRAS = ("prompt_context", "with_prompts", "graph_batch")
"""Terms beside the four numbers: prompt tokens computed times the tokens before them, whether any
rank computes prompts, and the largest batch, padded to a size of CUDA graphs."""

ROWS = 5  # of a step
WIDTH = 3  # a row's values that always count: tokens, requests, prompt tokens
# Every choice of further terms; the first has none.
CHOICES = np.array([(True,) * WIDTH + more for more in product((False, True), repeat=len(EXTRAS))])
_SHUT = 1e12  # precision of a cost that must be 0, against those of the data
_APART = 1e-12  # least part of a term that no other explains; without it equations may be singular
_LEAST_SPREAD = 1e-5  # relative; below, clocks make the difference
# A hiccup is this many standard deviations off. At most a share of the steps are hiccups.
_FAR, _MOST_HICCUPS = 6.0, 0.05
FEW = 4  # steps that say nothing by themselves
# Turns from both ends, at first and later; the first of them leave no step out.
_FIRST_TURNS, _AGAIN_TURNS, _ALL_TURNS = 12, 4, 2
_GOOD, _BETTER = 0.8, 0.95  # share explained; errors of a fit with other rows
# The engine has changed: errors of the last blocks, as a share of the step and of those before.
_CHANGED, _TIMES = 0.03, 3.0


class Steps(NamedTuple):
    """N steps, each with the rows that could be the slowest; one may stand there several times.

    Attributes:
        rows: shape (N, ``ROWS``, 4), tokens, requests, prompt tokens, and these times those before
            them.
        shared: shape (N, 2), whether any rank has prompts, and the largest batch.
        seconds: shape (N,).
    """

    rows: Floats
    shared: Floats
    seconds: Floats

    def last(self, count: int) -> Steps:
        return Steps(*(part[-count:] for part in self))

    def remembered(self, count: int, with_prompts: int) -> Steps:
        """The last steps, and the last with prompts, however long ago those are."""
        prompts = np.flatnonzero(self.shared[:, 0])[-with_prompts:]
        older = prompts[prompts < len(self.seconds) - count]
        return Steps(*(np.concatenate((part[older], part[-count:])) for part in self))

    def terms(self, costs: Floats) -> Floats:
        """Of the slowest rows by these costs; shape (N, terms)."""
        rows = self.rows.reshape(-1, WIDTH + 1)
        work = _times(rows[:, :WIDTH], costs[1 : WIDTH + 1])
        slowest = work.reshape(-1, ROWS).argmax(axis=1)
        slowest += np.arange(0, len(rows), ROWS)
        return np.concatenate((rows.take(slowest, axis=0), self.shared), axis=1)


class Solution(NamedTuple):
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

    @property
    def shorter(self) -> int:
        """Steps left out that are shorter than it predicts; a hiccup makes them longer.

        They may tell of another fit: as where nearly all steps had the same prompt tokens up to
        now, and the first with fewer tell what those cost.
        """
        return int(np.count_nonzero(~self.kept & (self.off < 0)))


def solved(steps: Steps, before: Solution | None = None) -> Solution:
    """Find the slowest rows and their costs in turn; from both ends without a fit before."""
    return from_both_ends(steps) if before is None else _turned(steps, before.costs)


def poor(steps: Steps, found: Solution) -> bool:
    """Whether it explains so little that its rows may be wrong.

    Such a fit takes the steps that would correct it for hiccups.
    """
    return explained_share(steps.seconds, found) < _GOOD


def from_both_ends(steps: Steps, before: Solution | None = None) -> Solution:
    """Begin with the fullest ranks as the slowest, and with those with the most prompt tokens.

    Returns:
        The better one, or the fit before unless that is clearly worse.
    """
    typical_s = middle_of(steps.seconds)
    by_tokens, by_prompts = np.array(((typical_s, 1e-9, 0, 0), (typical_s, 1e-12, 0, 1e-9)))
    turns = _FIRST_TURNS if before is None else _AGAIN_TURNS
    found = min((_turned(steps, costs, turns) for costs in (by_tokens, by_prompts)), key=_missed)
    if before is not None and _missed(found) > _BETTER * _missed(before):
        return before
    return found


def _missed(found: Solution) -> float:
    return float(np.minimum(1.0, np.abs(found.off)).mean())


def _turned(steps: Steps, costs: Floats, turns: int = 0) -> Solution:
    """So many turns after these costs, which only order the rows; 0: one after a fit's own."""
    seconds, with_prompts = steps.seconds, steps.shared[:, 0] > 0
    # Of a short step, since those without prompts may take a twentieth of the median; a single one
    # may be wrong.
    short = len(seconds) // 100
    least_s = max(0.1 * float(np.partition(seconds, short)[short]), 1e-3 * middle_of(seconds))
    if turns:
        terms, predicted = steps.terms(costs), np.full_like(seconds, costs[0])
        spread, kept = np.ones_like(seconds), np.ones(len(seconds), np.bool_)
    else:
        terms, predicted, off = _residuals(steps, costs, least_s)
        spread, kept = _spread(off, with_prompts)
    for turn in range(turns or 1):
        # The first fits are too poor to tell which steps are hiccups.
        weights = (kept | (turn < min(turns, _ALL_TURNS))) / (predicted * spread) ** 2
        found = _least_squares(terms[:, :WIDTH], seconds, weights)
        terms, predicted, off = _residuals(steps, found.costs, least_s)
        spread, kept = _spread(off, with_prompts)
        settled = (np.abs(found.costs - costs) <= 1e-6 * costs).all()
        if settled and turn >= min(turns, _ALL_TURNS):
            break
        costs = found.costs
    return found._replace(off=off, terms=terms)


def _residuals(steps: Steps, costs: Floats, least_s: float) -> tuple[Floats, Floats, Floats]:
    """Terms of the slowest rows, predicted seconds, and the relative residuals."""
    terms = steps.terms(costs)
    predicted = np.maximum(least_s, costs[0] + _times(terms[:, :WIDTH], costs[1:]))
    return terms, predicted, steps.seconds / predicted - 1


def _spread(off: Floats, with_prompts: Flags) -> tuple[Floats, Flags]:
    """Robust standard deviation of each step's kind, and which steps are no hiccups."""
    far = np.abs(off)
    spread, bound = np.empty((2, len(off)))
    for kind in (with_prompts, ~with_prompts):
        some = far[kind]
        few = len(some) < FEW
        among = far if few else some
        middle, high = len(among) // 2, len(among) - 1 - int(_MOST_HICCUPS * len(among))
        ranked = np.partition(among, (middle, high))
        deviation = max(_LEAST_SPREAD, 1.4826 * float(ranked[middle]))
        most = max(_FAR * deviation, float(ranked[high]))
        spread[kind], bound[kind] = deviation, np.inf if few else most
    return spread, far <= bound


class _Normal(NamedTuple):
    """Normal equations of weighted least squares, centred and scaled.

    Attributes:
        total: sum of the weights.
        mean_s, deviation_s: weighted, of the seconds.
        means, scales: of each term; what the step varies by if a scaled cost is 1.
        varies: whether a term does.
        scaled: shape (N, terms), the centred terms over their scales.
        gram, moments: left and right side.
    """

    total: float
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
    means, mean_s = _times(terms.T, share), float(share @ seconds)
    centred, late = terms - means, seconds - mean_s
    scales = np.sqrt(_times((centred**2).T, share))
    deviation_s = max(_LEAST_SPREAD * mean_s, float(np.sqrt(share @ late**2)))
    varies = scales > 1e-9 * np.abs(means)
    # A term that never varies may be any part of C.
    constant = np.where(means > 0, means * deviation_s / mean_s, 1.0)
    scales = np.where(varies, scales, np.maximum(constant, 1e-300))
    scaled = np.where(varies, centred, 0.0) / scales
    weighted = scaled * weights[:, None]
    return _Normal(
        float(weights.sum()),
        mean_s,
        deviation_s,
        means,
        scales,
        varies,
        scaled,
        weighted.T @ scaled,
        _times(weighted.T, late),
    )


def _costs(normal: _Normal, prior: float, open_: Flags) -> Floats:
    """The costs of several choices of terms, none below 0; shape (choices, 1 + terms)."""
    never = ~(open_ & normal.varies)
    shut, no_base = never.copy(), np.zeros(len(never), np.bool_)
    size = len(normal.means)
    hard = _SHUT * (np.trace(normal.gram) + prior)
    # Without C the same equations hold uncentred.
    level = np.where(normal.varies, normal.means / normal.scales, 0.0)
    whole = normal.total * np.outer(level, level), normal.total * normal.mean_s * level
    while True:
        left = normal.gram + (prior + hard * shut)[:, :, None] * np.eye(size)
        left += no_base[:, None, None] * whole[0]
        left *= 1 + _APART * np.eye(size)
        right = normal.moments + no_base[:, None] * whole[1]
        scaled = np.where(shut, 0.0, np.linalg.solve(left, right[:, :, None])[:, :, 0])
        base_s = normal.mean_s - (scaled / normal.scales) @ normal.means
        worst = scaled.argmin(axis=1)
        below = scaled[np.arange(len(shut)), worst] < 0
        shut[below, worst[below]] = True
        sunk = ~below & ~no_base & (base_s < 0)
        # Costs that were shut beside a C may be none without it.
        shut[sunk], no_base = never[sunk], no_base | sunk
        if not (below | sunk).any():
            break
    base_s[no_base] = 0.0
    return np.concatenate((base_s[:, None], scaled / normal.scales), axis=1)


def _least_squares(terms: Floats, seconds: Floats, weights: Floats) -> Solution:
    normal = _normal(terms, seconds, weights)
    prior = 1 / normal.deviation_s**2
    costs = _costs(normal, prior, np.ones((1, WIDTH), np.bool_))[0]
    # Errors as if costs could be negative: robust to steps that vary unequally.
    inverse = np.linalg.inv((normal.gram + prior * np.eye(WIDTH)) * (1 + _APART * np.eye(WIDTH)))
    free = inverse @ normal.moments / normal.scales
    free = np.array((normal.mean_s - free @ normal.means, *free))
    pull = (seconds - free[0] - _times(terms, free[1:])) * weights
    slopes = normal.scaled @ inverse
    # Residuals as if the step had not been learned: one that alone tells a cost would have none.
    leverage = (1 / normal.total + np.einsum("ij,ij->i", slopes, normal.scaled)) * weights
    pull /= np.maximum(1e-9, 1 - leverage)
    slopes *= pull[:, None] / normal.scales
    influence = np.concatenate(
        ((pull / normal.total - _times(slopes, normal.means))[:, None], slopes), axis=1
    )
    guessed = prior * inverse @ inverse / np.outer(normal.scales, normal.scales)
    shift = np.concatenate((-normal.means[None], np.eye(WIDTH)))
    cover = influence.T @ influence + shift @ guessed @ shift.T
    left = weights @ (seconds - costs[0] - _times(terms, costs[1:])) ** 2
    whole = weights @ (seconds - normal.mean_s) ** 2
    varied = normal.deviation_s > _LEAST_SPREAD * normal.mean_s
    present = terms > 0
    usual = terms.sum(axis=0) / np.maximum(1.0, present.sum(axis=0))
    return Solution(
        costs=costs,
        free=free,
        errors=np.sqrt(np.diag(cover)),
        usual=np.array((1.0, *np.where(normal.varies, usual, np.inf))),
        explained=max(0.0, 1 - float(left / whole)) if varied else 0.0,
        off=seconds,
        weights=weights,
        terms=terms,
    )


def with_extras(steps: Steps, found: Solution) -> Floats:
    """Costs of every choice of terms; the first are the four."""
    normal = _normal(found.terms, steps.seconds, found.weights)
    costs = _costs(normal, 1 / normal.deviation_s**2, CHOICES)
    costs[0, : WIDTH + 1] = found.costs
    return costs


def changed(steps: Steps, found: Solution, count: int) -> bool:
    """Whether the last steps follow another law than those before."""
    far = np.abs(found.off)
    recent, before = far[-count:], far[:-count]
    if not len(before):
        return False
    missed = middle_of(recent)
    if missed < max(_CHANGED, _TIMES * middle_of(before)):
        return False
    alone = solved(steps.last(count))
    return _TIMES * middle_of(np.abs(alone.off)) < missed


def explained_share(seconds: Floats, found: Solution) -> float:
    """Share of the variance of these seconds explained, hiccups left out; 0 to 1."""
    seconds, off = seconds[found.kept], found.off[found.kept]
    left = seconds * off / (1 + off)
    return max(0.0, 1 - float(left @ left) / max(1e-300, float(seconds.var()) * len(seconds)))


def _times(matrix: Floats, vector: Floats) -> Floats:
    """Their product, without the threads that BLAS starts for long ones."""
    product: Floats = np.einsum("ij,j->i", matrix, vector)
    return product


def middle_of(values: Floats) -> float:
    """The median, without the milliseconds in which ``np.median`` loads itself."""
    middle = len(values) // 2
    return float(np.partition(values, middle)[middle])
