"""The way into a vLLM engine: who waits first, and how many may enter."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from engine_patches.compat import ENTRANCE, ENTRANCE_CLASSES, SLOTS, check_names

_FCFS = "fcfs"


class Entrance:
    """Lets in only whom it is told, and leaves the rest of scheduling to vLLM.

    Args:
        scheduler: vLLM's, when its own constructor has run.

    Attributes:
        in_order: whether vLLM's queue is one of arrival, so that its order can be changed.

    Raises:
        PlugInError: this version of vLLM is not what it was written for.
    """

    def __init__(self, scheduler: Any) -> None:
        check_names(scheduler, ENTRANCE, ENTRANCE_CLASSES)
        self._scheduler = scheduler
        self._attribute = next(name for name in SLOTS if hasattr(scheduler, name))
        self._slots = getattr(scheduler, self._attribute)
        self.in_order = scheduler.policy.value == _FCFS

    @property
    def holding(self) -> int:
        """Requests that wait beside the queue, for KV from elsewhere: they hold memory already."""
        return int(self._scheduler.get_request_counts()[1]) - len(self._scheduler.waiting)

    def admit(self, ids: Sequence[str]) -> None:
        """In the next step these enter, as far as vLLM finds tokens and memory for them.

        Who waits beside the queue is not kept from running.
        """
        if self.in_order:
            self._bring_forward(ids)
        scheduler = self._scheduler
        # Sessions that wait for more input count as running.
        sessions = getattr(scheduler, "num_waiting_for_streaming_input", 0)
        entering = len(scheduler.running) + sessions + self.holding + len(ids)
        setattr(scheduler, self._attribute, min(self._slots, entering))

    def admit_all(self) -> None:
        """From now on vLLM lets in whom it likes."""
        setattr(self._scheduler, self._attribute, self._slots)

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
