"""BF-IO's integer program, at mu = 0, as a matrix for HiGHS (arXiv 2601.17855, section 4, (IO)).

Equal candidates form one *kind*, and kinds are sorted by size. Only workers with a free slot, the
*open* ones, have variables. Columns, for step h, open worker f and kind v:

    M_h   peak load, at least the floor F_h, a lower bound on the highest load
    S_f   sum of what f's newcomers add at the first step
    X_vf  number of newcomers of kind v on f
    N_fr  number of f's newcomers of kind r or larger, for chosen ranks r: the *splits*

A relaxation meets M_h >= L_f(h) + newcomers by a tenth of a candidate ten times too large. So there
is a stronger row: a candidate that lifts f over the floor by o, even beside the smallest others
that can fill the slots, does so by itself,

    M_h >= F_h + sum_v o_vfh X_vf .

It holds for several slots too, because F_h is at least L_f(h) and the smallest that fill f.

Where memory binds, slots may stay free, and there are columns that say why (``_add_memory``):

    W_v   1 if a candidate of kind v waits
    N     at most the least need of those that wait
    Z_f   1 only if all slots of f are filled
    A_f   1 if an idle f has a single candidate, which may need more than its room
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import highspy
import numpy as np

from router.core.forecast.forecast import Bools, Floats, Ints
from router.core.policies.bfio.solver import Instance, Memory

# Unit of loads with look-ahead: a power of two, so exact, yet it leaves few integers. HiGHS would
# treat integral M and S as integers, and spend minutes on tightening one's bounds by another's in
# steps of 1. For a single step, integers are faster.
_UNIT_TOKENS = 1024.0


class Split(NamedTuple):
    """Count of an open worker's newcomers of at least a rank, with a column of its own."""

    worker: int
    rank: int


@dataclass(frozen=True, slots=True)
class Program:
    """An instance with equal candidates merged.

    Attributes:
        kinds: shape (V, K), work of one candidate per kind, smallest first.
        members: candidates of each kind.
        open: shape (F,), workers with a free slot.
        slots: shape (F,), candidates that each can take.
        full: true if every slot is filled; otherwise every candidate enters, or memory binds.
        least: shape (max slots + 1, K), least work of so many newcomers.
        floor: shape (K,), lower bound on the highest load.
        needs: shape (V,), memory of one candidate per kind.
        memory: that of the instance; None: it never binds.
    """

    instance: Instance
    kinds: Floats
    members: Sequence[Ints]
    open: Ints
    slots: Ints
    full: bool
    least: Floats
    floor: Floats
    needs: Ints
    memory: Memory | None

    @classmethod
    def of(cls, instance: Instance) -> Program:
        open_ = np.flatnonzero(instance.capacity > 0)
        slots = np.minimum(instance.capacity[open_], len(instance.candidates))
        memory, need = instance.memory, np.zeros(len(instance.candidates), dtype=np.int64)
        if memory is not None:
            need = memory.need
            most = np.append(0, np.sort(need)[::-1].cumsum())
            if (most[slots] <= memory.room[open_]).all():
                memory = None
        rows: Floats = np.column_stack((instance.candidates, need))
        kinds, kind_of = np.unique(rows, axis=0, return_inverse=True)
        kinds, needs = kinds[:, :-1], kinds[:, -1].astype(np.int64)
        order = np.argsort(kinds @ instance.weights, kind="stable")
        members = [np.flatnonzero(kind_of.ravel() == kind) for kind in order]
        full = memory is None and int(instance.capacity[open_].sum()) <= len(instance.candidates)
        least = _least(instance.candidates, full)[: slots.max(initial=0) + 1]
        bare = instance.loads.copy()
        bare[open_] += least[slots]
        return cls(
            instance=instance,
            kinds=kinds[order],
            members=members,
            open=open_,
            slots=slots,
            full=full,
            least=least,
            floor=bare.max(axis=0),
            needs=needs[order],
            memory=memory,
        )

    @property
    def counts(self) -> Ints:
        """Shape (V,)."""
        return np.array([len(members) for members in self.members])

    @property
    def unit_tokens(self) -> float:
        return _UNIT_TOKENS if self.kinds.shape[1] > 1 else 1.0

    @property
    def shared(self) -> Floats:
        """Growth of the first kind, moved to the right-hand sides if full; shape (K,)."""
        return np.where(self.full, self.kinds[0] - self.kinds[0, 0], 0.0)

    @property
    def rest(self) -> Floats:
        """Work of a kind beyond S and the shared growth, mostly 0; shape (V, K)."""
        return self.kinds - self.kinds[:, :1] - self.shared

    @property
    def room(self) -> Ints:
        """Shape (F,), none above what all candidates need."""
        assert self.memory is not None
        room: Ints = np.minimum(self.memory.room[self.open], self.counts @ self.needs)
        return room

    @property
    def idle(self) -> Bools:
        """Shape (F,)."""
        assert self.memory is not None
        return self.memory.idle[self.open]

    def placed(self, places: Ints) -> Ints:
        """Shape (V, F)."""
        return np.array(
            [[(places[rows] == worker).sum() for worker in self.open] for rows in self.members]
        )

    def places(self, placed: Ints) -> Ints:
        """Among equal candidates the first ones enter."""
        places = np.full(len(self.instance.candidates), -1, dtype=np.int64)
        for members, counts in zip(self.members, placed, strict=True):
            workers = np.repeat(self.open, counts)
            places[members[: len(workers)]] = workers
        return places


