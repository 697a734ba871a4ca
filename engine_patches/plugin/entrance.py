from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import islice
from typing import Any

from engine_patches.plugin.compat_admission import holds_memory
from engine_patches.plugin.compat_names import BESIDE, first_name

_FCFS = "fcfs"


class Entrance:
    """Admits only chosen requests; vLLM does the rest of scheduling.

    The scheduler's own constructor has run.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._beside = first_name(scheduler, BESIDE)
        # Its queue while the chosen ones are alone in vLLM's, and requests from beside it.
        self._aside: Any = None
        self._aside_beside: list[Any] = []
        # Those that vLLM had passed over: it compares their number with that of all that wait.
        self._aside_deferred: set[Any] = set()
        # Maximum of tokens that a step computes.
        self.step_tokens = int(scheduler.max_num_scheduled_tokens)
        # Maximum of one request's prompt tokens in a step; 0: unlimited.
        self.prompt_chunk = int(scheduler.scheduler_config.long_prefill_token_threshold)
        # vLLM's queue is first come, first served, so that it can be reordered.
        self.in_order = scheduler.policy.value == _FCFS
        self.remote = scheduler.connector is not None  # KV may come from elsewhere
        # Running requests may grow by other than one token a step: by speculative tokens, or not at
        # all if KV from elsewhere fails to arrive.
        self.uneven = self.remote or scheduler.num_spec_tokens > 0

    @property
    def holders(self) -> Sequence[Any]:
        """Requests outside the queue that wait and hold memory.

        Their KV is being transferred, or they are sessions between two inputs.
        """
        return [one for one in getattr(self._scheduler, self._beside) if holds_memory(one)]

    @property
    def paused(self) -> int:
        """Number of sessions that wait for more input; vLLM counts them as running."""
        return int(self._scheduler.num_waiting_for_streaming_input)

    def admit(self, ids: Sequence[str], inside: Container[str]) -> None:
        """Let only these requests enter in the next step, as far as vLLM finds tokens and memory.

        All others are set aside: vLLM passes over those that cannot run yet, and takes the next.
        ``inside`` must not be held back: ids of requests that run, or wait outside the queue and
        hold memory, or held it until their KV transfer failed.
        """
        scheduler = self._scheduler
        beside = getattr(scheduler, self._beside)
        chosen = set(ids)

        def aside(one: Any) -> bool:
            return one.request_id not in chosen and one.request_id not in inside

        self._aside_beside = [one for one in beside if aside(one)]
        if self._aside_beside:
            beside.remove_requests(self._aside_beside)
        if deferred := getattr(scheduler, "deferred_waiting", None):  # not before 0.31
            self._aside_deferred = {one for one in deferred if aside(one)}
            deferred -= self._aside_deferred
        queue = self._aside = scheduler.waiting
        if self.remote:  # its KV did not come, and it waits in the queue again
            ids = [*(one.request_id for one in queue if one.request_id in inside), *ids]
        scheduler.waiting = type(queue)()
        for request in _taken(queue, ids):
            scheduler.waiting.add_request(request)

    def admit_all(self) -> None:
        """Bring back those set aside, behind requests that were chosen, or preempted since."""
        scheduler = self._scheduler
        if self._aside is not None:
            for request in reversed(list(scheduler.waiting)):
                self._aside.prepend_request(request)
            scheduler.waiting, self._aside = self._aside, None
        beside = getattr(scheduler, self._beside)
        for request in self._aside_beside:
            beside.add_request(request)
        self._aside_beside = []
        if self._aside_deferred:
            scheduler.deferred_waiting |= self._aside_deferred
            self._aside_deferred = set()


def _taken(queue: Any, ids: Sequence[str]) -> Iterable[Any]:
    """Remove those of these requests that are in a queue, and return them in this order."""
    if [request.request_id for request in islice(queue, len(ids))] == list(ids):
        return [queue.pop_request() for _ in ids]
    place = {id_: number for number, id_ in enumerate(ids)}
    found = [request for request in queue if request.request_id in place]
    queue.remove_requests(found)
    return sorted(found, key=lambda request: place[request.request_id])
