"""Requests enter in waves where their prompts make all workers wait.

A step lasts until the slowest worker has computed its prompts. A prompt alone delays everybody by
its whole time; prompts that enter together, on all workers alike, delay everybody once. Slots are
empty meanwhile. As with any stock that is ordered now and then, both costs are least in all where
they are equal. Of a wave's delay only a part counts, since a larger wave delays more as well. This
is not in the paper.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from router.core.step_time import StepTime
from router.core.types import Assignment, Hits, Request, WorkerView

# Part of a wave's delay that empty slots may cost before it enters. Found by simulation: a quarter
# to the whole are alike, where prompts cost 100 to 1,000 KV tokens' worth.
_WORTH = 0.5


class PromptWaves:
    """The waves of one group."""

    def __init__(self) -> None:
        self._lost_s = 0.0
        self._seen_s = 0.0
        self._empty = 0.0  # share of the slots, since the last round

    def wait(self, delay_s: float, empty: float, waited_s: float) -> bool:
        """Whether a wave waits for a later round.

        Args:
            delay_s: time that it would make all workers wait.
            empty: share of the slots that it would fill.
            waited_s: time of all steps so far in which requests waited.
        """
        self.pass_by(waited_s)
        if _WORTH * delay_s > self._lost_s:
            self._empty = empty
            return True
        self._lost_s = 0.0
        return False

    def pass_by(self, waited_s: float) -> None:
        """A round without a wave: what is empty from now on waits for no other requests."""
        self._lost_s += self._empty * (waited_s - self._seen_s)
        self._seen_s, self._empty = waited_s, 0.0


def delay_s(
    assignments: Sequence[Assignment],
    requests: Mapping[str, Request],
    workers: Sequence[WorkerView],
    cost: StepTime,
    hits: Hits | None = None,
) -> float:
    """Time that the requests make all workers wait: what the slowest gains, less the mean gain.

    Negative if they fill up what others wait for anyhow.
    """
    row = {worker.id: index for index, worker in enumerate(workers)}
    work_s = np.array(
        [cost.work_s(w.load_tokens, w.requests, w.pending_prompt_tokens) for w in workers]
    )
    added_s = np.zeros_like(work_s)
    for request_id, worker_id in assignments:
        request, index = requests[request_id], row[worker_id]
        computed = request.prompt_tokens - (hits(request)[index] if hits else 0)
        added_s[index] += request.slots * cost.work_s(request.prompt_tokens, 1, computed)
    slowest_s, alike_s = float((work_s + added_s).max()), float(work_s.max() + added_s.mean())
    return 0.0 if math.isclose(slowest_s, alike_s) else slowest_s - alike_s
