"""The cost of a group's step, learned from its own steps.

A step lasts ``C + max_g (t_l L_g + t_r n_g + t_p P_g)``: the slowest rank's row of KV tokens,
requests and prompt tokens, if that rank is known. Engines that time their wait tell which it was;
else it is the one with the most work by the present fit, so rows and fit are found in turn. Of a
step only rows are kept that could be the slowest.

The fit is least squares over the last steps. Errors are relative to the step, since long steps vary
more; decode-only steps and steps with prompts have a spread each. Steps that lie far off, hiccups
of an engine, are left out. A Gaussian prior, by which each term alone explains everything, decides
where the data do not: what always comes together, as requests and their tokens may, shares its
cost, and the intervals say so. No cost is negative; where C would be, the others are found without.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from router.core.step_regression import (
    CHOICES,
    EXTRAS,
    FEW,
    ROWS,
    WIDTH,
    Floats,
    Solution,
    Steps,
    changed,
    explained_share,
    from_both_ends,
    middle_of,
    poor,
    solved,
    with_extras,
)
from router.core.step_time import StepTime

MEMORY_STEPS = 2048
"""Steps that the fit remembers, beside the last ``LEAST_STEPS`` with prompts."""

LEAST_STEPS = 64
"""Steps before the first fit; later ones come as steps grow in number, down to 8 in the memory."""

NUMBERS = ("base_s", "per_token_s", "per_request_s", "per_prompt_token_s")

_REFITS = 8  # in the memory
_Z95 = 1.96
# The four explain the steps if their F statistic is above.
_SURE = 16.0
_MOST_PATIENCE = 32
# A further term earns its place by this much of the error on steps that were not learned yet.
_EARNS, _NO_WORSE = 0.97, 1.02
_JUDGED_STEPS = 512
# A prompt token in resident ones. By it the slowest rank is looked for as well: that may have many
# of both, and most of neither. The fit finds other prices of prompts from there.
_WORTH = 1000
# No engine steps in less; such a step's relative error means nothing.
_LEAST_STEP_S = 1e-6
# A number is known if its interval is no wider than this share of it, either way, or moves a usual
# step by no more.
_KNOWN = 0.1


@dataclass(frozen=True, slots=True)
class FittedStepTime(StepTime):
    """A learned step time.

    Attributes:
        intervals: 95 % intervals of the four ``NUMBERS``, from 0 up.
        known: those of the four that the steps tell; the others are guesses, by which steps like
            the present ones are predicted as well.
        explained: share of the variance of step times that the four explain, 0 to 1.
        predicting: the numbers and the cost of each of ``EXTRAS``, seconds per unit, that have
            predicted best; empty: the four alone.
        decode_error, prompt_error: median error of predicting a step before it was learned, as a
            share of it, of steps without and with prompts; None: too few.
        judged: whether steps of both kinds have told which of ``EXTRAS`` predict better.
    """

    intervals: tuple[tuple[float, float], ...] = ((0.0, 0.0),) * 4
    known: tuple[str, ...] = ()
    explained: float = 0.0
    predicting: tuple[float, ...] = ()
    decode_error: float | None = None
    prompt_error: float | None = None
    judged: bool = False

    @property
    def extras(self) -> dict[str, float]:
        """Costs of those of ``EXTRAS`` that predict better."""
        costs = zip(EXTRAS, self.predicting[len(NUMBERS) :], strict=False)
        return {name: cost for name, cost in costs if cost > 0}

    def rest_s(self, load_tokens: float, requests: float, batch: int) -> float:
        if not self.predicting:
            return self.seconds(load_tokens, requests)
        base, token, request, _, _, _, graph = self.predicting
        return base + token * load_tokens + request * requests + graph * graph_size(batch)

    @property
    def prompts_known(self) -> bool:
        return "per_prompt_token_s" in self.known

    @property
    def rest_known(self) -> bool:
        return self.judged

    def prompts_s(self, before_tokens: float) -> tuple[float, float]:
        if not self.predicting:
            return 0.0, self.per_prompt_token_s
        _, _, _, token, context, any_, _ = self.predicting
        return any_, token + context * before_tokens


_Row = tuple[int, int, int, float]


class StepFit:
    """Learns a group's step time; ``fitted`` is None while it is unknown."""

    def __init__(self) -> None:
        self.fitted: FittedStepTime | None = None
        self._pending: list[tuple[list[_Row], tuple[int, int], float]] = []
        self._steps = Steps(np.zeros((0, ROWS, WIDTH + 1)), np.zeros((0, 2)), np.zeros(0))
        self._solution: Solution | None = None
        self._costs: Floats | None = None  # of every choice of terms
        # Errors of predictions, by choice of terms, without and with prompts: sums, and how many.
        self._misses, self._judged = np.zeros((len(CHOICES), 2)), np.zeros(2)
        self._kept = 0
        self._poor, self._patience = 0, 1  # poor fits since the last search for other rows
        self._shorter = 0  # least number of steps, since the last look, left out as too short
        self._recent: Floats = np.zeros((0, len(CHOICES) + 1))  # the last; whether with prompts

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
        if step_s < _LEAST_STEP_S:
            return
        batch, prompt_tokens = max(running), max(prompts)
        if slowest is not None:
            places = {slowest}
        else:
            fullest, most = loads.index(max(loads)), prompts.index(prompt_tokens)
            places = {fullest, running.index(batch)}
            if prompt_tokens and most != fullest:
                work = [load + _WORTH * own for load, own in zip(loads, prompts, strict=True)]
                places |= {most, work.index(max(work))}
            if likely is not None:
                places.add(likely)
        rows: list[_Row] = [(loads[i], running[i], prompts[i], contexts[i]) for i in places]
        rows += rows[:1] * (ROWS - len(rows))
        self._pending.append((rows, (prompt_tokens > 0, graph_size(batch)), step_s))
        if len(self._pending) >= max(LEAST_STEPS, len(self._steps.seconds) // _REFITS):
            self._learn()

    def finish(self) -> FittedStepTime | None:
        """Learn from the steps since the last fit too; ``fitted``."""
        if self._pending and len(self._pending) + len(self._steps.seconds) >= LEAST_STEPS:
            self._learn()
        return self.fitted

    def _learn(self) -> None:
        new = Steps(*(np.array(part, np.float64) for part in zip(*self._pending, strict=True)))
        self._pending.clear()
        if self._costs is not None:
            self._judge(new, self._costs)
        both = zip(self._steps, new, strict=True)
        every = Steps(*(np.concatenate(parts) for parts in both))
        self._steps = every.remembered(MEMORY_STEPS, LEAST_STEPS)
        solution = self._with_right_rows(solved(self._steps, self._solution))
        if changed(self._steps, solution, len(new.seconds)):
            self._steps = self._steps.last(len(new.seconds))
            self._misses[:], self._judged[:], self._recent = 0.0, 0.0, self._recent[:0]
            solution = solved(self._steps)
        self._solution = solution
        self._costs = with_extras(self._steps, solution)
        self.fitted = self._described(solution, self._costs)

    def _with_right_rows(self, found: Solution) -> Solution:
        """Look for other rows where a fit is poor; ever more seldom while that is in vain.

        Also where more steps than at the last look were shorter than any hiccup is.
        """
        self._shorter = min(self._shorter, found.shorter)
        if found.shorter >= self._shorter + FEW:
            self._shorter = found.shorter
            return from_both_ends(self._steps, found)
        if not poor(self._steps, found):
            return found
        self._poor += 1
        if self._poor < self._patience:
            return found
        best = from_both_ends(self._steps, found)
        self._patience = 1 if best is not found else min(_MOST_PATIENCE, 2 * self._patience)
        self._poor = 0
        return best

    def _judge(self, new: Steps, costs: Floats) -> None:
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
        worth = shares.mean(axis=1) / _EARNS ** (CHOICES.sum(axis=1) - WIDTH)
        worth[(shares > _NO_WORSE).any(axis=1)] = np.inf
        self._kept = int(worth.argmin())

    def _described(self, found: Solution, costs: Floats) -> FittedStepTime | None:
        """None if the steps do not follow the four."""
        count = int(found.kept.sum())
        if found.explained * max(0, count - 4) <= _SURE * 3 * (1 - found.explained):
            return None
        numbers, errors = found.costs, _Z95 * found.errors
        low, high = np.maximum(0.0, numbers - errors), np.maximum(0.0, found.free + errors)
        high = np.maximum(high, numbers)
        moves = errors * found.usual <= _KNOWN * self._steps.seconds[found.kept].mean()
        known = moves | (errors <= _KNOWN * numbers)
        return FittedStepTime(
            **dict(zip(NUMBERS, numbers.tolist(), strict=True)),
            intervals=tuple(zip(low.tolist(), high.tolist(), strict=True)),
            known=tuple(name for name, is_ in zip(NUMBERS, known, strict=True) if is_),
            explained=explained_share(self._steps.seconds, found),
            predicting=tuple(costs[self._kept].tolist()) if self._kept else (),
            decode_error=_median(self._recent[self._recent[:, -1] == 0, self._kept]),
            prompt_error=_median(self._recent[self._recent[:, -1] > 0, self._kept]),
            judged=bool(self._judged.sum() >= _JUDGED_STEPS and self._judged.min() >= LEAST_STEPS),
        )


def graph_size(batch: int) -> int:
    """Batch to which vLLM pads a decode step, by the default sizes of its CUDA graphs."""
    if batch <= 2:
        return batch
    every = 4 if batch <= 4 else 8 if batch <= 256 else 16
    return -(-batch // every) * every


def _median(values: Floats) -> float | None:
    return middle_of(values) if len(values) >= LEAST_STEPS else None
