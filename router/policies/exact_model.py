"""BF-IO's integer program, at mu = 0, as a matrix for HiGHS (arXiv 2601.17855, section 4, (IO)).

Alike candidates are one *kind*, kinds are sorted by size, and only workers with a free slot, the
*open* ones, have variables. Columns, for step h, open worker f and kind v:

    M_h   peak load, at least the floor F_h: what is the least that the highest worker will have
    S_f   what the newcomers of f add at the first step
    X_vf  how many of kind v enter f
    N_fr  how many of f's newcomers are of kind r or larger, for chosen ranks r: the *splits*

Besides M_h >= L_f(h) + newcomers, which a relaxation meets by a tenth of a candidate ten times too
large, there is a stronger row: a candidate that lifts f over the floor by o, even beside the
smallest others that can fill the slots, does so by itself,

    M_h >= F_h + sum_v o_vfh X_vf .

It holds for several slots too, because F_h is at least L_f(h) and the smallest that fill f.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import highspy
import numpy as np

from router.policies.solver import Instance
from router.workload import Floats, Ints

# With look-ahead, loads count in a unit that leaves few whole numbers (yet exact ones, being a
# power of two): HiGHS would take whole M and S for integers, and for minutes tighten the bounds of
# one by those of another in steps of 1. For a single step, integers are quicker.
_UNIT_TOKENS = 1024.0


class Split(NamedTuple):
    """Newcomers of an open worker of at least a rank, counted by a column of its own."""

    worker: int
    rank: int


@dataclass(frozen=True, slots=True)
class Program:
    """An instance with alike candidates taken together.

    Attributes:
        instance: what it was made from.
        kinds: shape (V, K), what one candidate of each kind adds, the smallest first.
        members: the candidates of each kind, the first ones first.
        open: shape (F,), workers with a free slot.
        slots: shape (F,), how many candidates each of these can take.
        full: whether every slot is filled; if not, every candidate enters.
        least: shape (max slots + 1, K), the least that so many newcomers add.
        floor: shape (K,), the least that the highest worker can have.
    """

    instance: Instance
    kinds: Floats
    members: Sequence[Ints]
    open: Ints
    slots: Ints
    full: bool
    least: Floats
    floor: Floats

    @classmethod
    def of(cls, instance: Instance) -> Program:
        """Take together what is alike."""
        kinds, kind_of = np.unique(instance.candidates, axis=0, return_inverse=True)
        order = np.argsort(kinds @ instance.weights, kind="stable")
        members = [np.flatnonzero(kind_of.ravel() == kind) for kind in order]
        open_ = np.flatnonzero(instance.capacity > 0)
        slots = np.minimum(instance.capacity[open_], len(instance.candidates))
        full = int(instance.capacity[open_].sum()) <= len(instance.candidates)
        least = _least(instance.candidates, full)[: slots.max(initial=0) + 1]
        bare = instance.loads.copy()
        bare[open_] += least[slots]
        return cls(instance, kinds[order], members, open_, slots, full, least, bare.max(axis=0))

    @property
    def counts(self) -> Ints:
        """Shape (V,): candidates of each kind."""
        return np.array([len(members) for members in self.members])

    @property
    def unit_tokens(self) -> float:
        """What M and S count in."""
        return _UNIT_TOKENS if self.kinds.shape[1] > 1 else 1.0

    @property
    def shared(self) -> Floats:
        """Shape (K,): growth of the first kind, which the right-hand sides take over if full."""
        return np.where(self.full, self.kinds[0] - self.kinds[0, 0], 0.0)

    @property
    def rest(self) -> Floats:
        """Shape (V, K): what a kind adds besides S and the shared growth; mostly 0."""
        return self.kinds - self.kinds[:, :1] - self.shared

    def placed(self, places: Ints) -> Ints:
        """Shape (V, F): how many of each kind are where."""
        return np.array(
            [[(places[rows] == worker).sum() for worker in self.open] for rows in self.members]
        )

    def places(self, placed: Ints) -> Ints:
        """The candidates' places; among alike ones the first ones enter."""
        places = np.full(len(self.instance.candidates), -1, dtype=np.int64)
        for members, counts in zip(self.members, placed, strict=True):
            workers = np.repeat(self.open, counts)
            places[members[: len(workers)]] = workers
        return places


