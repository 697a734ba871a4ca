"""Which workers hold which blocks: exact, in arrays, for millions of blocks.

Each id that a worker holds has a row: its key, and a bit for each worker. Changes are noted and
applied together before the next look, since arrays cost little per block and much per call.

Blocks that are stored together get rows side by side: free rows are a stack, and engines evict a
prompt's last block first. So a long chain lies in few runs of rows, and a look at a hundredth of
its ids finds most of the others without hashing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from router.core.prefix.id_table import NO_ID, Ids, IdTable, Rows

MOST_BLOCKS = 1 << 24
"""Most distinct ids: 256 workers with a million tokens each in blocks of 16 that nobody shares."""

_WORD = 64  # workers in a word of bits
_SAMPLES = 96  # ids of a long chain that are hashed at first
_SHORT = 8 * _SAMPLES  # chains up to here are hashed whole
_MOST_NOTED = 4096
_SCANNED = 1 << 20  # rows at a time

Counts = NDArray[np.int64]
"""By worker number."""


class _Change(NamedTuple):
    worker: int
    stores: bool
    ids: bytes


class BlockIndex:
    """Blocks by worker. A worker has a number from ``join`` to ``leave``.

    Ids are eight bytes each, in the machine's order. Id 0 is never held.

    Args:
        most_blocks: bound of distinct ids; more are not noted. Memory is taken as it fills. What
            is removed makes room for later changes only.

    Attributes:
        dropped: blocks that were not noted since the index was full.
    """

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most = most_blocks
        self._table = IdTable(most_blocks)
        # Row 0 is nobody's. A row that is free has key and bits 0.
        self._keys = np.zeros(most_blocks + 1, np.uint64)
        self._masks: list[Ids] = []  # by word of workers, so that a worker is cleared in one sweep
        self._free = np.zeros(most_blocks, np.int32)
        self._free_rows = 0
        self._end = 1  # rows from here on were never used
        self._held: Counts = np.zeros(0, np.int64)
        self._numbers: set[int] = set()
        self._noted: list[_Change] = []
        self._noted_ids = 0
        self._to_clear: set[int] = set()
        self.dropped = 0

    def __len__(self) -> int:
        """Distinct ids held."""
        self.settle()
        return len(self._table)

    @property
    def width(self) -> int:
        """Length of ``Counts``: a number above every worker's."""
        return _WORD * len(self._masks)

    @property
    def memory_bytes(self) -> int:
        """Memory of the rows used so far, and of what finds them."""
        return self._table.memory_bytes + self._end * (8 + 4 + 8 * len(self._masks))

    def held(self, worker: int) -> int:
        """Blocks that a worker holds."""
        self.settle()
        return int(self._held[worker])

    def join(self) -> int:
        """The least number that is free."""
        number = next(n for n in range(len(self._numbers) + 1) if n not in self._numbers)
        self._numbers.add(number)
        if number >= self.width:
            self._masks.append(np.zeros(self._most + 1, np.uint64))
            self._held = np.append(self._held, np.zeros(_WORD, np.int64))
        return number

    def leave(self, worker: int) -> None:
        self.clear(worker)
        self._numbers.remove(worker)

    def clear(self, worker: int) -> None:
        """It holds nothing any more."""
        self._noted = [change for change in self._noted if change.worker != worker]
        self._noted_ids = sum(len(change.ids) // 8 for change in self._noted)
        if self._held[worker]:
            self._to_clear.add(worker)

    def store(self, worker: int, ids: bytes) -> None:
        self._note(_Change(worker, stores=True, ids=ids))

    def remove(self, worker: int, ids: bytes) -> None:
        """Ids that it does not hold are ignored."""
        self._note(_Change(worker, stores=False, ids=ids))

    def _note(self, change: _Change) -> None:
        if change.ids:
            self._noted.append(change)
            self._noted_ids += len(change.ids) // 8
            if self._noted_ids >= _MOST_NOTED:
                self.settle()

    def leading(self, chain: bytes) -> Counts:
        """How many of a chain's first ids each worker holds, without a hole."""
        self.settle()
        ids = np.frombuffer(chain, np.uint64)
        if ids.size <= _SHORT:
            return self._leading(self._table.find(ids))
        # A worker that lacks an id has at most those before it.
        stride = ids.size // _SAMPLES + 1
        samples = self._table.find(ids[::stride])
        most = np.minimum(self._leading(samples) * stride, ids.size)
        ids = ids[: most.max(initial=0)]
        return self._leading(self._rows(ids, samples, stride), most)

    def _rows(self, ids: Ids, samples: Rows, stride: int) -> Rows:
        """Rows of a chain, from those of some ids: others follow or precede them."""
        keys = self._keys
        rows = (samples[:, None] + np.arange(stride)).reshape(-1)[: ids.size]
        wrong = np.flatnonzero(keys.take(rows, mode="clip") != ids)
        if wrong.size:
            sample = np.minimum(wrong // stride + 1, samples.size - 1)
            rows[wrong] = np.maximum(samples[sample] - (sample * stride - wrong), 0)
            wrong = wrong[keys.take(rows[wrong], mode="clip") != ids[wrong]]
            if wrong.size:
                rows[wrong] = self._table.find(ids[wrong])
        return rows

    def _leading(self, rows: Rows, most: Counts | None = None) -> Counts:
        """Leading rows of each worker; ``most`` is known to bound them."""
        counts = np.zeros(self.width, np.int64)
        for word, masks in enumerate(self._masks):
            of_word = slice(word * _WORD, (word + 1) * _WORD)
            part = rows if most is None else rows[: most[of_word].max()]
            if not part.size or not masks[part[0]]:
                continue
            holders = masks[part]
            if np.bitwise_and.reduce(holders) == holders[0]:
                holders = holders[:1]  # nobody who holds the first lacks another
            # Holders only become fewer: a worker is among the first few of these sets.
            holders = np.bitwise_and.accumulate(holders)
            ends = np.flatnonzero(holders[1:] != holders[:-1])
            sets = np.append(holders[ends], holders[-1]).astype("<u8")
            ends = np.concatenate(((0,), ends + 1, (part.size,)))
            bits = np.unpackbits(sets.view(np.uint8).reshape(-1, 8), axis=1, bitorder="little")
            counts[of_word] = ends[bits.sum(axis=0, dtype=np.intp)]
        return counts

    def settle(self) -> None:
        """Apply what is noted."""
        if self._to_clear:
            self._clear()
        if not self._noted:
            return
        sizes = [len(change.ids) // 8 for change in self._noted]
        ids = np.frombuffer(b"".join([change.ids for change in self._noted]), np.uint64)
        workers = np.repeat([change.worker for change in self._noted], sizes)
        stores = np.repeat([change.stores for change in self._noted], sizes)
        self._noted, self._noted_ids = [], 0
        rows = self._table.find(ids)
        unknown = np.flatnonzero(rows == 0)
        wanted = ids[unknown[stores[unknown]]]
        wanted = wanted[wanted != NO_ID]
        if wanted.size:
            self._enter(wanted)
            rows[unknown] = self._table.find(ids[unknown])
            self.dropped += int(np.count_nonzero(stores & (rows == 0) & (ids != NO_ID)))
        # Of a worker's changes of one block the last counts.
        pairs = rows * self.width + workers
        latest = np.unique(pairs[::-1], return_index=True)[1]
        latest = pairs.size - 1 - latest
        self._set(*(each[latest[rows[latest] > 0]] for each in (rows, workers, stores)))

    def _set(self, rows: Rows, workers: Rows, stores: NDArray[np.bool_]) -> None:
        """Set or clear a bit for each of these distinct pairs of row and worker; rows ascend."""
        for word, masks in enumerate(self._masks):
            here = np.flatnonzero(workers // _WORD == word)
            bits = np.uint64(1) << (workers[here] % _WORD).astype(np.uint64)
            changed = (masks[rows[here]] & bits != 0) != stores[here]
            here, bits = here[changed], bits[changed]
            np.bitwise_xor.at(masks, rows[here], bits)
            np.add.at(self._held, workers[here], np.where(stores[here], 1, -1))
        self._release(np.unique(rows[~stores]))

    def _enter(self, ids: Ids) -> None:
        """Give rows to unknown ids, in their order; those that find none are left out."""
        first = np.unique(ids, return_index=True)[1]
        first.sort()
        ids = ids[first]
        again = min(ids.size, self._free_rows)
        fresh = min(ids.size - again, self._most + 1 - self._end)
        top = self._free_rows
        rows = np.concatenate(
            (self._free[top - again : top][::-1], np.arange(self._end, self._end + fresh))
        ).astype(np.intp)
        self._free_rows -= again
        self._end += fresh
        ids = ids[: rows.size]
        self._keys[rows] = ids
        self._table.add(ids, rows)

    def _release(self, rows: Rows) -> None:
        """Free those of these ascending rows that nobody holds."""
        held = np.zeros(rows.size, np.uint64)
        for masks in self._masks:
            held |= masks[rows]
        rows = rows[held == 0]
        if rows.size:
            self._table.remove(self._keys[rows])
            self._keys[rows] = NO_ID
            top = self._free_rows
            self._free[top : top + rows.size] = rows[::-1]
            self._free_rows += rows.size

    def _clear(self) -> None:
        """Clear workers together, in one sweep over each word."""
        touched: list[Rows] = []
        for word, masks in enumerate(self._masks):
            bits = sum(1 << number % _WORD for number in self._to_clear if number // _WORD == word)
            if bits:
                for start in range(0, self._end, _SCANNED):
                    part = masks[start : min(start + _SCANNED, self._end)]
                    rows = np.flatnonzero(part & np.uint64(bits))
                    part[rows] &= np.uint64(~bits & (1 << _WORD) - 1)
                    touched.append(rows + start)
        self._held[list(self._to_clear)] = 0
        self._to_clear = set()
        self._release(np.unique(np.concatenate(touched)))