def _least(candidates: Floats, full: bool) -> Floats:
    """Sums of the smallest additions per step, or of none if slots may stay free."""
    smallest = np.sort(candidates, axis=0)
    if not full:
        smallest = np.minimum(smallest, 0.0)
    return np.vstack((np.zeros(candidates.shape[1]), smallest.cumsum(axis=0)))


class Rows:
    """Constraints, collected one by one and passed on as arrays."""

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
        splits: splits with integral counts.
        whole: true for integral candidates; false for a relaxation.
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
        self.size = int(self.entered[-1, -1]) + 1 + len(self.splits)
        if program.memory is not None:
            self.least = self.size
            self.waits = self.least + 1 + np.arange(kinds)
            self.filled = self.waits[-1] + 1 + np.arange(workers)
            self.alone = self.filled[-1] + 1 + np.arange(workers)
            self.size = int(self.alone[-1]) + 1
        self.lp = highspy.HighsLp()
        self._set_columns(whole, fixed or {})
        rows = Rows()
        self._add_counts(rows)
        self._add_loads(rows)
        if program.memory is not None:
            self._add_memory(rows)
        rows.into(self.lp)

    def _set_columns(self, whole: bool, fixed: Mapping[Split, int]) -> None:
        program, lp = self._program, self.lp
        weights, shared, unit = program.instance.weights, program.shared, program.unit_tokens
        size = self.size
        cost, lower, upper = np.zeros(size), np.zeros(size), np.full(size, np.inf)
        cost[self.peaks] = unit * len(program.instance.loads) * weights
        lower[self.peaks] = program.floor / unit
        cost[self.sums], lower[self.sums] = -unit * weights.sum(), -np.inf
        cost[self.entered] = -(program.rest @ weights)[:, None]
        upper[self.entered] = np.minimum(program.counts[:, None], program.slots)
        for split, column in zip(self.splits, self.split_columns, strict=True):
            upper[column] = fixed.get(split, int(program.slots[split.worker]))
            lower[column] = fixed.get(split, 0)
        if program.memory is not None:
            too_large = (program.needs[:, None] > program.room) & ~program.idle
            upper[self.entered[too_large]] = 0
            upper[self.least] = self._beyond
            upper[[*self.waits, *self.filled]] = 1
            upper[self.alone] = program.idle
        lp.num_col_ = size
        lp.col_cost_, lp.col_lower_, lp.col_upper_ = cost, lower, upper
        admitted = program.instance.most_admitted
        lp.offset_ = float(-weights @ (program.instance.loads.sum(axis=0) + admitted * shared))
        types = np.full(size, highspy.HighsVarType.kContinuous)
        types[self.split_columns] = highspy.HighsVarType.kInteger
        types[self.entered] = highspy.HighsVarType.kInteger if whole else types[self.entered]
        if program.memory is not None:
            types[[*self.waits, *self.filled, *self.alone]] = highspy.HighsVarType.kInteger
        lp.integrality_ = list(types)

    @property
    def _beyond(self) -> int:
        """More than any need and any memory left."""
        return int(self._program.counts @ self._program.needs) + 1

    def _add_memory(self, rows: Rows) -> None:
        """No worker exceeds its memory, and no candidate waits that fits somewhere."""
        program, beyond = self._program, self._beyond
        needs = program.needs.astype(np.float64)
        for kind, count in enumerate(program.counts):
            waits = self.waits[[kind]]
            rows.add((self.entered[kind], 1.0), (waits, float(count)), lower=count)
            rows.add(([self.least], 1.0), (waits, beyond - needs[kind]), upper=beyond)
        for worker, (slots, room) in enumerate(zip(program.slots, program.room, strict=True)):
            entered, filled = self.entered[:, worker], self.filled[[worker]]
            alone = self.alone[[worker]]
            rows.add((entered, needs), (alone, -needs.max()), upper=room)
            rows.add((entered, 1.0), (alone, slots - 1.0), upper=slots)
            rows.add((entered, 1.0), (filled, -float(slots)), lower=0)
            rows.add((entered, needs), ([self.least], 1.0), (filled, room + 1.0), lower=room + 1)
            for kind in range(len(needs)) if program.idle[worker] else ():
                rows.add((entered, 1.0), (self.waits[[kind]], -1.0), lower=0)

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
        everyone = program.instance.most_admitted == len(program.instance.candidates)
        everyone &= program.memory is None
        for kind, count in enumerate(program.counts):
            rows.add((self.entered[kind], 1.0), lower=count if everyone else 0, upper=count)
        for at, split in enumerate(self.splits):
            self._add_split(rows, at, split)

    def _add_split(self, rows: Rows, at: int, split: Split) -> None:
        terms = [([self.split_columns[at]], -1.0)]
        end = len(self.entered)
        if at + 1 < len(self.splits) and self.splits[at + 1].worker == split.worker:
            terms.append(([self.split_columns[at + 1]], 1.0))
            end = self.splits[at + 1].rank
        between = self.entered[split.rank : end, split.worker]
        rows.add(*terms, (between, 1.0), lower=0, upper=0)

    def _add_loads(self, rows: Rows) -> None:
        """Peaks exceed every open worker's load, by both kinds of row."""
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
        program = self._program
        entered = program.placed(places)
        values = np.zeros(self.lp.num_col_)
        peaks = program.instance.loads_after(places).max(axis=0)
        values[self.peaks] = np.maximum(peaks, program.floor) / program.unit_tokens
        values[self.sums] = program.kinds[:, 0] @ entered / program.unit_tokens
        values[self.entered] = entered
        values[self.split_columns] = [entered[rank:, worker].sum() for worker, rank in self.splits]
        if program.memory is not None:
            waits = entered.sum(axis=1) < program.counts
            values[self.waits] = waits
            values[self.least] = program.needs[waits].min(initial=self._beyond)
            values[self.filled] = entered.sum(axis=0) == program.slots
            values[self.alone] = program.needs @ entered > program.room
        return values


def run_highs(
    lp: highspy.HighsLp, options: Mapping[str, float | bool], start: Floats | None = None
) -> highspy.Highs:
    """Run in one thread; ``start``: shape (columns,), initial solution.

    Raises:
        RuntimeError: HiGHS refuses to run, as after a run with more threads in this process.
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