def _least(candidates: Floats, full: bool) -> Floats:
    """Sums of the smallest additions of each step, of none if slots may stay free."""
    smallest = np.sort(candidates, axis=0)
    if not full:
        smallest = np.minimum(smallest, 0.0)
    return np.vstack((np.zeros(candidates.shape[1]), smallest.cumsum(axis=0)))


class Rows:
    """Constraints, gathered one by one and handed over as arrays."""

    def __init__(self) -> None:
        self._columns: list[Ints] = []
        self._values: list[Floats] = []
        self._bounds: list[tuple[float, float]] = []

    def add(
        self,
        *terms: tuple[Ints | Sequence[int], Floats | float],
        lower: float = -np.inf,
        upper: float = np.inf,
    ) -> None:
        """``lower <= sum of values times columns <= upper``; zeros are left out."""
        columns = np.concatenate([np.asarray(names, dtype=np.int64) for names, _ in terms])
        values = np.concatenate([np.broadcast_to(value, len(names)) for names, value in terms])
        self._columns.append(columns[values != 0])
        self._values.append(values[values != 0])
        self._bounds.append((lower, upper))

    def into(self, lp: highspy.HighsLp) -> None:
        """Set rows and matrix of a model."""
        lp.num_row_ = len(self._bounds)
        lp.row_lower_ = np.array([lower for lower, _ in self._bounds])
        lp.row_upper_ = np.array([upper for _, upper in self._bounds])
        matrix = lp.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.start_ = np.cumsum([0, *map(len, self._columns)])
        matrix.index_ = np.concatenate(self._columns)
        matrix.value_ = np.concatenate(self._values)


