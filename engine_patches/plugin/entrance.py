from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from engine_patches.plugin.compat import SLOTS, check_names, first_name
from engine_patches.plugin.compat_admission import BESIDE, ENTRANCE, ENTRANCE_CLASSES, holds_memory

_FCFS = "fcfs"


class Entrance:
    """Admits only chosen requests; vLLM does the rest of scheduling. PlugInError: incompatible.

    The scheduler's own constructor has run.
    """

    def __init__(self, scheduler: Any) -> None:
        check_names(scheduler, ENTRANCE, ENTRANCE_CLASSES)
        self._scheduler = scheduler
        self._attribute = first_name(scheduler, SLOTS)
        self._slots = getattr(scheduler, self._attribute)
        self._beside = first_name(scheduler, BESIDE)
        self._aside: Any = None
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

    def admit(self, ids: Sequence[str], inside: int) -> None:
        """Let these requests enter in the next step, as far as vLLM finds tokens and memory.

        ``inside``: number of requests that must not be held back: running ones, and those that wait
        outside the queue and hold memory, or held it until their KV transfer failed.
        """
        if self.in_order:
            self._bring_forward(ids)
        scheduler = self._scheduler
        running = max(len(scheduler.running) + self.paused, inside)
        setattr(scheduler, self._attribute, min(self._slots, running + len(ids)))
        if scheduler.connector is not None:
            # A KV transfer takes memory without a slot: only these requests stay in the queue.
            queue = self._aside = scheduler.waiting
            scheduler.waiting = type(queue)()
            for _ in range(min(len(ids), len(queue))):
                scheduler.waiting.add_request(queue.pop_request())

    def admit_all(self) -> None:
        scheduler = self._scheduler
        setattr(scheduler, self._attribute, self._slots)
        if self._aside is not None:
            for request in reversed(list(scheduler.waiting)):
                self._aside.prepend_request(request)
            scheduler.waiting, self._aside = self._aside, None

    def _bring_forward(self, ids: Sequence[str]) -> None:
        queue = self._scheduler.waiting
        if [request.request_id for request in islice(queue, len(ids))] == list(ids):
            return
        place = {id_: number for number, id_ in enumerate(ids)}
        chosen = [request for request in queue if request.request_id in place]
        queue.remove_requests(chosen)
        chosen.sort(key=lambda request: place[request.request_id])
        for request in reversed(chosen):
            queue.prepend_request(request)
