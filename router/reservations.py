"""Room that is made in time for requests that fit nowhere, before their patience is over.

A long prompt that has to enter at its deadline lifts one worker far above all others, and they wait
for it until they have caught up: G - 1 of them. A worker that is kept below the others before it
comes costs its own distance only. So the request's work is counted on that worker ahead of time,
as much of it as leaves the worker no fuller than the fullest. This is ours, not the paper's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from router.forecast import Outlook
from router.types import WorkerView
from router.workload import Floats

# So many of the workers, and one at least, are lowered at a time.
_SHARE = 0.25


class Reservations:
    """Which worker is lowered for which waiting request of one group; it stays the same one."""

    def __init__(self) -> None:
        self._worker: dict[str, str] = {}

    def make_room(
        self,
        wanted: Sequence[tuple[str, float]],
        workers: Sequence[WorkerView],
        outlook: Outlook,
    ) -> Outlook:
        """The outlook with the work that is to come counted on the workers that are lowered.

        Args:
            wanted: requests that have waited for long, the oldest first, and how many tokens of
                room there should be for each by now.
            workers: the live ones.
            outlook: rows as the workers.
        """
        row = {worker.id: index for index, worker in enumerate(workers)}
        loads = outlook.work[:, 0]
        self._choose([request_id for request_id, _ in wanted], row, loads)
        if not self._worker:
            return outlook
        work, peak = outlook.work.copy(), loads.max()
        for request_id, tokens in wanted:
            if request_id in self._worker:
                index = row[self._worker[request_id]]
                work[index] += min(tokens, peak - loads[index])
        return replace(outlook, work=work)

    def _choose(self, wanted: Sequence[str], row: Mapping[str, int], loads: Floats) -> None:
        """Keep what is still wanted, and give each other one a worker that is not lowered yet."""
        still = set(wanted)
        self._worker = {
            request_id: worker
            for request_id, worker in self._worker.items()
            if request_id in still and worker in row
        }
        for request_id in wanted:
            if len(self._worker) >= max(1, int(_SHARE * len(row))):
                break
            if request_id not in self._worker:
                free = row.keys() - self._worker.values()
                self._worker[request_id] = min(free, key=lambda name: (loads[row[name]], row[name]))
