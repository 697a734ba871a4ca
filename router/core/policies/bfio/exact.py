"""The proven optimum of BF-IO's integer program at mu = 0, by HiGHS.

On a plain model HiGHS branches on single candidates for hours. What matters is how many large ones
a worker gets, not which. So a relaxation keeps only few counts integral and may cut candidates. It
takes seconds, with a bound close to the optimum. Where its solution cuts candidates, further counts
become integral, and it runs again. Each time the counts are filled with whole candidates, which
yields a solution, until solution and bound meet. Without look-ahead the plain model is faster.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import highspy
import numpy as np

from router.core.forecast.forecast import Floats, Ints
from router.core.policies.bfio.exact_model import Model, Program, Split, run_highs
from router.core.policies.bfio.solver import Instance, solve

TOLERANCE = 1e-4
"""Gap of a proven solution, as a fraction of the objective; half a token always suffices."""

_TOLERANCE_TOKENS = 0.5
_FIRST_SPLITS = 3
_CUT = 1e-5
# A stage may stop early while the bound is far off; filling is secondary.
_STAGE_SHARE = 0.1
_FIRST_SHARE = 1e-3
_FILL_SHARE = 0.05
# The start is good, and a restart would lose what branching has learned.
_OPTIONS = {
    "mip_rel_gap": 0.0,
    "mip_heuristic_effort": 0.0,
    "mip_allow_restart": False,
}


@dataclass(frozen=True, slots=True)
class ExactSolution:
    """Best places found, and the bound.

    Attributes:
        places: as of ``Solution``.
        bound: lower bound on any solution.
        proven: true if objective and bound are within the tolerance.
    """

    places: Ints
    objective: float
    bound: float
    proven: bool


def solve_exact(
    instance: Instance,
    time_limit_s: float = 60.0,
    start: Ints | None = None,
) -> ExactSolution:
    """Solve (IO) of arXiv 2601.17855, section 4.

    Args:
        instance: its tie weight must be 0.
        time_limit_s: after it, the best result so far is returned.
        start: initial places; None: those of ``solve``.

    Raises:
        ValueError: the tie weight is not 0; a linear program has no quadratic term.
    """
    if instance.tie_weight != 0:
        raise ValueError(
            f"the exact program is linear, and the tie weight is {instance.tie_weight:g}: make it 0"
        )
    places = solve(instance).places if start is None else start
    search = _Search(instance, places, time_limit_s)
    if instance.most_admitted:
        search.run()
    return search.found


class _Search:
    def __init__(self, instance: Instance, places: Ints, time_limit_s: float) -> None:
        self._instance = instance
        self._time_limit_s = time_limit_s
        self._spent_s = 0.0
        self._places = places
        self._objective = instance.objective(places)
        self._bound = 0.0 if instance.most_admitted else self._objective

    @property
    def _margin(self) -> float:
        return max(_TOLERANCE_TOKENS, TOLERANCE * self._objective)

    @property
    def _proven(self) -> bool:
        return self._objective - self._bound <= self._margin

    @property
    def found(self) -> ExactSolution:
        bound = min(self._bound, self._objective)
        return ExactSolution(self._places, self._objective, bound, self._proven)

    @property
    def _left_s(self) -> float:
        return self._time_limit_s - self._spent_s

    def run(self) -> None:
        program = Program.of(self._instance)
        if len(self._instance.weights) == 1:
            model = Model(program, (), whole=True)
            highs = self._solve(model, self._left_s, self._margin, self._places)
            self._raise_bound(highs)
            self._keep(program, model, highs)
        else:
            self._by_stages(program)

    def _by_stages(self, program: Program) -> None:
        splits = set(_first_splits(program))
        while not self._proven and self._left_s > 0:
            model = Model(program, tuple(splits), whole=False)
            values = self._relax(model)
            if not self._proven and self._left_s > 0:
                self._fill(program, model, values)
            splits |= set(_cut(program, model, values))

    def _relax(self, model: Model) -> Floats:
        known = self._bound if self._bound > 0 else (1 - _FIRST_SHARE) * self._objective
        gap = max(self._margin / 2, _STAGE_SHARE * (self._objective - known))
        highs = self._solve(model, self._left_s, gap, self._places)
        self._raise_bound(highs)
        return np.array(highs.getSolution().col_value)

    def _raise_bound(self, highs: highspy.Highs) -> None:
        self._bound = max(self._bound, float(highs.getInfo().mip_dual_bound))

    def _fill(self, program: Program, model: Model, values: Floats) -> None:
        """Fill the counts with whole candidates, which may lower the objective."""
        counts = np.rint(values[model.split_columns]).astype(np.int64)
        fixed = {split: int(count) for split, count in zip(model.splits, counts, strict=True)}
        whole = Model(program, model.splits, whole=True, fixed=fixed)
        limit_s = min(self._left_s, _FILL_SHARE * self._time_limit_s)
        self._keep(program, whole, self._solve(whole, limit_s, self._margin / 2))

    def _keep(self, program: Program, model: Model, highs: highspy.Highs) -> None:
        if highs.getInfo().primal_solution_status != highspy.kSolutionStatusFeasible:
            return
        values = np.array(highs.getSolution().col_value)
        places = program.places(np.rint(values[model.entered]).astype(np.int64))
        objective = self._instance.objective(places)
        if objective < self._objective:
            self._places, self._objective = places, objective

    def _solve(
        self, model: Model, limit_s: float, gap: float, start: Ints | None = None
    ) -> highspy.Highs:
        values = None if start is None else model.vector(start)
        options = _OPTIONS | {"time_limit": limit_s, "mip_abs_gap": gap}
        highs = run_highs(model.lp, options, values)
        self._spent_s += float(highs.getRunTime())
        return highs


def _first_splits(program: Program) -> Iterable[Split]:
    """Split each open worker at rank 0, and at the widest ratios between sizes."""
    sizes = program.kinds @ program.instance.weights
    ratios = np.diff(sizes) / np.maximum(np.abs(sizes[1:]), 1e-9)
    for rank in [0, *(np.argsort(-ratios, kind="stable")[:_FIRST_SPLITS] + 1)]:
        for worker in range(len(program.open)):
            yield Split(worker, int(rank))


def _cut(program: Program, model: Model, values: Floats) -> Iterable[Split]:
    """Split at cut candidates: at the most fractional count between integral ones."""
    for worker in range(len(program.open)):
        ranks = [split.rank for split in model.splits if split.worker == worker]
        entered = values[model.entered[:, worker]]
        counts = entered[::-1].cumsum()[::-1]
        cut = np.abs(counts - np.rint(counts))
        for start, end in pairwise([*ranks, len(entered)]):
            between = cut[start + 1 : end]
            if between.max(initial=0.0) > _CUT:
                yield Split(worker, start + 1 + int(between.argmax()))
