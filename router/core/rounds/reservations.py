"""Room made in time for requests that fit nowhere, before their patience ends.

A long prompt forced in at its deadline lifts one worker far above the other G - 1, which then wait.
A worker lowered beforehand costs only its own distance. So part of the prompt's work counts on it
ahead of time, up to the fullest. This is not in the paper.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from router.core.forecast.forecast import Floats, Outlook
from router.core.types import WorkerView

# Share of the workers, at least one, that are lowered at a time.
_SHARE = 0.25


class Reservations:
    """The worker lowered for each waiting request of one group (``lowered``); it stays the same."""

    def __init__(self) -> None:
        self.lowered: dict[str, str] = {}

    def make_room(
        self,
        wanted: Sequence[tuple[str, float]],
        workers: Sequence[WorkerView],
        outlook: Outlook,
    ) -> Outlook:
        """Add the future work to the workers that are lowered.

        ``wanted`` lists long-waiting requests, oldest first, with the tokens of room due by now;
        empty: all reservations end. Rows of the outlook are in the workers' order.
        """
        if not wanted:
            self.lowered.clear()
            return outlook
        row = {worker.id: index for index, worker in enumerate(workers)}
        loads = outlook.work[:, 0]
        self._choose([request_id for request_id, _ in wanted], row, loads)
        work, peak = outlook.work.copy(), loads.max()
        for request_id, tokens in wanted:
            if request_id in self.lowered:
                index = row[self.lowered[request_id]]
                work[index] += min(tokens, peak - loads[index])
        return replace(outlook, work=work)

    def _choose(self, wanted: Sequence[str], row: Mapping[str, int], loads: Floats) -> None:
        still = set(wanted)
        self.lowered = {
            request_id: worker
            for request_id, worker in self.lowered.items()
            if request_id in still and worker in row
        }
        for request_id in wanted:
            if len(self.lowered) >= max(1, int(_SHARE * len(row))):
                break
            if request_id not in self.lowered:
                free = row.keys() - self.lowered.values()
                self.lowered[request_id] = min(free, key=lambda name: (loads[row[name]], row[name]))