class Model:
    """The columns of a program and its matrix.

    Args:
        program: what to solve.
        splits: which counts there are; they are whole numbers.
        whole: whether the candidates of each kind are, too; if not, this is a relaxation.
        fixed: counts that are given.
    """

    def __init__(
        self,
        program: Program,
        splits: Sequence[Split],
        *,
        whole: bool,
        fixed: Mapping[Split, int] | None = None,
    ) -> None:
        kinds, workers = len(program.kinds), len(program.open)
        self._program = program
        self.splits = sorted(splits)
        self.peaks = np.arange(program.kinds.shape[1])
        self.sums = len(self.peaks) + np.arange(workers)
        self.entered = self.sums[-1] + 1 + np.arange(kinds * workers).reshape(kinds, workers)
        self.split_columns = self.entered[-1, -1] + 1 + np.arange(len(self.splits))
        self.lp = highspy.HighsLp()
        self._set_columns(whole, fixed or {})
        rows = Rows()
        self._add_counts(rows)
        self._add_loads(rows)
        rows.into(self.lp)

    def _set_columns(self, whole: bool, fixed: Mapping[Split, int]) -> None:
        program, lp = self._program, self.lp
        weights, shared, unit = program.instance.weights, program.shared, program.unit_tokens
        size = len(self.peaks) + len(self.sums) + self.entered.size + len(self.splits)
        cost, lower, upper = np.zeros(size), np.zeros(size), np.full(size, np.inf)
        cost[self.peaks] = unit * len(program.instance.loads) * weights
        lower[self.peaks] = program.floor / unit
        cost[self.sums], lower[self.sums] = -unit * weights.sum(), -np.inf
        cost[self.entered] = -(program.rest @ weights)[:, None]
        upper[self.entered] = np.minimum(program.counts[:, None], program.slots)
        for split, column in zip(self.splits, self.split_columns, strict=True):
            upper[column] = fixed.get(split, int(program.slots[split.worker]))
            lower[column] = fixed.get(split, 0)
        lp.num_col_ = size
        lp.col_cost_, lp.col_lower_, lp.col_upper_ = cost, lower, upper
        admitted = program.instance.admitted
        lp.offset_ = float(-weights @ (program.instance.loads.sum(axis=0) + admitted * shared))
        types = np.full(size, highspy.HighsVarType.kContinuous)
        types[self.split_columns] = highspy.HighsVarType.kInteger
        types[self.entered] = highspy.HighsVarType.kInteger if whole else types[self.entered]
        lp.integrality_ = list(types)

    def _add_counts(self, rows: Rows) -> None:
        """Slots are filled, each candidate enters once, splits count."""
        program = self._program
        for worker, slots in enumerate(program.slots):
            lower = slots if program.full else 0
            rows.add((self.entered[:, worker], 1.0), lower=lower, upper=slots)
            sizes = program.kinds[:, 0] / program.unit_tokens
            rows.add(
                (self.entered[:, worker], sizes), ([self.sums[worker]], -1.0), lower=0, upper=0
            )
        everyone = program.instance.admitted == len(program.instance.candidates)
        for kind, count in enumerate(program.counts):
            rows.add((self.entered[kind], 1.0), lower=count if everyone else 0, upper=count)
        for at, split in enumerate(self.splits):
            self._add_split(rows, at, split)

    def _add_split(self, rows: Rows, at: int, split: Split) -> None:
        """A count is the next one plus what lies between."""
        terms = [([self.split_columns[at]], -1.0)]
        end = len(self.entered)
        if at + 1 < len(self.splits) and self.splits[at + 1].worker == split.worker:
            terms.append(([self.split_columns[at + 1]], 1.0))
            end = self.splits[at + 1].rank
        between = self.entered[split.rank : end, split.worker]
        rows.add(*terms, (between, 1.0), lower=0, upper=0)

    def _add_loads(self, rows: Rows) -> None:
        """Peaks are over every open worker's load, by both kinds of row."""
        program = self._program
        rest = program.rest / program.unit_tokens
        for worker, slots in enumerate(program.slots):
            loads = program.instance.loads[program.open[worker]]
            over = program.kinds + (loads + program.least[slots - 1] - program.floor)
            over = np.maximum(over, 0.0) / program.unit_tokens
            base = (loads + slots * program.shared) / program.unit_tokens
            entered = self.entered[:, worker]
            for step in range(len(self.peaks)):
                peak = ([step], 1.0)
                if over[:, step].any():
                    floor = program.floor[step] / program.unit_tokens
                    rows.add(peak, (entered, -over[:, step]), lower=floor)
                if slots > 1 or not program.full:
                    total = ([self.sums[worker]], -1.0)
                    rows.add(peak, total, (entered, -rest[:, step]), lower=base[step])

    def vector(self, places: Ints) -> Floats:
        """The columns' values for places."""
        program = self._program
        entered = program.placed(places)
        values = np.zeros(self.lp.num_col_)
        peaks = program.instance.loads_after(places).max(axis=0)
        values[self.peaks] = np.maximum(peaks, program.floor) / program.unit_tokens
        values[self.sums] = program.kinds[:, 0] @ entered / program.unit_tokens
        values[self.entered] = entered
        values[self.split_columns] = [entered[rank:, worker].sum() for worker, rank in self.splits]
        return values


def run_highs(
    lp: highspy.HighsLp, options: Mapping[str, float | bool], start: Floats | None = None
) -> highspy.Highs:
    """HiGHS after it has run a program, in one thread.

    Args:
        lp: the program.
        options: HiGHS's own.
        start: shape (columns,), a solution to begin from.

    Raises:
        RuntimeError: HiGHS refuses to run, as where the process has run it with more threads.
    """
    highs = highspy.Highs()  # type: ignore[no-untyped-call]
    highs.silent()
    for name, value in {**options, "threads": 1}.items():
        highs.setOptionValue(name, value)
    highs.passModel(lp)
    if start is not None:
        solution = highspy.HighsSolution()
        solution.col_value = list(start)
        highs.setSolution(solution)
    if highs.run() == highspy.HighsStatus.kError:
        raise RuntimeError(
            "HiGHS refuses to run: a process that has run it with another number of threads needs "
            "highspy.Highs.resetGlobalScheduler(True) first"
        )
    return highs
